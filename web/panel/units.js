// @ts-check
/** Numbers in a readable form. */

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/**
 * Format bytes with three digits, in powers of ten as plans count them.
 *
 * @param {number} count
 * @returns {string}
 */
export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit ? digits(value) : value} ${UNITS[unit]}`;
}

/**
 * Format a time span with three digits.
 *
 * @param {number} count seconds
 * @returns {string}
 */
export function seconds(count) {
  return count < 0.9995 ? `${digits(1000 * count)} ms` : `${digits(count)} s`;
}

/**
 * Format a moment as the time of day, after the date if that is not today's.
 *
 * @param {number} at seconds since 1970
 * @param {string} locale
 * @returns {string}
 */
export function clock(at, locale) {
  const then = new Date(1000 * at);
  const time = then.toLocaleTimeString(locale, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return then.toDateString() === new Date().toDateString() ? time : `${then.toLocaleDateString(locale)} ${time}`;
}

/**
 * Format a share as a percentage.
 *
 * @param {number} part
 * @param {number} whole
 * @returns {string}
 */
export function percent(part, whole) {
  return `${whole > 0 ? Math.round((100 * part) / whole) : 0} %`;
}

/** @type {(value: number) => string} */
function digits(value) {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}
