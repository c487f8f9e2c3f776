// @ts-check
/** The GPUs that a text for `devices` means, and the text after a click on a GPU's tick box. */

/** The text for all GPUs that are worth using together. */
export const AUTO = "auto";
const EVERY = [AUTO, "all"];

/**
 * Return the GPUs that a text names; undefined unless the text lists GPUs of this machine, each once.
 *
 * @param {string} devices
 * @param {number} count the number of this machine's GPUs
 * @returns {number[] | undefined}
 */
export function tickedOf(devices, count) {
  const wish = devices.trim().toLowerCase();
  if (EVERY.includes(wish)) return [...Array(count).keys()];
  /** @type {number[]} */
  const found = [];
  for (const part of wish.split(",")) {
    const [, first, last = first] = /^\s*(?:cuda:)?(\d+)(?:\s*-\s*(?:cuda:)?(\d+))?\s*$/.exec(part) ?? [];
    if (first === undefined || Number(last) >= count || Number(first) > Number(last)) return undefined;
    for (let index = Number(first); index <= Number(last); index++) found.push(index);
  }
  return new Set(found).size === found.length ? found : undefined;
}

/**
 * Return the text after a click on a GPU's tick box; the same text if no GPU would be left.
 *
 * @param {string} devices
 * @param {number} count
 * @param {number} index
 * @returns {string}
 */
export function afterTick(devices, count, index) {
  const before = tickedOf(devices, count) ?? [];
  const after = before.includes(index) ? before.filter((each) => each !== index) : [...before, index];
  if (!after.length) return devices;
  return after.length === count ? AUTO : after.toSorted((a, b) => a - b).join(",");
}
