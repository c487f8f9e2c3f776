// @ts-check
/**
 * Short texts on a node, in its badges.
 *
 * Nodes 2.0 draws the badges that a node was created with. Therefore the texts also appear before the title, but only where the
 * title is drawn: the node's own title, which is saved, stays unchanged.
 */

/** @import { Badge, BadgeClass, GraphNode } from "../comfyui" */

/** @typedef {{ fgColor?: string, bgColor?: string }} Colours */

export class Signs {
  #Badge;
  /** @type {WeakMap<GraphNode, Map<string, Badge>>} */
  #shown = new WeakMap();
  /** @type {Set<GraphNode>} */
  #nodes = new Set();

  /** @param {BadgeClass} Badge ComfyUI's class */
  constructor(Badge) {
    this.#Badge = Badge;
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
    const others = node.badges.filter((badge) => ![...mine.values()].includes(badge));
    if (text) mine.set(kind, new this.#Badge({ text, ...colours }));
    else if (!mine.delete(kind)) return;
    this.#shown.set(node, mine);
    if (mine.size) this.#nodes.add(node);
    else this.#nodes.delete(node);
    const before = node.badges;
    node.badges = [...others, ...mine.values()];
    tell(node, { property: "badges", oldValue: before, newValue: node.badges });
    const title = [...[...mine.values()].map((badge) => badge.text), node.title].join(" · ");
    tell(node, { property: "title", oldValue: node.title, newValue: title });
    node.setDirtyCanvas(true, true);
  }

  /**
   * Remove the texts of a kind from all nodes.
   *
   * @param {string} kind
   */
  clear(kind) {
    for (const node of [...this.#nodes]) this.show(node, kind, "");
  }
}

/** @type {(node: GraphNode, change: { property: string, oldValue: unknown, newValue: unknown }) => void} */
function tell(node, change) {
  node.graph?.trigger("node:property:changed", { type: "node:property:changed", nodeId: node.id, ...change });
}
