// @ts-check
/** Loaders without a Parallel Plan: what is queued or exported of them has the settings in it, and what is saved says so too. */

/** @import { App, GraphNode } from "../comfyui" */
/** @import { Unplanned } from "../settings" */

import { USUAL, unplanned } from "../settings.js";
import { usesIn } from "../swap/found.js";

/** Where a saved workflow's extra data has them. */
const KEPT = "parallel";

/** ComfyUI's modes of nodes that do not run: muted and bypassed. */
const OFF = [2, 4];

/**
 * Whether a node is a loader of this pack's.
 *
 * @param {object} node
 * @returns {node is GraphNode}
 */
export function isLoader(node) {
  return "comfyClass" in node && String(node.comfyClass).startsWith("LoadParallel");
}

/**
 * Has a loader tell of the settings in the inputs that are not shown, where they are not the usual ones. The page draws a slot for
 * a text, though it is told that there is none.
 *
 * @param {App} app
 * @param {GraphNode} node
 */
export function fillIn(app, node) {
  for (const [name, usual] of Object.entries(USUAL)) {
    const widget = node.widgets?.find((each) => each.name === name);
    if (!widget) continue;
    const slot = node.inputs?.findIndex((each) => each.name === name) ?? -1;
    if (slot >= 0) node.removeInput?.(slot);
    widget.serialize = false; // the settings are this page's, and not the node's
    widget.serializeValue = () => {
      const value = unplanned(app)[/** @type {keyof Unplanned} */ (name)];
      return value === usual || hasPlan(node) ? undefined : value;
    };
  }
}

/**
 * Whether a Parallel Plan is connected that runs. One outside of the subgraph that the node is in is not looked for: where there
 * is one it counts, whatever is filled in.
 *
 * @param {GraphNode} node
 * @returns {boolean}
 */
export function hasPlan(node) {
  const at = node.inputs?.findIndex(({ name }) => name === "plan") ?? -1;
  const origin = at < 0 ? null : (node.getInputNode?.(at) ?? null);
  return origin !== null && !OFF.includes(origin.mode ?? 0);
}

/**
 * Has what is saved of a workflow say what its loaders without a plan ran on, where that is not the usual.
 *
 * @param {App} app
 */
export function keepWithWorkflow(app) {
  const graph = app.rootGraph;
  const { onSerialize } = graph;
  graph.onSerialize = (saved) => {
    onSerialize?.call(graph, saved);
    const { [KEPT]: _, ...extra } = saved.extra ?? {};
    const now = unplanned(app);
    const usual = now.devices === USUAL.devices && now.preset === USUAL.preset;
    const counts = !usual && [...usesIn(graph)].some(({ node }) => isLoader(node) && !hasPlan(node));
    saved.extra = counts ? { ...extra, [KEPT]: now } : extra;
  };
}
