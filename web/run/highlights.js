// @ts-check
/** Highlights of nodes that are to be changed, drawn as ComfyUI draws its own, in both of its renderers. */

/** @import { GraphNode, Widget } from "../comfyui" */

const SIGN = "⚠ ";

/** The highlights of one run. */
export class Highlights {
  /** @type {(() => void)[]} */
  #undo = [];

  /**
   * Highlights a node and some of its fields.
   *
   * @param {GraphNode} node
   * @param {readonly Widget[]} fields
   */
  add(node, fields) {
    this.#show(node, true);
    this.#undo.push(() => this.#show(node, false));
    if (fields.some((field) => field.advanced ?? field.options?.advanced)) this.#unfold(node); // else it is not seen
    for (const field of fields) {
      const before = field.label;
      field.label = SIGN + (before ?? field.name);
      this.#undo.push(() => {
        field.label = before;
      });
    }
  }

  /** Takes all of them away. */
  clear() {
    for (const undo of this.#undo.splice(0)) undo();
  }

  /** Until they are cleared; what is saved meanwhile is as it was. */
  /** @type {(node: GraphNode) => void} */
  #unfold(node) {
    const { showAdvanced, onSerialize } = node;
    const [width, height] = node.size;
    if (showAdvanced) return;
    node.showAdvanced = true;
    node.onSerialize = (saved) => {
      onSerialize?.call(node, saved);
      Object.assign(saved, { showAdvanced, size: [width, height] });
    };
    this.#undo.push(() => {
      node.showAdvanced = showAdvanced;
      node.onSerialize = onSerialize;
      node.setSize([width, height]);
    });
  }

  /** @type {(node: GraphNode, marked: boolean) => void} */
  #show(node, marked) {
    const property = { property: "has_errors", oldValue: node.has_errors, newValue: marked };
    node.has_errors = marked;
    node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...property });
    node.setDirtyCanvas(true, true);
  }
}
