// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { showOutcomes } from "../../web/run/outcomes.js";
import { Signs } from "../../web/run/signs.js";
import { badgesOf, events, OneBadge } from "./comfyui.js";
import { ENGLISH } from "./languages.js";

/** @import { App, GraphNode } from "../../web/comfyui" */

const nothing = {
  setDirtyCanvas() {},
  setSize() {},
  /** @returns {[number, number]} */
  computeSize: () => [300, 200],
};

const its = () => new OneBadge({ text: "#7" });

/**
 * Returns the nodes of a graph whose subgraph node 7 has a node 4, functions that send the events of a run of node 4, and
 * whether Nodes 2.0 draws the nodes.
 */
function page() {
  const renderer = { isNodes2: false };
  /** @type {GraphNode} */
  const inner = { id: 4, type: "KSampler", title: "Sampler", graph: null, badges: [its], size: [300, 200], ...nothing };
  /** @type {Record<string, unknown>} */
  const drawn = {};
  const within = {
    nodes: [inner],
    getNodeById: () => inner,
    /** @type {(action: string, event: object) => void} */
    trigger(action, event) {
      assert.equal(action, "node:property:changed");
      const { property, newValue } = /** @type {{ property: string, newValue: unknown }} */ (event);
      drawn[property] = newValue;
    },
  };
  inner.graph = within;
  const outer = { ...inner, id: 7, subgraph: within };
  const app = /** @type {App} */ (/** @type {unknown} */ ({ rootGraph: { getNodeById: () => outer } }));
  const { api, tell } = events();
  const signs = new Signs(OneBadge, () => renderer.isNodes2);
  showOutcomes(app, api, signs, ENGLISH);
  /** @type {(warnings: string[]) => void} */
  const tellOutcome = (warnings) => tell("parallel.ran", { prompt_id: "p", node: "7:4", outcome: { warnings } });
  return { inner, outer, drawn, renderer, signs, tell: tellOutcome, start: () => tell("execution_start") };
}

test("a run with warnings marks its node, and the subgraph node around it, once until the next run starts", () => {
  const { outer, inner, drawn, tell, start } = page();
  tell(["One device alone would be faster."]);
  tell(["Slower path.", "One device alone would be faster."]);
  for (const node of [inner, outer]) assert.deepEqual(badgesOf(node), ["#7", "⚠ could be faster"]);
  assert.deepEqual(drawn, { title: "⚠ could be faster · Sampler" });
  assert.equal(inner.title, "Sampler", "what is saved");
  start();
  assert.deepEqual([outer.badges, inner.badges], [[its], [its]]);
});

test("a run without warnings removes the mark", () => {
  const { inner, drawn, tell } = page();
  tell(["Slower path."]);
  tell([]);
  assert.deepEqual(inner.badges, [its]);
  assert.deepEqual(drawn, { title: "Sampler" });
});

test("Nodes 2.0, which draws a badge only once, shows the mark before the title alone", async () => {
  const { inner, drawn, renderer, signs, tell } = page();
  tell(["Slower path."]);
  drawn.title = "Sampler"; // of a node that the renderer has made anew
  renderer.isNodes2 = true;
  signs.redraw();
  await new Promise((resolve) => setTimeout(resolve));
  assert.deepEqual(badgesOf(inner), ["#7", ""]);
  assert.equal(drawn.title, "⚠ could be faster · Sampler");
});

test("a title that the user edits with the mark before it is saved without the mark", () => {
  const { inner, drawn, tell } = page();
  tell(["Slower path."]);
  inner.title = "⚠ could be faster · My sampler";
  tell(["Slower path."]);
  assert.equal(inner.title, "My sampler");
  assert.equal(drawn.title, "⚠ could be faster · My sampler");
});
