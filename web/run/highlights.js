// @ts-check
/** Highlights of nodes that the user is to change, in ComfyUI's own style, in both of its renderers. */

/** @import { GraphNode, Widget } from "../comfyui" */

const SIGN = "⚠ ";

/** The highlights of one run. */
export class Highlights {
  /** @type {(() => void)[]} */
  #undo = [];

  /**
   * Highlight a node and some of its fields.
   *
   * @param {GraphNode} node
   * @param {readonly Widget[]} fields
   */
  add(node, fields) {
    this.#show(node, true);
    this.#undo.push(() => this.#show(node, false));
    if (fields.some((field) => field.advanced ?? field.options?.advanced)) this.#unfold(node); // else they are hidden
    for (const field of fields) {
      const before = field.label;
      field.label = SIGN + (before ?? field.name);
      this.#undo.push(() => {
        field.label = before;
      });
    }
  }

  /** Remove all highlights. */
  clear() {
    for (const undo of this.#undo.splice(0)) undo();
  }

  /** Show advanced fields until the highlights are removed. A workflow saved in the meantime keeps the old state. */
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
