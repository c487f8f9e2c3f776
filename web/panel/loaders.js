// @ts-check
/** The open workflow's loaders: the numbers that use one GPU and all GPUs, buttons to swap them, and the expected run. */

/** @import { Expectation } from "../run/expectations" */
/** @import { Words } from "../words" */
/** @import { Swap } from "../swap/swap" */

import { counted } from "../swap/said.js";
import { button, element } from "./elements.js";

/**
 * Return the view of the loaders in words, with the buttons. A workflow without loaders gets a note.
 *
 * @param {Swap} swap
 * @param {readonly Expectation[]} expectations
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function loadersView(swap, expectations, words) {
  const { one, encoders, all } = swap.loaders;
  const found = [
    one.length && words.say("swap.found", { what: counted(one, words) }),
    all.length && words.say("swap.using", { what: counted(all, words) }),
  ].filter(Boolean);
  const buttons = element(
    "div",
    "pp-buttons",
    button(
      words.say("swap.all"),
      words.say("swap.all.tooltip"),
      () => void swap.useAll(),
      !one.length && !encoders.length,
    ),
    button(words.say("swap.one"), words.say("swap.one.tooltip"), () => void swap.useOne(), !all.length),
  );
  const expected = expectations.map(({ title, file, said }) => element("p", "pp-note", `${title}, ${file}: ${said}`));
  const nothing = words.say(encoders.length ? "swap.silent" : "swap.nothing.all");
  return element("div", "", element("p", "", found.join(" ") || nothing), buttons, ...expected);
}
