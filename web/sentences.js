// @ts-check
/** Translation of the server's texts about a run: English sentences with values, found by their patterns. */

/** @typedef {Readonly<Record<string, string>>} Sentences by their English, such as `Starting {count} workers, {seconds} s` */

const VALUE = /\{\w+\}/g;
const FULL_STOP = "。";

/**
 * Translate a text sentence by sentence, and keep unknown sentences.
 *
 * Return undefined if the first sentence is unknown: then the text is not the pack's.
 *
 * @param {string} text
 * @param {Sentences} sentences
 * @returns {string | undefined}
 */
export function translated(text, sentences) {
  const [first = "", ...rest] = text.split(/(?<=\.)(\s)/);
  const begun = sentence(first, sentences);
  if (begun === undefined) return undefined;
  return rest.reduce((before, part) => {
    if (part === " " && before.endsWith(FULL_STOP)) return before;
    return before + (sentence(part, sentences) ?? part);
  }, begun);
}

/** @type {(text: string, sentences: Sentences) => string | undefined} */
function sentence(text, sentences) {
  for (const [english, other] of Object.entries(sentences)) {
    const names = [...english.matchAll(VALUE)].map(([name]) => name);
    const values = patternOf(english).exec(text)?.slice(1);
    if (!values) continue;
    const told = values.map((value) => sentence(value, sentences) ?? value);
    return other.replace(VALUE, (name) => told[names.indexOf(name)] ?? name);
  }
  return undefined;
}

/** @type {(english: string) => RegExp} */
function patternOf(english) {
  const parts = english.split(VALUE).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("(.+?)")}$`, "s");
}
