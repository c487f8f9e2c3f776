// @ts-check
/** What a run came to: a mark on the node where it could have been faster; the text says how.
 *
 * The mark is a badge. Nodes 2.0 draws the badges that a node was made with, so there it stands behind the title as well,
 * where it is drawn and not kept: the node's own title, which is saved, stays as it is.
 */

/** @import { Api, App, BadgeClass, GraphNode } from "../comfyui" */
/** @import { Words } from "../words" */

import { nodeOf } from "./marks.js";

const COLOURS = { fgColor: "#1a1300", bgColor: "#f5b301" };

/**
 * Shows after each run of a node what it came to; a mark stays until a run without warnings.
 *
 * @param {App} app
 * @param {Api} api
 * @param {BadgeClass} Badge ComfyUI's class
 * @param {Words} words
 */
export function showOutcomes(app, api, Badge, words) {
  const sign = `⚠ ${words.say("outcome.slow")}`;
  api.addEventListener("parallel.ran", ({ detail: { node: id, outcome } }) => {
    const node = nodeOf(app, id);
    if (!node) return;
    mark(node, sign, outcome.warnings.length ? [new Badge({ text: sign, ...COLOURS })] : []);
  });
}

/** @type {(node: GraphNode, sign: string, ours: InstanceType<BadgeClass>[]) => void} */
function mark(node, sign, ours) {
  const before = node.badges;
  node.badges = [...before.filter((badge) => typeof badge === "function" || badge.text !== sign), ...ours];
  tell(node, { property: "badges", oldValue: before, newValue: node.badges });
  const title = ours.length ? `${node.title} ${sign}` : node.title;
  tell(node, { property: "title", oldValue: node.title, newValue: title });
  node.setDirtyCanvas(true, true);
}

/** @type {(node: GraphNode, change: { property: string, oldValue: unknown, newValue: unknown }) => void} */
function tell(node, change) {
  node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...change });
}
