// @ts-check
/** Marks on nodes that are to be changed, drawn as ComfyUI draws its own, in both of its renderers. */

/** @import { App, GraphNode, Widget } from "../comfyui" */

const SIGN = "⚠ ";

/**
 * The node behind an id of an execution, such as `4`, or `7:4` for one inside of the subgraph node 7.
 *
 * @param {App} app
 * @param {string} id
 * @returns {GraphNode | undefined}
 */
export function nodeOf(app, id) {
  const [first = "", ...inside] = id.split(":");
  let node = app.rootGraph.getNodeById(first);
  for (const part of inside) node = node?.subgraph?.getNodeById(part);
  return node ?? undefined;
}

/** The marks of one run. */
export class Marks {
  /** @type {(() => void)[]} */
  #undo = [];

  /**
   * Marks a node and some of its fields.
   *
   * @param {GraphNode} node
   * @param {readonly Widget[]} fields
   */
  mark(node, fields) {
    this.#show(node, true);
    this.#undo.push(() => this.#show(node, false));
    if (fields.some((field) => field.advanced ?? field.options?.advanced)) node.showAdvanced = true; // else it is not seen
    for (const field of fields) {
      const before = field.label;
      field.label = SIGN + (before ?? field.name);
      this.#undo.push(() => {
        field.label = before;
      });
    }
  }

  /** Takes all marks away. */
  clear() {
    for (const undo of this.#undo.splice(0)) undo();
  }

  /** @type {(node: GraphNode, marked: boolean) => void} */
  #show(node, marked) {
    const property = { property: "has_errors", oldValue: node.has_errors, newValue: marked };
    node.has_errors = marked;
    node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...property });
    node.setDirtyCanvas(true, true);
  }
}
