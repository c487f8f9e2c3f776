// @ts-check

import assert from "node:assert/strict";
import { test } from "node:test";

import { askedOf } from "../../web/run/expected.js";

/** @import { Prompt } from "../../web/comfyui" */

/** @type {(inputs?: Record<string, unknown>, others?: Prompt) => Prompt} */
function graph(inputs = {}, others = {}) {
  return {
    1: {
      class_type: "LoadParallelFlux",
      inputs: { unet_name: "flux.safetensors", weight_dtype: "default", ...inputs },
    },
    2: { class_type: "LoraLoaderModelOnly", inputs: { model: ["1", 0], lora_name: "a.safetensors" } },
    3: { class_type: "EmptySD3LatentImage", inputs: { width: 1024, height: 768, batch_size: 2 } },
    4: { class_type: "KSampler", inputs: { model: ["2", 0], latent_image: ["3", 0], cfg: 1, steps: 20 } },
    ...others,
  };
}

const ASKED = {
  kind: "LoadParallelFlux",
  file: "flux.safetensors",
  weight_dtype: "default",
  plan: { devices: "auto", preset: "automatic" },
  width: 1024,
  height: 768,
  length: 1,
  batch: 2,
  two_sided: false,
  steps: 20,
  prompts: [],
};

test("the loader's file, plan and size are found from the loader on", () => {
  assert.deepEqual(askedOf(graph(), "1"), ASKED);
  const planned = graph({ plan: ["9", 0] }, { 9: { class_type: "ParallelPlan", inputs: { devices: "0,1", cfg: 2 } } });
  assert.deepEqual(askedOf(planned, "1"), { ...ASKED, plan: { devices: "0,1", cfg: 2 } });
  assert.deepEqual(askedOf(graph({ devices: "0" }), "1"), { ...ASKED, plan: { devices: "0", preset: "automatic" } });
});

test("a guider's cfg, a number in a separate node, and a video after other nodes are found too", () => {
  const others = {
    3: { class_type: "EmptyHunyuanLatentVideo", inputs: { width: ["8", 0], height: 480, length: 81 } },
    4: { class_type: "SamplerCustomAdvanced", inputs: { guider: ["5", 0], latent_image: ["6", 0], sigmas: ["7", 0] } },
    5: { class_type: "CFGGuider", inputs: { model: ["2", 0], cfg: 3.5 } },
    6: { class_type: "SetLatentNoiseMask", inputs: { samples: ["3", 0] } },
    7: { class_type: "BasicScheduler", inputs: { model: ["2", 0], steps: 8, denoise: 1 } },
    8: { class_type: "PrimitiveInt", inputs: { value: 832 } },
  };
  const video = { width: 832, height: 480, length: 81, batch: 1, two_sided: true, steps: 8 };
  assert.deepEqual(askedOf(graph({}, others), "1"), { ...ASKED, ...video });
});

test("the compute dtype is found, and prompts are sent only if all of their files are known", () => {
  /** @type {(negative: Prompt[string]) => Prompt} */
  const others = (negative) => ({
    4: {
      class_type: "KSampler",
      inputs: { model: ["5", 0], positive: ["6", 0], negative: ["8", 0], latent_image: ["3", 0], steps: 20, cfg: 1 },
    },
    5: { class_type: "ModelComputeDtype", inputs: { model: ["2", 0], dtype: "fp32" } },
    6: { class_type: "FluxGuidance", inputs: { conditioning: ["7", 0], guidance: 3.5 } },
    7: { class_type: "LoadConditioning", inputs: { conditioning: "a cat.safetensors" } },
    8: negative,
  });
  const read = { class_type: "LoadConditioning", inputs: { conditioning: "nothing.safetensors" } };
  const known = { ...ASKED, compute: "fp32", prompts: ["a cat.safetensors", "nothing.safetensors"] };
  assert.deepEqual(askedOf(graph({}, others(read)), "1"), known);
  const zero = { class_type: "ConditioningZeroOut", inputs: { conditioning: ["7", 0] } };
  const same = ["a cat.safetensors", "a cat.safetensors"];
  assert.deepEqual(askedOf(graph({}, others(zero)), "1"), { ...known, prompts: same });
  const both = { conditioning_to: ["7", 0], conditioning_from: ["7", 0] };
  const joined = { class_type: "ConditioningConcat", inputs: both };
  const encoded = { class_type: "CLIPTextEncode", inputs: { clip: ["9", 0], text: "a cat" } };
  for (const other of [joined, encoded]) {
    assert.deepEqual(askedOf(graph({}, others(other)), "1"), { ...known, prompts: [] });
  }
});

test("the page sends no request while a value is not known", () => {
  const { 3: latent, 4: sampler, ...loose } = graph();
  assert.ok(latent && sampler);
  assert.equal(askedOf(loose, "1"), undefined, "no sampler");
  assert.equal(askedOf(graph({ unet_name: ["7", 0] }), "1"), undefined, "a linked file");
  const other = { 9: { class_type: "Other", inputs: {} } };
  assert.equal(askedOf(graph({ plan: ["9", 0] }, other), "1"), undefined, "another's plan");
  const picture = { 3: { class_type: "VAEEncode", inputs: { pixels: ["7", 0] } } };
  assert.equal(askedOf(graph({}, picture), "1"), undefined, "a picture's size");
  assert.equal(askedOf(graph(), "5"), undefined, "no such node");
});
