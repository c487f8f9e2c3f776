// @ts-check
/** A mark on a node whose run could have been faster, and on the subgraph nodes around it. The node's text says how. */

/** @import { Api, App } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Signs } from "./signs" */

import { pathOf } from "./node_path.js";

const COLOURS = { fgColor: "#1a1300", bgColor: "#f5b301" };
const KIND = "slow";

/**
 * Mark nodes after each of their runs. A mark stays until the next run.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Signs} signs
 * @param {Words} words
 */
export function showOutcomes(app, api, signs, words) {
  const sign = `⚠ ${words.say("outcome.slow")}`;
  api.addEventListener("execution_start", () => signs.clear(KIND));
  api.addEventListener("parallel.ran", ({ detail: { node: id, outcome } }) => {
    for (const node of pathOf(app, id)) signs.show(node, KIND, outcome.warnings.length ? sign : "", COLOURS);
  });
}
