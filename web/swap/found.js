// @ts-check
/**
 * The loaders of a workflow and of its subgraphs: their files, the loaders that can be swapped, and the reasons of the others.
 */

/** @import { Graph, GraphNode, Prompt } from "../comfyui" */
/** @import { Loaded } from "./swapped" */

import { FOLLOWERS, PAIRS, pairOfOne } from "./pairs.js";
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

/**
 * A use that is not swapped, and the reason: a text's key, or the server's sentence.
 *
 * @typedef {{ use: Use, why: { key: import("../words").Key } | { said: string } }} Left
 */

/** A use with the file that it loads, or with the reason why the file is unknown. */
/** @typedef {{ use: Use, file: string } | Left} Read */

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

/**
 * Return the file of each loader, from the graph as it would be queued.
 *
 * @param {readonly Use[]} uses
 * @param {Prompt} prompt
 * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
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
 * Return the places to swap, and the uses that stay.
 *
 * A place is swapped if all of its uses can be, except for uses that are turned off.
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
 * Return a function that gives the reason why a loader that uses all GPUs cannot go back, or undefined if it can.
 *
 * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
 * @returns {(use: Use, file: string) => Left["why"] | undefined}
 */
export function whyNotBack(isThere) {
  return ({ node: { type, size, properties } }, file) => {
    const before = beforeOf({ type, size, properties: properties ?? {} }, file);
    return before && isThere(before.type) ? undefined : { key: "swap.no-way-back" };
  };
}
