// @ts-check

import assert from "node:assert/strict";
import { test } from "node:test";

import { fillIn, hasPlan, keepWithWorkflow } from "../../web/plan/unplanned.js";

/** @import { App, GraphNode, Widget } from "../../web/comfyui" */

/** @type {(set: Record<string, string>, nodes?: GraphNode[]) => App} */
function page(set, nodes = []) {
  const setting = { get: (/** @type {string} */ id) => set[id] };
  return /** @type {any} */ ({ rootGraph: { nodes }, extensionManager: { setting } });
}

/** @type {(plan?: { mode: number }) => GraphNode & { widgets: Widget[] }} */
function loader(plan) {
  const widgets = ["unet_name", "devices", "preset"].map((name) => ({ name, value: "kept" }));
  const inputs = ["plan", "devices"].map((name) => ({ name, type: "*" }));
  const removeInput = (/** @type {number} */ slot) => inputs.splice(slot, 1);
  const node = { comfyClass: "LoadParallelFlux", inputs, widgets, removeInput, getInputNode: () => plan ?? null };
  return /** @type {any} */ (node);
}

/** @type {(node: GraphNode) => Record<string, unknown>} */
function queued(node) {
  const queuedOf = (/** @type {Widget} */ each) => (each.serializeValue ? each.serializeValue() : each.value);
  return Object.fromEntries((node.widgets ?? []).map((each) => [each.name, queuedOf(each)]));
}

const SET = { "Parallel.Devices": " 0,1 ", "Parallel.Preset": "smallest memory" };

test("a loader without a plan is queued with the settings, and keeps none of them itself", () => {
  const node = loader();
  fillIn(page(SET), node);
  assert.deepEqual(queued(node), { unet_name: "kept", devices: "0,1", preset: "smallest memory" });
  const unsaved = node.widgets.filter(({ serialize }) => serialize === false);
  const names = [unsaved, node.inputs ?? []].map((each) => each.map(({ name }) => name).join());
  assert.deepEqual(names, ["devices,preset", "plan"], "no slot for them");
});

test("the usual settings are not sent, and neither are those of a loader with a plan that runs", () => {
  /** @type {Record<string, string>[]} */
  const usual = [{}, { "Parallel.Devices": "auto", "Parallel.Preset": "automatic" }, { "Parallel.Devices": "" }];
  for (const set of usual) {
    const node = loader();
    fillIn(page(set), node);
    assert.deepEqual(queued(node), { unet_name: "kept", devices: undefined, preset: undefined });
  }
  const planned = loader({ mode: 0 });
  fillIn(page(SET), planned);
  assert.deepEqual(queued(planned), { unet_name: "kept", devices: undefined, preset: undefined });
  for (const mode of [0, 2, 4]) assert.equal(hasPlan(loader({ mode })), mode === 0);
});

test("a saved workflow has the settings of its loaders without a plan, and only if there are such loaders", () => {
  /** @type {(app: App, extra: Record<string, unknown>) => unknown} */
  const saved = (app, extra) => {
    const told = { extra };
    keepWithWorkflow(app);
    app.rootGraph.onSerialize?.(told);
    return told.extra;
  };
  const now = { devices: "0,1", preset: "smallest memory" };
  assert.deepEqual(saved(page(SET, [loader()]), { ds: 1 }), { ds: 1, parallel: now });
  assert.deepEqual(saved(page(SET, [loader({ mode: 0 })]), { ds: 1, parallel: now }), { ds: 1 });
  assert.deepEqual(saved(page({}, [loader()]), { parallel: now }), {});
});
