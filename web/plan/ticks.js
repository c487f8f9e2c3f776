// @ts-check
/** Which of this machine's GPUs a text for `devices` means, and the text for another choice. */

/** What stands for all GPUs that are worth using together. */
export const AUTO = "auto";
const EVERY = [AUTO, "all"];

/**
 * The GPUs that a text names; nothing where it is something else than a list of GPUs that are here, each once.
 *
 * @param {string} devices
 * @param {number} count of this machine's GPUs
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
 * The text once the tick of a GPU is another; as it was where that would leave none.
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
