// @ts-check
/** What a run came to: room for its text on the node, and a mark where it could have been faster; the text says how. */

/** @import { Api, App, BadgeClass, GraphNode } from "../comfyui" */

import { nodeOf } from "./marks.js";
import { makeRoom } from "./room.js";

export const SIGN = "⚠ could be faster";

const COLOURS = { fgColor: "#1a1300", bgColor: "#f5b301" };

/**
 * Shows after each run of a node what it came to; a mark stays until a run without warnings.
 *
 * @param {App} app
 * @param {Api} api
 * @param {BadgeClass} Badge ComfyUI's class
 */
export function showOutcomes(app, api, Badge) {
  api.addEventListener("parallel.ran", ({ detail: { node: id, outcome } }) => {
    const node = nodeOf(app, id);
    if (!node) return;
    makeRoom(node);
    mark(node, outcome.warnings.length ? [new Badge({ text: SIGN, ...COLOURS })] : []);
  });
}

/** @type {(node: GraphNode, ours: InstanceType<BadgeClass>[]) => void} */
function mark(node, ours) {
  const before = node.badges;
  node.badges = [...before.filter((badge) => typeof badge === "function" || badge.text !== SIGN), ...ours];
  const property = { property: "badges", oldValue: before, newValue: node.badges };
  node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...property });
  node.setDirtyCanvas(true, true);
}
