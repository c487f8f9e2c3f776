// @ts-check
/**
 * A saved workflow with some of its loaders swapped.
 *
 * A swap changes only the kind of the loader. Its id, position, size, title, colour, links, promoted fields, group and files
 * stay. A property records the earlier kind, so that the loader can go back.
 */

/** @import { ListedLink, NamedLink, SavedGraph, SavedNode, SavedSlot, Workflow } from "./graph" */
/** @import { Pair } from "./pairs" */

import { canLoad, FOLLOWERS, fieldsOfAll, PAIRS, pairOfAll, pairOfOne, renamed } from "./pairs.js";

/** The property of a swapped node that records its earlier kind. */
export const INSTEAD_OF = "instead of";

/** Properties that identify the kind of a node and its pack. */
const OF_ITS_KIND = ["cnr_id", "aux_id", "ver", "Node name for S&R"];

const PLAN = { name: "plan", type: "PARALLEL_PLAN", shape: 7, link: null };

/**
 * The earlier kind of a node.
 *
 * @typedef {object} Before
 * @property {string} type
 * @property {[number, number]} size
 * @property {number} values the number of its values
 * @property {unknown[]} [kept] those of its values that the node has no field for
 * @property {Record<string, unknown>} properties
 */

/** The files that a loader loads, and the smallest size that the page gives a node of its type. */
/** @typedef {import("./pairs").Loads & { least: [number, number] }} Loaded */

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
  return changed(workflow, places, (graph, node, _, whole) => {
    const pair = pairOfOne(node.type);
    if (!pair) return;
    const kind = Object.entries(node.properties).filter(([name]) => OF_ITS_KIND.includes(name));
    const { values, kept } = valuesForAll(node.widgets_values ?? [], pair);
    const { type, size } = node;
    const before = { type, size, values: pair.fields.length, properties: Object.fromEntries(kind) };
    for (const name of OF_ITS_KIND) delete node.properties[name];
    node.properties[INSTEAD_OF] = kept.length ? { ...before, kept } : before;
    node.type = pair.all;
    if (node.widgets_values) node.widgets_values = values;
    const names = renamed(pair, "all");
    setInputs(graph, node, inOrder(node.inputs ?? [], names, fieldsOfAll(pair)), [{ ...PLAN }]);
    renameInApp(whole, node, names);
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
  return changed(workflow, places, (graph, node, place, whole) => {
    const loaded = places.get(place);
    const { least = [0, 0] } = loaded ?? {};
    const before = beforeOf(node, loaded ?? { files: [] });
    if (!before) return;
    const pair = PAIRS.find(({ one, all }) => one === before.type && all === node.type);
    const names = pair ? renamed(pair, "one") : new Map();
    const order = pair?.fields.map(([one]) => one) ?? [];
    setInputs(graph, node, inOrder(node.inputs ?? [], new Map([...names, [PLAN.name, undefined]]), order));
    renameInApp(whole, node, names);
    for (const name of [INSTEAD_OF, ...OF_ITS_KIND]) delete node.properties[name];
    Object.assign(node.properties, before.properties);
    node.type = before.type;
    const values = node.widgets_values ?? [];
    node.widgets_values = pair ? valuesForOne(values, pair, before.kept ?? []) : values.slice(0, before.values);
    const asOpened = before.size.map((length, at) => Math.max(length, least[at] ?? 0));
    if (node.size.every((length, at) => length === asOpened[at])) node.size = before.size; // else the user resized it
  });
}

/**
 * Return a node's earlier kind, or else its counterpart for one GPU; undefined if there is none.
 *
 * The earlier kind counts only if it loads as many files as the node does now, as the same type of text encoder.
 *
 * @param {Pick<SavedNode, "type" | "size" | "properties">} node
 * @param {import("./pairs").Loads} loads
 * @returns {Before | undefined}
 */
export function beforeOf({ type, size, properties }, loads) {
  const before = /** @type {Before | undefined} */ (properties[INSTEAD_OF]);
  const earlier = before && pairOfOne(before.type);
  if (before && (!earlier || canLoad(earlier, loads))) return before;
  const follower = FOLLOWERS[type];
  if (follower) return { type: follower.one, size, values: follower.values, properties: {} };
  const pair = pairOfAll(type, loads);
  return pair && { type: pair.one, size, values: pair.fields.length, properties: {} };
}

/** Return the values of the node that uses all GPUs, and the values that this node has no field for. */
/** @type {(values: readonly unknown[], pair: Pair) => { values: unknown[], kept: unknown[] }} */
function valuesForAll(values, pair) {
  const order = fieldsOfAll(pair);
  /** @type {unknown[]} */
  const carried = [];
  /** @type {unknown[]} */
  const kept = [];
  for (const [at, value] of values.entries()) {
    const [, name] = pair.fields[at] ?? [];
    if (name === undefined) kept.push(value);
    else carried[order.indexOf(name)] = value;
  }
  if (pair.type) carried[order.indexOf("type")] = pair.type;
  return { values: carried, kept };
}

/** Return the values of the node for one GPU, with the values that only this node has a field for. */
/** @type {(values: readonly unknown[], pair: Pair, kept: readonly unknown[]) => unknown[]} */
function valuesForOne(values, pair, kept) {
  const order = fieldsOfAll(pair);
  const carried = pair.fields.flatMap(([, name]) => (name === undefined ? [] : values[order.indexOf(name)]));
  return [...carried.filter((value) => value !== undefined), ...kept];
}

/**
 * @param {Workflow} workflow
 * @param {{ has(place: string): boolean }} places
 * @param {(graph: SavedGraph, node: SavedNode, place: string, whole: Workflow) => void} change
 * @returns {Workflow}
 */
function changed(workflow, places, change) {
  const copy = structuredClone(workflow);
  const graphs = copy.definitions?.subgraphs ?? [];
  for (const [name, graph] of [["", copy], ...graphs.map((each) => [each.id, each])]) {
    const { nodes } = /** @type {SavedGraph} */ (graph);
    for (const node of nodes) {
      const place = placeOf(String(name), node.id);
      if (places.has(place)) change(/** @type {SavedGraph} */ (graph), node, place, copy);
    }
  }
  return copy;
}

/**
 * A slot with its earlier index.
 *
 * @typedef {{ slot: SavedSlot, from: number }} Moved
 */

/**
 * Return a node's slots under their new names, in the new order.
 *
 * @param {readonly SavedSlot[]} slots
 * @param {ReadonlyMap<string, string | undefined>} names the new names by the old ones; a slot without a new name is left out
 * @param {readonly string[]} order the new names in the page's order; other slots stay behind them
 * @returns {Moved[]}
 */
function inOrder(slots, names, order) {
  /** @type {(moved: Moved) => number} */
  const rank = ({ slot: { name } }) => (order.includes(name) ? order.indexOf(name) : order.length);
  return slots
    .flatMap((slot, from) => {
      const name = names.has(slot.name) ? names.get(slot.name) : slot.name;
      return name === undefined ? [] : { slot: { ...slot, ...(slot.widget ? { widget: { name } } : {}), name }, from };
    })
    .toSorted((a, b) => rank(a) - rank(b));
}

/**
 * Set a node's inputs. Links move with their slots, and the links of slots that disappear are removed.
 *
 * @param {SavedGraph} graph
 * @param {SavedNode} node
 * @param {readonly Moved[]} moved
 * @param {readonly SavedSlot[]} [first] further slots before these; in the page's order, inputs without a field come first
 */
function setInputs(graph, node, moved, first = []) {
  const gone = (node.inputs ?? []).filter((_, at) => moved.every(({ from }) => from !== at));
  for (const { link } of gone) if (typeof link === "number") dropLink(graph, link);
  node.inputs = [...first, ...moved.map(({ slot }) => slot)];
  const places = new Map(moved.map(({ from }, at) => [from, first.length + at]));
  for (const link of graph.links) {
    if (Array.isArray(link)) {
      if (link[3] === node.id) link[4] = places.get(link[4]) ?? link[4];
    } else if (link.target_id === node.id) link.target_slot = places.get(link.target_slot) ?? link.target_slot;
  }
}

/**
 * Rename a node's fields among those that the workflow shows as an app.
 *
 * An entry names a node of the workflow's own graph by its id, or by a widget's id: those of graph and node, and the field's name.
 * It names a node in a subgraph by its id, or by its path, the ids from the outermost node to it.
 *
 * @param {Workflow} workflow
 * @param {SavedNode} node
 * @param {ReadonlyMap<string, string | undefined>} names the new names by the old ones
 */
function renameInApp({ nodes, extra }, node, names) {
  const of = String(node.id);
  const outer = nodes.includes(node);
  const alone = outer || nodes.every(({ id }) => String(id) !== of);
  for (const entry of extra?.linearData?.inputs ?? []) {
    const [id, name] = entry;
    const renamed = names.get(name);
    if (renamed === undefined) continue;
    const path = String(id).split(":");
    const [graph, widgetsNode, field] = path;
    const isWidget = outer && path.length === 3 && widgetsNode === of && field === encodeURIComponent(name);
    const isNode = path.at(-1) === of && (path.length > 1 ? !outer : alone);
    if (isWidget) entry[0] = [graph, of, encodeURIComponent(renamed)].join(":");
    if (isWidget || isNode) entry[1] = renamed;
  }
}

/** @type {(graph: SavedGraph, gone: number) => void} */
function dropLink(graph, gone) {
  graph.links = graph.links.filter((link) => numberOf(link) !== gone);
  for (const slot of graph.nodes.flatMap(({ outputs }) => outputs ?? [])) {
    if (slot.links) slot.links = slot.links.filter((number) => number !== gone);
  }
  for (const input of graph.inputs ?? []) input.linkIds = input.linkIds?.filter((number) => number !== gone);
}

/** @type {(link: ListedLink | NamedLink) => number} */
function numberOf(link) {
  return Array.isArray(link) ? link[0] : link.id;
}
