// @ts-check
/** Messages about loaders that were found, swapped or left. */

/** @import { ToastMessage } from "../comfyui" */
/** @import { Key, Words } from "../words" */
/** @import { Answer } from "../run/expectations" */
/** @import { Decision, Reason, Use } from "./found" */

import { PAIRS } from "./pairs.js";

/** Milliseconds for which a message that needs no reaction is visible. */
const SHORT = 6_000;

/**
 * Return the numbers of models, text encoders and VAEs in words. A node in a subgraph counts once, however often the subgraph is used.
 *
 * @param {readonly Use[]} uses
 * @param {Words} words
 * @returns {string}
 */
export function counted(uses, words) {
  const once = new Map(uses.map(({ place, node }) => [place, node.type]));
  const kinds = [...once.values()].map((type) => PAIRS.find(({ one, all }) => [one, all].includes(type))?.holds);
  /** @type {(holds: string, one: Key, more: Key) => string} */
  const number = (holds, one, more) => {
    const count = kinds.filter((kind) => kind === holds).length;
    return count ? words.say(count === 1 ? one : more, { count }) : "";
  };
  const [one = "", two = "", three = ""] = [
    number("model", "swap.model", "swap.models"),
    number("text encoder", "swap.encoder", "swap.encoders"),
    number("vae", "swap.vae", "swap.vaes"),
  ].filter(Boolean);
  if (three) return words.say("swap.three", { one, two, three });
  return two ? words.say("doctor.and", { one, other: two }) : one;
}

/**
 * Return the message after a swap.
 *
 * @param {"all" | "one"} way
 * @param {readonly Use[]} uses the uses that were swapped
 * @param {Omit<Decision, "places">} decision
 * @param {Words} words
 * @returns {ToastMessage}
 */
export function outcomeOf(way, uses, { changed, left, silent }, words) {
  const reasons = [
    ...changed.map((each) => lineOf("swap.changed", each, words)),
    ...left.map((each) => lineOf("swap.left", each, words)),
  ];
  const lines = [...new Set([...sharedIn(uses, words), ...reasons])];
  const what = counted(uses, words);
  const life = reasons.length ? {} : { life: SHORT };
  if (!what) {
    const nothing = words.say(way === "all" ? "swap.nothing.all" : "swap.nothing.one");
    if (silent && !lines.length) lines.push(words.say("swap.silent"));
    return { severity: "info", summary: nothing, detail: lines.join("\n"), ...life };
  }
  const summary = words.say(way === "all" ? "swap.done.all" : "swap.done.one", { what });
  const detail = [...lines, words.say("swap.undo")].join("\n");
  return { severity: left.length ? "info" : "success", summary, detail, ...life };
}

/**
 * Return the line about the next run after a swap: the expected gain and the next step, or the reason why it cannot run.
 *
 * @param {readonly Answer[] | undefined} answers the server's answers about the loaders; undefined without a GPU
 * @param {Words} words
 * @returns {{ line: string, refused: boolean }}
 */
export function nextOf(answers, words) {
  if (!answers) return { line: words.say("swap.no-gpu"), refused: false };
  const refusal = answers.find(({ refused }) => refused);
  if (refusal) return { line: words.told(refusal.said), refused: true };
  const expected = [...new Set(answers.map(({ brief }) => words.told(brief)).filter(Boolean))].join("; ");
  return { line: expected ? words.say("swap.next", { expected }) : words.say("swap.run"), refused: false };
}

/** Return a line for each place with more than one use. */
/** @type {(uses: readonly Use[], words: Words) => string[]} */
function sharedIn(uses, words) {
  return uses.flatMap(({ place, node: { title } }) => {
    const count = uses.filter((each) => each.place === place).length;
    return count > 1 ? [words.say("swap.shared", { title, count })] : [];
  });
}

/** @type {(key: "swap.changed" | "swap.left", reason: Reason, words: Words) => string} */
function lineOf(key, { use, why }, words) {
  const reason = "key" in why ? words.say(why.key, why.values) : words.told(why.said);
  return words.say(key, { title: use.node.title, why: reason });
}
