// @ts-check
/** The loaders of a workflow, in its subgraphs too: what each loads, which can change, and why the others stay. */

/** @import { Graph, GraphNode, Prompt } from "../comfyui" */
/** @import { Loaded } from "./swapped" */

import { FOLLOWERS, PAIRS, pairOfOne } from "./pairs.js";
import { beforeOf, placeOf } from "./swapped.js";

/** Types that only a loader makes of nothing. */
const LOADED = ["MODEL", "VAE"];

/**
 * A node as it is used once; one in a subgraph that is used twice is there twice, in the same place.
 *
 * @typedef {object} Use
 * @property {string} place
 * @property {string} id its id in an execution
 * @property {GraphNode} node
 */

/**
 * A use that stays, and why: a text's key, or what the server says.
 *
 * @typedef {{ use: Use, why: { key: import("../words").Key } | { said: string } }} Left
 */

/** What is known of each use: the file that it loads, or why that is not known. */
/** @typedef {{ use: Use, file: string } | Left} Read */

/**
 * All nodes of a graph and of what is inside of it.
 *
 * @param {Graph} graph
 * @param {string} [name] of the graph; the workflow's own has none
 * @param {string} [before] what comes before ids
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
 * Whether a node makes a MODEL or a VAE of a file and is none that this pack knows.
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

/**
 * What each loader loads, by the graph as it would be queued.
 *
 * @param {readonly Use[]} uses
 * @param {Prompt} prompt
 * @param {(type: string) => boolean} isThere whether the page has such nodes
 * @returns {Read[]}
 */
export function read(uses, prompt, isThere) {
  return uses.map((use) => {
    const inputs = prompt[use.id]?.inputs;
    if (!inputs) return { use, why: { key: "swap.off" } };
    if (!isThere(use.node.type)) return { use, why: { key: "swap.missing" } };
    const pair = PAIRS.find(({ one, all }) => [one, all].includes(use.node.type));
    const file = pair && inputs[pair.field];
    return typeof file === "string" ? { use, file } : { use, why: { key: "swap.linked" } };
  });
}

/**
 * The places that change, and the uses that stay. A place changes where all of its uses can, besides those that are off.
 *
 * @param {readonly Read[]} uses
 * @param {(use: Use, file: string) => Left["why"] | undefined} whyNot
 * @returns {{ places: Map<string, Loaded>, left: Left[] }}
 */
export function decide(uses, whyNot) {
  const places = new Map();
  /** @type {Left[]} */
  const left = [];
  for (const each of uses) {
    const why = "why" in each ? each.why : whyNot(each.use, each.file);
    if (why) left.push({ use: each.use, why });
    else places.set(each.use.place, loadedBy(each.use, "file" in each ? each.file : ""));
  }
  for (const { use, why } of left) if (!("key" in why && why.key === "swap.off")) places.delete(use.place);
  return { places, left: left.filter(({ use }) => !places.has(use.place)) };
}

/**
 * @param {Use} use
 * @param {string} file
 * @returns {Loaded}
 */
export function loadedBy({ node }, file) {
  return { file, least: node.computeSize() };
}

/**
 * Why a loader that uses all GPUs has nothing to go back to, if it has not.
 *
 * @param {(type: string) => boolean} isThere whether the page has such nodes
 * @returns {(use: Use, file: string) => Left["why"] | undefined}
 */
export function whyNotBack(isThere) {
  return ({ node: { type, size, properties } }, file) => {
    const before = beforeOf({ type, size, properties: properties ?? {} }, file);
    return before && isThere(before.type) ? undefined : { key: "swap.no-way-back" };
  };
}
