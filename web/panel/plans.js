// @ts-check
/** The last run's plan among the alternatives, and the costs of each rank. */

/** @import { Key, Words } from "../words" */
/** @import { Alternative, Comparison, RankCost, Run, Status } from "./state" */

import { element, progress } from "./elements.js";
import { bytes, percent, seconds } from "./units.js";

/**
 * Return the measured and the predicted time of a run, in words.
 *
 * @param {Run} run
 * @param {Words} words
 * @returns {string}
 */
export function timeOf(run, words) {
  const { ranks, steps, calls } = run;
  const longest = Math.max(...ranks.map((rank) => rank.seconds));
  if (calls) {
    return words.say(calls === 1 ? "run.call" : "run.calls", {
      total: seconds(longest),
      calls,
      each: seconds(longest / calls),
    });
  }
  if (!steps) return seconds(longest);
  const predicted = predictionOf(run)?.alternatives.find((each) => each.chosen);
  const values = { total: seconds(longest), steps, each: seconds(longest / steps) };
  const time = words.say(steps === 1 ? "run.step" : "run.steps", values);
  return predicted ? words.say("run.predicted", { time, predicted: seconds(predicted.seconds) }) : time;
}

/**
 * Return the decision of a run if its predicted times are shown: on GPUs, and if the machine was measured for the decision.
 *
 * With one device there is no choice, and no measurement.
 *
 * @param {Run} run
 * @returns {Run["decision"]}
 */
export function predictionOf({ ranks, decision }) {
  const shown = ranks.every(({ device }) => !device.endsWith("cpu"));
  return shown && decision?.alternatives.some(({ devices }) => devices > 1) ? decision : null;
}

/**
 * Return a table of the predicted plans, fastest first, with the chosen plan marked, and of one device alone.
 *
 * @param {NonNullable<Run["decision"]>} decision
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function plansView({ why, memory, single, alternatives }, words) {
  const every = alternatives.some((each) => each.devices === 1) ? alternatives : [...alternatives, single];
  const listed = every.toSorted((a, b) => Number(b.fits) - Number(a.fits) || a.seconds - b.seconds);
  const slowest = Math.max(...listed.map((each) => each.seconds));
  const head = heading(["plans.plan", "plans.step", "plans.memory"], words);
  const rows = listed.map((each) => planRow(each, slowest, words));
  const table = element("table", "pp-table", element("thead", "", head), element("tbody", "", ...rows));
  const note = element("p", "pp-note", words.say("plans.free", { bytes: bytes(memory) }));
  return element("div", "", element("p", "", words.told(why)), table, note);
}

/**
 * Return a table of each rank's computing and exchange times, sent bytes and peak memory.
 *
 * @param {Run} run
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function costsView({ ranks }, words) {
  const head = heading(["run.rank", "run.compute", "run.exchange", "run.sent", "run.peak"], words);
  const body = element("tbody", "", ...ranks.map((cost) => costRow(cost, words)));
  return element("table", "pp-table", element("thead", "", head), body);
}

/**
 * Return the view of a comparison's progress, or of its result.
 *
 * @param {Status["comparison"]} comparison
 * @param {number} last the number of the last run
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function comparisonView({ doing, result, said, run }, last, words) {
  const came = result && gain(result, words);
  return element(
    "div",
    "",
    doing && progress(words.told(doing)),
    came && !doing && element("p", "", run === last ? came : words.say("plans.earlier", { said: came })),
    said && element("p", "pp-note", words.told(said)),
  );
}

/**
 * Summarise a comparison in a sentence.
 *
 * @param {Comparison} comparison
 * @param {Words} words
 * @returns {string}
 */
export function gain(
  { plan, seconds: together, alone, predicted, predicted_alone, steps, of, without_adapters },
  words,
) {
  const also = predicted ? words.say("gain.predicted", { predicted: (predicted_alone / predicted).toFixed(2) }) : "";
  return words.say("gain", {
    plan: words.told(plan),
    steps,
    of,
    without: without_adapters ? words.say("gain.without") : "",
    together: seconds(together),
    alone: seconds(alone),
    measured: (alone / together).toFixed(2),
    also,
  });
}

/** @type {(alternative: Alternative, slowest: number, words: Words) => HTMLElement} */
function planRow(alternative, slowest, words) {
  const { plan, devices, chosen, parts, memory, fits, changes } = alternative;
  const notes = [!fits && words.say("plans.large"), changes && words.say("plans.changes")].filter(Boolean).join(", ");
  const name = element("td", "", `${chosen ? "✓ " : ""}${devices === 1 ? words.say("plans.one") : plan}`);
  if (notes) name.append(element("div", "pp-note", notes));
  const bar = element("span", "pp-length");
  bar.style.width = `${(100 * alternative.seconds) / slowest}%`;
  const time = element("td", "pp-time", element("span", "", seconds(alternative.seconds)), bar);
  time.title = Object.entries(parts)
    .map(([part, spent]) => `${part} ${seconds(spent)}`)
    .join("\n");
  return element("tr", chosen ? "pp-chosen" : fits ? "" : "pp-unfit", name, time, cell("td", bytes(memory)));
}

/** @type {(cost: RankCost, words: Words) => HTMLElement} */
function costRow({ rank, device, seconds: spent, waiting, sent, peak }, words) {
  const total = Object.values(sent).reduce((sum, count) => sum + count, 0);
  const first = cell("td", String(rank));
  first.title = device;
  const exchange = cell("td", percent(waiting, spent));
  exchange.title = words.say("run.exchange.tooltip", { time: seconds(waiting) });
  const traffic = cell("td", bytes(total));
  traffic.title = Object.entries(sent)
    .map(([kind, count]) => `${kind} ${bytes(count)}`)
    .join("\n");
  return element("tr", "", first, cell("td", seconds(spent - waiting)), exchange, traffic, cell("td", bytes(peak)));
}

/** @type {(keys: Key[], words: Words) => HTMLElement} */
function heading(keys, words) {
  return element("tr", "", ...keys.map((key) => cell("th", words.say(key))));
}

/** @type {(tag: "td" | "th", text: string) => HTMLElement} */
function cell(tag, text) {
  return element(tag, "", text);
}
