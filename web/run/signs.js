// @ts-check
/**
 * Short texts on a node, in the node's badges or, in Nodes 2.0, before the node's title.
 *
 * Nodes 2.0 draws a badge once, when the node appears, and ignores later changes. Therefore the badges are empty there, and the
 * texts appear before the title, but only where the title is drawn: the node's own title, which is saved, stays unchanged.
 */

/** @import { Badge, BadgeClass, GraphNode } from "../comfyui" */

/** @typedef {{ fgColor?: string, bgColor?: string }} Colours */

const BETWEEN = " · ";

export class Signs {
  #Badge;
  #isNodes2;
  #empty;
  /** The texts of each node by their kinds, and the badges that draw the texts. */
  /** @type {Map<GraphNode, Map<string, { text: string, badge: () => Badge }>>} */
  #shown = new Map();
  /** The texts before each drawn title. */
  /** @type {WeakMap<GraphNode, string>} */
  #before = new WeakMap();

  /**
   * @param {BadgeClass} Badge ComfyUI's class
   * @param {() => boolean} isNodes2 returns true while Nodes 2.0 draws the nodes
   */
  constructor(Badge, isNodes2) {
    this.#Badge = Badge;
    this.#isNodes2 = isNodes2;
    this.#empty = new Badge({ text: "" });
  }

  /**
   * Show a text on a node instead of the last text of the same kind. An empty text removes it.
   *
   * @param {GraphNode} node
   * @param {string} kind
   * @param {string} text
   * @param {Colours} [colours]
   */
  show(node, kind, text, colours = {}) {
    const mine = this.#shown.get(node) ?? new Map();
    const old = mine.get(kind)?.badge;
    node.badges = node.badges.filter((badge) => badge !== old);
    if (text) {
      const badge = new this.#Badge({ text, ...colours });
      mine.set(kind, { text, badge: () => (this.#isNodes2() ? this.#empty : badge) });
      node.badges.push(mine.get(kind).badge);
    } else if (!mine.delete(kind)) {
      if (mine.size) this.#drawTitle(node); // the user may have edited the title
      return;
    }
    if (mine.size) this.#shown.set(node, mine);
    else this.#shown.delete(node);
    this.#drawTitle(node);
    node.setDirtyCanvas(true, true);
  }

  /**
   * Remove the texts of a kind from all nodes.
   *
   * @param {string} kind
   */
  clear(kind) {
    for (const node of [...this.#shown.keys()]) this.show(node, kind, "");
  }

  /** Draw all titles again after ComfyUI has recreated the nodes for another graph or renderer. */
  redraw = () => {
    setTimeout(() => {
      for (const node of this.#shown.keys()) this.#drawTitle(node);
    });
  };

  /** @type {(node: GraphNode) => void} */
  #drawTitle(node) {
    const old = this.#before.get(node);
    if (old && node.title.startsWith(old)) node.title = node.title.slice(old.length); // the user has edited the drawn title
    const before = [...(this.#shown.get(node)?.values() ?? [])].map(({ text }) => text + BETWEEN).join("");
    this.#before.set(node, before);
    const change = { property: "title", oldValue: node.title, newValue: before + node.title };
    node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...change });
  }
}
