// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { Highlights } from "../../web/run/highlights.js";

/** @import { GraphNode, Widget } from "../../web/comfyui" */

/** Returns a folded plan with a field that only the unfolded plan shows; unfolded, the plan is as high as its fields. */
function plan() {
  /** @type {Widget} */
  const field = { name: "ulysses", value: 3, options: { advanced: true } };
  /** @type {GraphNode} */
  const node = {
    ...{ id: 1, type: "ParallelPlan", title: "Plan", graph: null, badges: [], widgets: [field] },
    size: [300, 100],
    computeSize: () => [300, 400],
    setSize(size) {
      node.size = size;
    },
    setDirtyCanvas() {},
  };
  return { node, field };
}

test("a plan that was unfolded for a mark is folded to its old height when the mark goes", () => {
  const { node, field } = plan();
  const highlights = new Highlights();
  highlights.add(node, [field]);
  assert.equal(node.showAdvanced, true);
  assert.equal(field.label, "⚠ ulysses");
  node.size = [300, 400];
  const saved = { showAdvanced: true, size: [300, 400] };
  node.onSerialize?.(saved);
  assert.deepEqual(saved, { showAdvanced: undefined, size: [300, 100] }, "what is saved is as it was");
  highlights.clear();
  const { showAdvanced, size, has_errors, onSerialize } = node;
  assert.deepEqual([showAdvanced, size, has_errors, onSerialize], [undefined, [300, 100], false, undefined]);
  assert.equal(field.label, undefined);
});

test("a plan that the user has unfolded stays unfolded", () => {
  const { node, field } = plan();
  node.showAdvanced = true;
  const highlights = new Highlights();
  highlights.add(node, [field]);
  highlights.clear();
  assert.equal(node.showAdvanced, true);
});
