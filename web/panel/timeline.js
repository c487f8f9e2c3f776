// @ts-check
/** The last run as a picture: one row per rank, time from left to right, each bin filled with the rank's kinds of work. */

/** @import { Words } from "../words" */
/** @import { RankTimeline, Run, Timeline } from "./state" */

import { element, shape } from "./elements.js";
import { KINDS, phaseAt, prepared, shares, totals } from "./shares.js";
import { percent, seconds } from "./units.js";

/** Heights in pixels. Many ranks get flatter rows, so that 16 of them are visible at once. */
const ROW = { tall: 20, flat: 11, gap: 3, manyRanks: 8 };

/** Largest part of a run for which its preparation is shown without request. */
const LITTLE = 0.05;

/**
 * Return the timeline with its legend. A line below shows the rank's work at the pointer.
 *
 * @param {Run} run
 * @param {boolean} whole true to also show the time before the first step
 * @param {(whole: boolean) => void} choose called when the user switches this
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function timelineView({ timeline, kind, calls }, whole, choose, words) {
  const end = timeline.bins * timeline.width;
  const before = prepared(timeline);
  const long = before > LITTLE * end;
  const first = long && !whole ? Math.floor(before / timeline.width) : 0;
  const told = element("div", "pp-told");
  const rows = timeline.ranks.map((rank) => row(rank, timeline, { first, calls, told }, words));
  const preparation = words.say("timeline.preparation", { time: seconds(before), kind: words.name(kind) });
  return element(
    "div",
    "pp-timeline",
    legend(timeline, first, words),
    ...rows,
    axis(timeline, { first, calls }, words),
    told,
    long && element("label", "pp-whole", checkbox(whole, choose), ` ${preparation}`),
  );
}

/**
 * Return the outline of one layer of a stack: from `low` to `high` in each bin, as parts of the height.
 *
 * @param {readonly number[]} low
 * @param {readonly number[]} high
 * @returns {string} an SVG path in a box 1 unit wide per bin and 1 high, whose y axis points downwards
 */
export function layer(low, high) {
  const parts = [];
  for (let bin = 0; bin < high.length; bin += 1) {
    const bottom = low[bin] ?? 0;
    const top = high[bin] ?? 0;
    if (top > bottom) parts.push(`M${bin} ${round(1 - bottom)}V${round(1 - top)}h1V${round(1 - bottom)}z`);
  }
  return parts.join("");
}

/** @typedef {{ first: number, calls: number }} View from which bin on; how many calls of the model, 0 where steps are marked */

/** @type {(rank: RankTimeline, timeline: Timeline, view: View & { told: HTMLElement }, words: Words) => HTMLElement} */
function row(rank, timeline, { first, calls, told }, words) {
  const bins = shares(rank, timeline).slice(first);
  const many = timeline.ranks.length > ROW.manyRanks;
  const height = many ? ROW.flat : ROW.tall;
  let low = bins.map(() => 0);
  const layers = ["computing", "preparing", "sending", "waiting"].map((name) => {
    const kind = /** @type {typeof KINDS[number]} */ (name);
    const high = bins.map((bin, at) => (low[at] ?? 0) + bin[kind]);
    const path = shape("path", { class: `pp-${kind}`, d: layer(low, high) });
    low = high;
    return path;
  });
  const box = { viewBox: `0 0 ${bins.length} 1`, preserveAspectRatio: "none", height, width: "100%", class: "pp-row" };
  const picture = shape("svg", { ...box, role: "img", "aria-label": summary(rank, timeline, first, words) }, ...layers);
  picture.addEventListener("pointermove", (event) => {
    const { left, width } = picture.getBoundingClientRect();
    const at = Math.min(bins.length - 1, Math.max(0, Math.floor(((event.clientX - left) / width) * bins.length)));
    told.textContent = moment(rank, timeline, { first: first + at, calls }, words);
  });
  picture.addEventListener("pointerleave", () => {
    told.textContent = "";
  });
  const name = element("span", "pp-rank", String(rank.rank));
  name.title = rank.device;
  const line = element("div", "pp-line", name, picture);
  line.style.marginBottom = `${ROW.gap}px`;
  return line;
}

/** @type {(timeline: Timeline, first: number, words: Words) => HTMLElement} */
function legend(timeline, first, words) {
  const from = first * timeline.width;
  const all = { preparing: 0, computing: 0, sending: 0, waiting: 0 };
  for (const rank of timeline.ranks) {
    const sums = totals(rank, timeline, from);
    for (const kind of KINDS) all[kind] += sums[kind];
  }
  const whole = KINDS.reduce((sum, kind) => sum + all[kind], 0);
  const shown = KINDS.filter((kind) => all[kind] >= 0.005 * whole);
  const items = shown.map((kind) => {
    const share = `${words.name(kind)} ${percent(all[kind], whole)}`;
    return element("span", "pp-key", element("i", `pp-swatch pp-${kind}`), share);
  });
  return element("div", "pp-legend", ...items);
}

/** @type {(timeline: Timeline, view: View, words: Words) => HTMLElement} */
function axis({ bins, width, steps }, { first, calls }, words) {
  const ticks = steps
    .map((at) => at / width - first)
    .filter((at) => at >= 0)
    .map((at) => shape("path", { d: `M${round(at)} 0v1`, class: "pp-tick", "vector-effect": "non-scaling-stroke" }));
  const box = { viewBox: `0 0 ${bins - first} 1`, preserveAspectRatio: "none", height: 5, width: "100%" };
  const line = element("div", "pp-line", element("span", "pp-rank"), shape("svg", box, ...ticks));
  const marks = words.say(calls ? "timeline.calls" : "timeline.marks");
  const told = [seconds(first * width), steps.length ? marks : "", seconds(bins * width)];
  const scale = element("div", "pp-scale", ...told.map((text) => element("span", "", text)));
  return element("div", "", line, scale);
}

/** @type {(rank: RankTimeline, timeline: Timeline, view: View, words: Words) => string} */
function moment(rank, timeline, { first: bin, calls }, words) {
  const at = bin * timeline.width;
  const parts = shares(rank, timeline)[bin];
  const step = timeline.steps.filter((begun) => begun <= at).length;
  const told = KINDS.filter((kind) => parts && parts[kind] >= 0.005).map(
    (kind) => `${words.name(kind)} ${percent(parts?.[kind] ?? 0, 1)}`,
  );
  const name = words.name(phaseAt(rank, at + timeline.width / 2));
  const begun = calls
    ? words.say("rank.call", { phase: name, call: step })
    : words.say("rank.step", { phase: name, step });
  const phase = step ? begun : name;
  const shown = told.join(", ") || words.say("timeline.done");
  return words.say("timeline.moment", { at: seconds(at), rank: rank.rank, phase, shares: shown });
}

/** @type {(rank: RankTimeline, timeline: Timeline, first: number, words: Words) => string} */
function summary(rank, timeline, first, words) {
  const sums = totals(rank, timeline, first * timeline.width);
  const told = KINDS.filter((kind) => sums[kind] > 0).map((kind) => `${words.name(kind)} ${seconds(sums[kind])}`);
  return words.say("timeline.row", { rank: rank.rank, device: rank.device, shares: told.join(", ") });
}

/** @type {(checked: boolean, choose: (checked: boolean) => void) => HTMLInputElement} */
function checkbox(checked, choose) {
  const box = element("input", "");
  box.type = "checkbox";
  box.checked = checked;
  box.addEventListener("change", () => choose(box.checked));
  return box;
}

/** @type {(value: number) => number} */
function round(value) {
  return Math.round(1000 * value) / 1000;
}
