// @ts-check
/** The user's access to both swaps: commands with keys, and items in the menus of loaders and of subgraphs with loaders. */

/** @import { Command, GraphNode, Keybinding, MenuItem } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Swap } from "./swap" */

import { isForAll, isForOne } from "./found.js";

const ALL = "Parallel.UseAllGPUs";
const ONE = "Parallel.BackToOneGPU";

/** @type {Keybinding[]} */
export const KEYS = [
  { commandId: ALL, combo: { key: "g", alt: true } },
  { commandId: ONE, combo: { key: "g", alt: true, shift: true } },
];

/**
 * Return the commands. ComfyUI finds their texts in locales/<language>/commands.json.
 *
 * @param {Swap} swap
 * @returns {Command[]}
 */
export function commands(swap) {
  return [
    { id: ALL, label: "Use all GPUs", icon: "pi pi-sitemap", function: () => swap.useAll() },
    { id: ONE, label: "Back to one GPU", icon: "pi pi-stop", function: () => swap.useOne() },
  ];
}

/**
 * Return the pack's items for a node's menu.
 *
 * @param {Swap} swap
 * @param {GraphNode} node
 * @param {Words} words
 * @returns {MenuItem[]}
 */
export function menuOf(swap, node, words) {
  const { uses, meant } = swap.of(node);
  const items = [];
  if (uses.some((use) => isForOne(use.node))) {
    items.push({ content: words.say("swap.all"), callback: () => void swap.useAll(meant) });
  }
  if (uses.some((use) => isForAll(use.node))) {
    items.push({ content: words.say("swap.one"), callback: () => void swap.useOne(meant) });
  }
  return items;
}
