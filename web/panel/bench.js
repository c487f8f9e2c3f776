// @ts-check
/** The benchmark of stock ComfyUI and the pack: its progress, the results so far, their row to copy and their file. */

/** @import { Api } from "../comfyui" */
/** @import { Key, Words } from "../words" */
/** @import { BenchSide, Status } from "./state" */

import { button, element, progress } from "./elements.js";
import { bytes, seconds } from "./units.js";

/** The folder of the files in ComfyUI's output folder. */
const FOLDER = "parallel-bench";

/** @type {Key[]} */
const HEAD = ["bench.side", "bench.step", "bench.whole", "bench.peak", "bench.error"];

/**
 * Return the view of the present measurement and of the results.
 *
 * @param {Status["bench"]} bench
 * @param {Api} api
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function benchView({ doing, sides, row, file, said }, api, words) {
  return element(
    "div",
    "",
    doing && progress(words.told(doing)),
    said && element("p", "pp-note", words.told(said)),
    sides.length > 0 && sidesView(sides, words),
    row && rowView(row, words),
    file && fileView(file, api, words),
  );
}

/** @type {(sides: readonly BenchSide[], words: Words) => HTMLElement} */
function sidesView(sides, words) {
  const head = element("tr", "", ...HEAD.map((key) => element("th", "", words.say(key))));
  const rows = sides.map((side) => sideRow(side, words));
  return element("table", "pp-table", element("thead", "", head), element("tbody", "", ...rows));
}

/** @type {(side: BenchSide, words: Words) => HTMLElement} */
function sideRow({ name, plan, step, whole, peak, error, failed }, words) {
  const first = element("td", "", words.told(name));
  first.title = words.told(plan);
  if (failed) {
    const why = element("td", "pp-text", failed);
    why.colSpan = HEAD.length - 1;
    return element("tr", "pp-unfit", first, why);
  }
  const told = [seconds(step), seconds(whole), bytes(peak), error === null ? "" : error.toExponential(1)];
  return element("tr", "", first, ...told.map((text) => element("td", "", text)));
}

/** @type {(row: string, words: Words) => HTMLElement} */
function rowView(row, words) {
  const text = element("textarea", "pp-row-text");
  text.readOnly = true;
  text.value = row;
  const copy = () => {
    text.select();
    document.execCommand("copy"); // navigator.clipboard is missing on a page that came by http from another machine
  };
  return element("div", "", text, button(words.say("bench.copy"), words.say("bench.copy.tooltip"), copy));
}

/** @type {(file: string, api: Api, words: Words) => HTMLElement} */
function fileView(file, api, words) {
  const link = element("a", "pp-link", file);
  link.href = api.apiURL(`/view?filename=${encodeURIComponent(file)}&subfolder=${FOLDER}&type=output`);
  link.download = file;
  return element("p", "pp-note pp-text", `${words.say("bench.file")} `, link);
}
