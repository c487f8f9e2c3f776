// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { fieldsNamed, nodeAtFault } from "../../web/run/fault.js";

const prompt = {
  1: { class_type: "ParallelPlan", inputs: { devices: "cpu:2" } },
  2: { class_type: "LoadParallelFlux", inputs: { plan: ["1", 0], unet_name: "a/b.safetensors" } },
  "5:3": { class_type: "ModelSamplingFlux", inputs: { model: ["2", 0] } },
  4: { class_type: "KSampler", inputs: { model: ["5:3", 0], seed: 1 } },
  6: { class_type: "LoadParallelFlux", inputs: { unet_name: "b.safetensors" } },
};
/** @type {(node_id: string, exception_type: string) => import("../../web/comfyui").ExecutionError} */
const error = (node_id, exception_type) => ({
  ...{ prompt_id: "p", node_id, node_type: "", exception_type, exception_message: "" },
});

test("if the plan is at fault, its node is marked, however far it is from the error, otherwise the node that failed", () => {
  assert.equal(nodeAtFault(error("2", "PlanRefused"), prompt), "1");
  assert.equal(nodeAtFault(error("4", "PlanRefused"), prompt), "1");
  assert.equal(nodeAtFault(error("4", "Refused"), prompt), "4");
  assert.equal(nodeAtFault(error("6", "PlanRefused"), prompt), "6", "no plan is connected");
  assert.equal(nodeAtFault(error("9", "PlanRefused"), prompt), "9", "the node is gone");
});

const widgets = [
  { name: "devices", value: "tcp://10.0.0.1:29600" },
  { name: "cfg", value: 0 },
  { name: "ring", value: 2 },
  { name: "weights", value: "sharded", options: { values: ["replicated", "sharded"] } },
  { name: "attention", value: "auto", options: { values: ["auto", "sdpa"] } },
  { name: "unet_name", value: "folder/model.safetensors" },
];
/** @type {(sentence: string) => string[]} */
const named = (sentence) => fieldsNamed(sentence, widgets).map((widget) => widget.name);

test("a sentence names a field by its name with a value after it, and not by its name alone", () => {
  const sentence = "4 workers were asked for (ring 2 x ulysses 2), but 2 devices are there (devices 'cpu:2').";
  assert.deepEqual(named(sentence), ["devices", "ring"]);
  assert.deepEqual(named("weights sharded cannot be used with pipefusion 2."), ["weights"]);
  assert.deepEqual(named("cfg -1 is no degree."), ["cfg"]);
  assert.deepEqual(named("3 workers were asked for: set ring to 2, or to 0 for automatic."), ["ring"]);
  assert.deepEqual(named("the weights of a ring live in 2 attention heads of other devices."), []);
});

test("a sentence names a field by its value", () => {
  assert.deepEqual(named("no workers answer at tcp://10.0.0.1:29600 (timed out)."), ["devices"]);
  assert.deepEqual(named("model.safetensors is not a model ComfyUI knows."), ["unet_name"]);
  assert.deepEqual(named('write "auto", or choose another file.'), []);
});
