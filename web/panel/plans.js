// @ts-check
/** The last run's plan among those it was chosen from, and what each rank spent. */

/** @import { Alternative, Comparison, RankCost, Run, Status } from "./state" */

import { element, progress } from "./elements.js";
import { bytes, percent, seconds } from "./units.js";

/**
 * What a run took, and was predicted to.
 *
 * @param {Run} run
 * @returns {string}
 */
export function timeOf({ ranks, steps, decision }) {
  const longest = Math.max(...ranks.map((rank) => rank.seconds));
  if (!steps) return seconds(longest);
  const predicted = decision?.alternatives.find((each) => each.chosen);
  const against = predicted ? `, ${seconds(predicted.seconds)} predicted` : "";
  return `${seconds(longest)} for ${steps} step${steps > 1 ? "s" : ""}: ${seconds(longest / steps)} each${against}`;
}

/**
 * The plans that were predicted, fastest first, with the chosen one marked, and one device alone.
 *
 * @param {NonNullable<Run["decision"]>} decision
 * @returns {HTMLElement}
 */
export function plansView({ why, memory, single, alternatives }) {
  const every = alternatives.some((each) => each.devices === 1) ? alternatives : [...alternatives, single];
  const listed = every.toSorted((a, b) => Number(b.fits) - Number(a.fits) || a.seconds - b.seconds);
  const slowest = Math.max(...listed.map((each) => each.seconds));
  const head = element("tr", "", cell("th", "plan"), cell("th", "a step, predicted"), cell("th", "memory"));
  const rows = listed.map((each) => planRow(each, slowest));
  const table = element("table", "pp-table", element("thead", "", head), element("tbody", "", ...rows));
  const note = element("p", "pp-note", `Each device had ${bytes(memory)} free.`);
  return element("div", "", element("p", "", why), table, note);
}

/**
 * What each rank computed, exchanged, sent and held at most.
 *
 * @param {Run} run
 * @returns {HTMLElement}
 */
export function costsView({ ranks }) {
  const names = ["rank", "compute", "exchange", "sent", "peak"];
  const head = element("tr", "", ...names.map((name) => cell("th", name)));
  const body = element("tbody", "", ...ranks.map(costRow));
  return element("table", "pp-table", element("thead", "", head), body);
}

/**
 * How far a comparison has got, or what came out.
 *
 * @param {Status["comparison"]} comparison
 * @returns {HTMLElement}
 */
export function comparisonView({ doing, result, said }) {
  return element(
    "div",
    "",
    doing && progress(doing),
    result && !doing && element("p", "", gain(result)),
    said && element("p", "pp-note", said),
  );
}

/**
 * A comparison in a sentence.
 *
 * @param {Comparison} comparison
 * @returns {string}
 */
export function gain({ plan, seconds: together, alone, predicted, predicted_alone, steps, of, without_adapters }) {
  const times = `${seconds(together)} a step with ${plan}, ${seconds(alone)} on one device`;
  const measured = `${(alone / together).toFixed(2)}x as fast (${(predicted_alone / predicted).toFixed(2)}x predicted)`;
  return `Measured on ${steps} of ${of} steps${without_adapters ? ", without LoRA" : ""}: ${times}, so ${measured}.`;
}

/** @type {(alternative: Alternative, slowest: number) => HTMLElement} */
function planRow(alternative, slowest) {
  const { plan, devices, chosen, parts, memory, fits, changes } = alternative;
  const notes = [!fits && "too large", changes && "changes the picture"].filter(Boolean).join(", ");
  const name = element("td", "", `${chosen ? "✓ " : ""}${devices === 1 ? "one device" : plan}`);
  if (notes) name.append(element("div", "pp-note", notes));
  const bar = element("span", "pp-length");
  bar.style.width = `${(100 * alternative.seconds) / slowest}%`;
  const time = element("td", "pp-time", element("span", "", seconds(alternative.seconds)), bar);
  time.title = Object.entries(parts)
    .map(([part, spent]) => `${part} ${seconds(spent)}`)
    .join("\n");
  return element("tr", chosen ? "pp-chosen" : fits ? "" : "pp-unfit", name, time, cell("td", bytes(memory)));
}

/** @type {(cost: RankCost) => HTMLElement} */
function costRow({ rank, device, seconds: spent, waiting, sent, peak }) {
  const total = Object.values(sent).reduce((sum, count) => sum + count, 0);
  const first = cell("td", String(rank));
  first.title = device;
  const exchange = cell("td", percent(waiting, spent));
  exchange.title = `${seconds(waiting)} in which it waited for others or sent`;
  const traffic = cell("td", bytes(total));
  traffic.title = Object.entries(sent)
    .map(([kind, count]) => `${kind} ${bytes(count)}`)
    .join("\n");
  return element("tr", "", first, cell("td", seconds(spent - waiting)), exchange, traffic, cell("td", bytes(peak)));
}

/** @type {(tag: "td" | "th", text: string) => HTMLElement} */
function cell(tag, text) {
  return element(tag, "", text);
}
