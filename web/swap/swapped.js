// @ts-check
/**
 * A saved workflow with some of its loaders swapped.
 *
 * A swap changes only the kind of the loader. Its id, position, size, title, colour, links, promoted fields, group and file
 * stay. A property records the earlier kind, so that the loader can go back.
 */

/** @import { ListedLink, NamedLink, SavedGraph, SavedNode, Workflow } from "./graph" */

import { FOLLOWERS, pairOfAll, pairOfOne } from "./pairs.js";

/** The property of a swapped node that records its earlier kind. */
export const INSTEAD_OF = "instead of";

/** Properties that identify the kind of a node and its pack. */
const OF_ITS_KIND = ["cnr_id", "aux_id", "ver", "Node name for S&R"];

const PLAN = { name: "plan", type: "PARALLEL_PLAN", shape: 7, link: null };

/** @typedef {{ type: string, size: [number, number], values: number, properties: Record<string, unknown> }} Before */

/** The file that a loader loads, and the smallest size that the page gives a node of its type. */
/** @typedef {{ file: string, least: [number, number] }} Loaded */

/**
 * Return the place of a node: the graph's name (the workflow's own graph has none) and the node's id.
 *
 * @param {string} graph
 * @param {string | number} node
 * @returns {string}
 */
export function placeOf(graph, node) {
  return `${graph}/${node}`;
}

/**
 * Return the workflow in which the loaders at these places use all GPUs.
 *
 * @param {Workflow} workflow
 * @param {ReadonlySet<string>} places
 * @returns {Workflow}
 */
export function onAll(workflow, places) {
  return changed(workflow, places, (graph, node) => {
    const pair = pairOfOne(node.type);
    if (!pair) return;
    const kind = Object.entries(node.properties).filter(([name]) => OF_ITS_KIND.includes(name));
    const before = { type: node.type, size: node.size, values: pair.values, properties: Object.fromEntries(kind) };
    for (const name of OF_ITS_KIND) delete node.properties[name];
    node.properties[INSTEAD_OF] = before;
    node.type = pair.all;
    node.inputs = [{ ...PLAN }, ...(node.inputs ?? [])]; // in the page's order, where inputs without a field come first
    moveLinks(graph, node, 0, 1);
  });
}

/**
 * Return the workflow in which the nodes at these places use one GPU again.
 *
 * @param {Workflow} workflow
 * @param {ReadonlyMap<string, Loaded>} places
 * @returns {Workflow}
 */
export function onOne(workflow, places) {
  return changed(workflow, places, (graph, node, place) => {
    const { file = "", least = [0, 0] } = places.get(place) ?? {};
    const before = beforeOf(node, file);
    if (!before) return;
    dropPlan(graph, node);
    for (const name of [INSTEAD_OF, ...OF_ITS_KIND]) delete node.properties[name];
    Object.assign(node.properties, before.properties);
    node.type = before.type;
    node.widgets_values = (node.widgets_values ?? []).slice(0, before.values);
    const asOpened = before.size.map((length, at) => Math.max(length, least[at] ?? 0));
    if (node.size.every((length, at) => length === asOpened[at])) node.size = before.size; // else the user resized it
  });
}

/**
 * Return a node's earlier kind, or else its counterpart for one GPU; undefined if there is none.
 *
 * @param {Pick<SavedNode, "type" | "size" | "properties">} node
 * @param {string} file
 * @returns {Before | undefined}
 */
export function beforeOf({ type, size, properties }, file) {
  const kept = /** @type {Before | undefined} */ (properties[INSTEAD_OF]);
  if (kept) return kept;
  const stock = FOLLOWERS[type] ?? pairOfAll(type, file);
  return stock && { type: stock.one, size, values: stock.values, properties: {} };
}

/**
 * @param {Workflow} workflow
 * @param {{ has(place: string): boolean }} places
 * @param {(graph: SavedGraph, node: SavedNode, place: string) => void} change
 * @returns {Workflow}
 */
function changed(workflow, places, change) {
  const copy = structuredClone(workflow);
  const graphs = copy.definitions?.subgraphs ?? [];
  for (const [name, graph] of [["", copy], ...graphs.map((each) => [each.id, each])]) {
    const { nodes } = /** @type {SavedGraph} */ (graph);
    for (const node of nodes) {
      const place = placeOf(String(name), node.id);
      if (places.has(place)) change(/** @type {SavedGraph} */ (graph), node, place);
    }
  }
  return copy;
}

/** @type {(graph: SavedGraph, node: SavedNode) => void} */
function dropPlan(graph, node) {
  const at = node.inputs?.findIndex(({ name }) => name === PLAN.name) ?? -1;
  const [plan] = at < 0 ? [] : (node.inputs?.splice(at, 1) ?? []);
  if (!plan) return;
  const gone = plan.link;
  graph.links = graph.links.filter((link) => numberOf(link) !== gone);
  for (const slot of graph.nodes.flatMap(({ outputs }) => outputs ?? [])) {
    if (slot.links) slot.links = slot.links.filter((number) => number !== gone);
  }
  for (const input of graph.inputs ?? []) input.linkIds = input.linkIds?.filter((number) => number !== gone);
  moveLinks(graph, node, at + 1, -1);
}

/** @type {(graph: SavedGraph, node: SavedNode, from: number, by: number) => void} */
function moveLinks(graph, { id }, from, by) {
  for (const link of graph.links) {
    if (Array.isArray(link)) {
      if (link[3] === id && link[4] >= from) link[4] += by;
    } else if (link.target_id === id && link.target_slot >= from) link.target_slot += by;
  }
}

/** @type {(link: ListedLink | NamedLink) => number} */
function numberOf(link) {
  return Array.isArray(link) ? link[0] : link.id;
}
