// @ts-check
/** Loaders without a Parallel Plan. Queued and exported graphs include the settings, and saved workflows record them. */

/** @import { App, GraphNode } from "../comfyui" */
/** @import { Unplanned } from "../settings" */

import { USUAL, unplanned } from "../settings.js";
import { usesIn } from "../swap/found.js";

/** The key of the settings in a saved workflow's extra data. */
const KEPT = "parallel";

/** ComfyUI's modes of nodes that do not run: muted and bypassed. */
const OFF = [2, 4];

/**
 * Return true if a node is a loader of this pack.
 *
 * @param {object} node
 * @returns {node is GraphNode}
 */
export function isLoader(node) {
  return "comfyClass" in node && String(node.comfyClass).startsWith("LoadParallel");
}

/**
 * Make a loader write the settings into its hidden inputs, unless they are the default.
 *
 * The page draws a slot for a text input even if the input has none; this function removes the slot.
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
    widget.serialize = false; // the settings belong to the page, not to the node
    widget.serializeValue = () => {
      const value = unplanned(app)[/** @type {keyof Unplanned} */ (name)];
      return value === usual || hasPlan(node) ? undefined : value;
    };
  }
}

/**
 * Return true if a Parallel Plan that runs is connected.
 *
 * The search ends at the subgraph that the node is inside of. A plan from outside takes precedence over the inputs anyway.
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
 * Record the settings in a saved workflow with loaders that use them, unless they are the default.
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
