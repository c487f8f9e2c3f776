// @ts-check
/**
 * The loaders of a workflow and of its subgraphs: their files, the loaders that can be swapped, and the reasons of the others.
 */

/** @import { Graph, GraphNode, Prompt } from "../comfyui" */
/** @import { Loaded } from "./swapped" */

import { FOLLOWERS, filesIn, PAIRS, pairOfOne } from "./pairs.js";
import { beforeOf, placeOf } from "./swapped.js";

/** Types of outputs. A node that makes one of these without a linked input is a loader. */
const LOADED = ["MODEL", "VAE"];

/**
 * One use of a node. A node in a subgraph that is used twice has two uses, with the same place.
 *
 * @typedef {object} Use
 * @property {string} place
 * @property {string} id its id in an execution
 * @property {GraphNode} node
 */

/** A reason: a text's key and its values, or the server's sentence. */
/** @typedef {{ key: import("../words").Key, values?: Record<string, string> } | { said: string }} Why */

/** A use with the reason why it changes or stays. */
/** @typedef {{ use: Use, why: Why }} Reason */

/**
 * A use with the files that it loads, or with the reason why they are unknown. A use with neither stays without a message.
 *
 * @typedef {{ use: Use, files?: string[], type?: string, why?: Why }} Read
 */

/** A decision about a loader. A loader may stay without a reason, and is usually swapped without one. */
/** @typedef {{ swap: boolean, why?: Why }} Verdict */

/**
 * The places to swap, the swapped uses with a reason, and the uses that stay: those with a reason, and the others' number.
 *
 * @typedef {{ places: Map<string, Loaded>, changed: Reason[], left: Reason[], silent: number }} Decision
 */

/**
 * Yield all nodes of a graph and of its subgraphs.
 *
 * @param {Graph} graph
 * @param {string} [name] the graph's name; the workflow's own graph has none
 * @param {string} [before] the prefix of ids
 * @returns {Generator<Use>}
 */
export function* usesIn(graph, name = "", before = "") {
  for (const node of graph.nodes) {
    const id = `${before}${node.id}`;
    yield { place: placeOf(name, node.id), id, node };
    if (node.subgraph) yield* usesIn(node.subgraph, node.subgraph.id, `${id}:`);
  }
}

/** @type {(node: GraphNode) => boolean} */
export const isForOne = ({ type }) => pairOfOne(type) !== undefined;

/** @type {(node: GraphNode) => boolean} */
export const isForAll = ({ type }) => PAIRS.some(({ all }) => all === type);

/** @type {(node: GraphNode) => boolean} */
export const follows = ({ type }) => type in FOLLOWERS;

/**
 * Return true if a node loads a MODEL or a VAE from a file and is unknown to this pack.
 *
 * @param {GraphNode} node
 * @returns {boolean}
 */
export function isAnothers(node) {
  const { type, inputs = [], outputs = [], subgraph } = node;
  if (subgraph || isForOne(node) || type.startsWith("LoadParallel")) return false;
  const makes = outputs.some((slot) => LOADED.includes(String(slot.type)));
  return makes && inputs.every((slot) => ["COMBO", "STRING", "INT", "FLOAT", "BOOLEAN"].includes(String(slot.type)));
}

/** @type {(node: GraphNode) => boolean} */
export const isTextEncoder = ({ type }) =>
  PAIRS.some(({ one, all, holds }) => holds === "text encoder" && [one, all].includes(type));

/**
 * Return the files of each loader, from the graph as it would be queued.
 *
 * The loader of a text encoder on the CPU stays without a message: a user chose the CPU. So does one that is turned off.
 *
 * @param {readonly Use[]} uses
 * @param {Prompt} prompt
 * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
 * @returns {Read[]}
 */
export function read(uses, prompt, isThere) {
  return uses.map((use) => {
    const inputs = prompt[use.id]?.inputs;
    if (isTextEncoder(use.node) && (!inputs || inputs.device === "cpu") && isForOne(use.node)) return { use };
    if (!inputs) return { use, why: { key: "swap.off" } };
    if (!isThere(use.node.type)) return { use, why: { key: "swap.missing" } };
    const files = filesIn(use.node.type, inputs);
    if (!files.length || !files.every((file) => typeof file === "string")) return { use, why: { key: "swap.linked" } };
    const type = pairOfOne(use.node.type)?.type ?? inputs.type ?? "";
    if (typeof type !== "string") return { use, why: linked("type") };
    return { use, files, type };
  });
}

/** @type {(field: string) => Why} */
const linked = (field) => ({ key: "swap.linked.field", values: { field } });

/**
 * Return the reason why a loader cannot change although the server can run its files: a link to a field that would disappear.
 *
 * @param {GraphNode} node
 * @returns {Why | undefined}
 */
export function linkInTheWay({ type, inputs = [] }) {
  const gone = pairOfOne(type)?.fields.flatMap(([one, all]) => (all === undefined ? one : [])) ?? [];
  const field = gone.find((name) => inputs.some((slot) => slot.name === name && typeof slot.link === "number"));
  return field === undefined ? undefined : linked(field);
}

/**
 * Decide about places.
 *
 * A place is swapped if one of its uses is to be swapped and no other has a reason to stay, except for uses that are turned off.
 *
 * @param {readonly Read[]} uses
 * @param {(read: Read & { files: string[] }) => Verdict} verdictOf
 * @returns {Decision}
 */
export function decide(uses, verdictOf) {
  const places = new Map();
  /** @type {Reason[]} */
  const changed = [];
  /** @type {Reason[]} */
  const left = [];
  let silent = 0;
  for (const { use, files, type, why: unknown } of uses) {
    const { swap, why } = files ? verdictOf({ use, files, type }) : { swap: false, why: unknown };
    if (swap) places.set(use.place, loadedBy(use, files ?? [], type));
    if (why) (swap ? changed : left).push({ use, why });
    else if (!swap) silent += 1;
  }
  for (const { use, why } of left) if (!("key" in why && why.key === "swap.off")) places.delete(use.place);
  return {
    places,
    changed: changed.filter(({ use }) => places.has(use.place)),
    left: left.filter(({ use }) => !places.has(use.place)),
    silent,
  };
}

/**
 * @param {Use} use
 * @param {string[]} files
 * @param {string} [encoder] the type of text encoder
 * @returns {Loaded}
 */
export function loadedBy({ node }, files, encoder) {
  return { files, encoder, least: node.computeSize() };
}

/**
 * Return a function that decides whether a loader that uses all GPUs goes back.
 *
 * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
 * @returns {(read: { use: Use, files: string[], type?: string }) => Verdict}
 */
export function goesBack(isThere) {
  return ({ use: { node }, files, type: encoder }) => {
    const { type, size, properties } = node;
    const before = beforeOf({ type, size, properties: properties ?? {} }, { files, encoder });
    return before && isThere(before.type) ? { swap: true } : { swap: false, why: { key: "swap.no-way-back" } };
  };
}
