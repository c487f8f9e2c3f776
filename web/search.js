// @ts-check
/** Where ComfyUI's node search lists the pack's nodes.
 *
 * It finds a node by its aliases too, but ranks by name and display name alone. So the loader that its aliases lead to comes
 * behind every node whose name merely resembles the words ("Conditioning" for "xdit"), and for "parallel" behind those whose name
 * begins with it.
 */

/** @import { NodeDefinition, SearchScores } from "./comfyui" */

import { PACK } from "./pack.js";

const MODULE = `custom_nodes.${PACK}`;

/** Where everyone with several GPUs starts. */
const START = "LoadParallelDiffusionModel";

/** Of ComfyUI's kinds of match, the lower the better: a name that begins with the words, has them, only resembles them. */
const BEGINS = 1;
const HAS = 2;
const RESEMBLES = 9;

/** What ComfyUI adds to how badly the words fit, 0 to 1, where they have none of a name's letters; less, the more they have. */
const SHORT = 0.2;

/** As an alias fits that is the very words. */
const EXACT = 1e-6;

/**
 * Has the search list them so. A ComfyUI that ranks in another way does not ask.
 *
 * @param {readonly NodeDefinition[]} definitions of all nodes, those of this pack among them
 */
export function rank(definitions) {
  for (const node of definitions.filter(({ python_module }) => python_module === MODULE)) {
    node.postProcessSearchScores = node.name === START ? first : after;
  }
}

/** Before what only resembles the words that are its alias, and of equals that ComfyUI has not counted the first. */
/** @type {(scores: SearchScores) => SearchScores} */
function first([kind, ...finer]) {
  return [kind === RESEMBLES && isAlias(finer.at(-1)) ? HAS : kind, 0, -1, ...finer];
}

/** Whether a node was found by words that are an alias of it: then its score is what a whole number of letters adds. */
function isAlias(score = SHORT) {
  const letters = START.length * (1 - score / SHORT);
  return letters > EXACT && Math.abs(letters - Math.round(letters)) < EXACT;
}

/** The pack's other nodes: a name that begins with "Parallel" comes no earlier than one that has it. */
/** @type {(scores: SearchScores) => SearchScores} */
function after([kind, ...finer]) {
  return [kind === BEGINS ? HAS : kind, 0, ...finer];
}
