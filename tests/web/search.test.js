// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";

/** As in ComfyUI's server, the name of the pack is that of its folder. */
const { rank } = await import("../../web/search.js");
const { PACK } = await import("../../web/pack.js");

/** @import { SearchScores } from "../../web/comfyui" */

/** @type {(name: string, python_module?: string) => import("../../web/comfyui").NodeDefinition} */
const node = (name, python_module = `custom_nodes.${PACK}`) => ({ name, python_module });

const loader = node("LoadParallelDiffusionModel");
const plan = node("ParallelPlan");
const another = node("ParallelPlan", "nodes");
rank([loader, plan, another]);

/** @type {(of: import("../../web/comfyui").NodeDefinition, scores: SearchScores) => number[] | undefined} */
const scores = (of, given) => of.postProcessSearchScores?.(given);

test("words that are an alias count like words of the name, and words that resemble it do not", () => {
  const fourLetters = 0.2 * (1 - 4 / loader.name.length);
  assert.equal(scores(loader, [9, 0, 0, fourLetters + 1e-14])?.[0], 2);
  for (const score of [fourLetters + 0.01, 0.19, 0.2, 0.7])
    assert.equal(scores(loader, [9, 0, 0, score])?.[0], 9, String(score));
  assert.equal(scores(loader, [1, 0, 26, fourLetters])?.[0], 1);
});

test("of equal results the loader comes first, and no other node of the pack whose name begins with the word comes before it", () => {
  assert.deepEqual(scores(loader, [2, 17, 26, 0.1]), [2, 0, -1, 17, 26, 0.1]);
  assert.deepEqual(scores(plan, [1, 0, 12, 0.1]), [2, 0, 0, 12, 0.1]);
  assert.deepEqual(scores(plan, [0, 0, 0, 0]), [0, 0, 0, 0, 0], "the very name stays the best match");
});

test("other packs' nodes keep their scores", () => assert.equal(another.postProcessSearchScores, undefined));
