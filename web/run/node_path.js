// @ts-check
/** The nodes for an id of an execution, such as `4`, or `7:4` for node 4 inside of the subgraph node 7. */

/** @import { App, GraphNode } from "../comfyui" */

/**
 * Return the subgraph nodes around a node, the outermost first, and the node itself last; empty if the node is gone.
 *
 * @param {App} app
 * @param {string} id
 * @returns {GraphNode[]}
 */
export function pathOf(app, id) {
  const path = [];
  /** @type {import("../comfyui").Graph | undefined} */
  let graph = app.rootGraph;
  for (const part of id.split(":")) {
    const node = /** @type {GraphNode | null | undefined} */ (graph?.getNodeById(part));
    if (!node) return [];
    path.push(node);
    graph = node.subgraph;
  }
  return path;
}
