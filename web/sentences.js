// @ts-check
/** Translation of the server's texts about a run: English sentences with values, found by their patterns. */

/** @typedef {Readonly<Record<string, string>>} Sentences by their English, such as `Starting {count} workers, {seconds} s` */

/** A regular expression for the values of one type, and the names of the placeholders that have this type. */
/** @typedef {{ readonly pattern: string, readonly names: readonly string[] }} ValueType */
/** @typedef {Readonly<Record<string, ValueType>>} ValueTypes by their names, such as `number` */

const VALUE = /\{(\w+)\}/g;
/** The pattern of a value without a type: any text. */
const TEXT = ".+?";
const FULL_STOP = "。";

/**
 * Translate a text sentence by sentence, and keep unknown sentences.
 *
 * Return undefined if the first sentence is unknown: then the text is not the pack's.
 *
 * @param {string} text
 * @param {Sentences} sentences
 * @param {ValueTypes} types
 * @returns {string | undefined}
 */
export function translated(text, sentences, types) {
  const [first = "", ...rest] = text.split(/(?<=\.)(\s)/);
  const begun = sentence(first, sentences, types);
  if (begun === undefined) return undefined;
  return rest.reduce((before, part) => {
    if (part === " " && before.endsWith(FULL_STOP)) return before;
    return before + (sentence(part, sentences, types) ?? part);
  }, begun);
}

/** @type {(text: string, sentences: Sentences, types: ValueTypes) => string | undefined} */
function sentence(text, sentences, types) {
  for (const [english, other] of Object.entries(sentences)) {
    const names = [...english.matchAll(VALUE)].map(([name]) => name);
    const values = patternOf(english, types).exec(text)?.slice(1);
    if (!values) continue;
    const told = values.map((value) => sentence(value, sentences, types) ?? value);
    return other.replace(VALUE, (name) => told[names.indexOf(name)] ?? name);
  }
  return undefined;
}

/** @type {(english: string, types: ValueTypes) => RegExp} */
function patternOf(english, types) {
  const source = english
    .split(VALUE) // text and names of placeholders in turn
    .map((part, index) => (index % 2 ? `(${valuePattern(part, types)})` : part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")))
    .join("");
  return new RegExp(`^${source}$`, "s");
}

/** @type {(name: string, types: ValueTypes) => string} */
function valuePattern(name, types) {
  return Object.values(types).find(({ names }) => names.includes(name))?.pattern ?? TEXT;
}
