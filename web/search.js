// @ts-check
/**
 * The ranking of the pack's nodes in ComfyUI's node search.
 *
 * ComfyUI finds a node by its aliases too, but ranks by name and display name alone. Without this module, the loader that an
 * alias leads to comes after every node whose name merely resembles the words ("Conditioning" for "xdit"). For "parallel" it
 * comes after the nodes whose name begins with that word.
 */

/** @import { NodeDefinition, SearchScores } from "./comfyui" */

import { PACK } from "./pack.js";

const MODULE = `custom_nodes.${PACK}`;

/** The loader that users with several GPUs start with. */
const START = "LoadParallelDiffusionModel";

/** ComfyUI's kinds of match, lower is better: a name that begins with the words, contains them, or only resembles them. */
const BEGINS = 1;
const HAS = 2;
const RESEMBLES = 9;

/**
 * ComfyUI's penalty, added to a misfit of 0 to 1, for words that have none of a name's letters. The more of these letters the words
 * have, the lower it is.
 */
const SHORT = 0.2;

/** Largest score of an alias that equals the words. */
const EXACT = 1e-6;

/**
 * Add the pack's ranking to its nodes' definitions. A ComfyUI with another ranking ignores it.
 *
 * @param {readonly NodeDefinition[]} definitions all nodes' definitions, including this pack's
 */
export function rank(definitions) {
  for (const node of definitions.filter(({ python_module }) => python_module === MODULE)) {
    node.postProcessSearchScores = node.name === START ? first : after;
  }
}

/** Rank the first loader before names that only resemble its alias, and before equal nodes without a use count. */
/** @type {(scores: SearchScores) => SearchScores} */
function first([kind, ...finer]) {
  return [kind === RESEMBLES && isAlias(finer.at(-1)) ? HAS : kind, 0, -1, ...finer];
}

/** Return true if the words equal an alias of the node. Its score is then the penalty for a whole number of letters. */
function isAlias(score = SHORT) {
  const letters = START.length * (1 - score / SHORT);
  return letters > EXACT && Math.abs(letters - Math.round(letters)) < EXACT;
}

/** Rank the pack's other nodes: a name that begins with "Parallel" comes no earlier than a name that contains the word. */
/** @type {(scores: SearchScores) => SearchScores} */
function after([kind, ...finer]) {
  return [kind === BEGINS ? HAS : kind, 0, ...finer];
}
