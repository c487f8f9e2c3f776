// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { showOutcomes } from "../../web/run/outcomes.js";
import { Signs } from "../../web/run/signs.js";
import { events, OneBadge } from "./comfyui.js";
import { ENGLISH } from "./languages.js";

/** @import { App, GraphNode } from "../../web/comfyui" */

const nothing = {
  setDirtyCanvas() {},
  setSize() {},
  /** @returns {[number, number]} */
  computeSize: () => [300, 200],
};

const its = () => new OneBadge({ text: "#7" });

/** Returns the nodes of a graph whose subgraph node 7 has a node 4, and functions that send the events of a run of node 4. */
function page() {
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
  showOutcomes(app, api, new Signs(OneBadge), ENGLISH);
  /** @type {(warnings: string[]) => void} */
  const tellOutcome = (warnings) => tell("parallel.ran", { prompt_id: "p", node: "7:4", outcome: { warnings } });
  return { inner, outer, drawn, tell: tellOutcome, start: () => tell("execution_start") };
}

test("a run with warnings marks its node once, next to its other badges", () => {
  const { inner, drawn, tell } = page();
  tell(["One device alone would be faster."]);
  tell(["Slower path.", "One device alone would be faster."]);
  assert.deepEqual(inner.badges, [its, new OneBadge({ text: "⚠ could be faster" })]);
  assert.deepEqual(drawn, { badges: inner.badges, title: "⚠ could be faster · Sampler" });
  assert.equal(inner.title, "Sampler", "what is saved");
});

test("the subgraph node around the node is marked too, until the next run starts", () => {
  const { outer, inner, tell, start } = page();
  tell(["Slower path."]);
  assert.deepEqual(outer.badges, [its, new OneBadge({ text: "⚠ could be faster" })]);
  start();
  assert.deepEqual([outer.badges, inner.badges], [[its], [its]]);
});

test("a run without warnings removes the mark", () => {
  const { inner, drawn, tell } = page();
  tell(["Slower path."]);
  tell([]);
  assert.deepEqual(inner.badges, [its]);
  assert.deepEqual(drawn, { badges: [its], title: "Sampler" });
});
