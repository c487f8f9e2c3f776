// @ts-check
/** What the server says of a run, in another language: English sentences with values, found by their patterns. */

/** @typedef {Readonly<Record<string, string>>} Sentences by their English, such as `Starting {count} workers, {seconds} s` */

const VALUE = /\{\w+\}/g;
const FULL_STOP = "。";

/**
 * A text, sentence by sentence; one that is not known stays as it is. Nothing where the first is not known: it is another's text.
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
