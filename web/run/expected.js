// @ts-check
/** The data about a loader's next run in a graph as it would be queued: file, plan, and the size of the run. */

/** @import { Prompt } from "../comfyui" */

import { USUAL } from "../settings.js";

/** A request in the server's form (nodes/routes/expectation.py). */
/** @typedef {{ kind: string, file: string, weight_dtype?: unknown, plan: Record<string, unknown>, width: number, height: number,
 *   length: number, batch: number, two_sided: boolean, steps?: number, compute?: string, prompts: string[] }} Asked */

const FILES = ["unet_name", "ckpt_name"];
const PLAN = "ParallelPlan";
const DTYPE = "ModelComputeDtype";
const PROMPT = "LoadConditioning";

/** Names of the inputs of samplers and guiders for prompts. */
const SIDES = ["positive", "negative", "conditioning"];

/**
 * Return the request for a loader; undefined until file, plan and size are known.
 *
 * @param {Prompt} prompt
 * @param {string} id the loader's id
 * @returns {Asked | undefined}
 */
export function askedOf(prompt, id) {
  const { class_type: kind = "", inputs = {} } = prompt[id] ?? {};
  const file = FILES.map((name) => inputs[name]).find((value) => typeof value === "string");
  const plan = planOf(prompt, inputs);
  const sampler = [...downFrom(prompt, id)]
    .map((each) => prompt[each])
    .find((node) => isLink(node?.inputs.latent_image));
  const latent = sampler && latentOf(prompt, sampler.inputs.latent_image);
  if (typeof file !== "string" || !plan || !sampler || !latent) return undefined;
  const given = { ...fromLink(prompt, sampler.inputs.guider)?.inputs, ...sampler.inputs };
  const steps = number(prompt, given.steps) ?? number(prompt, fromLink(prompt, given.sigmas)?.inputs.steps);
  const compute = [...upFrom(prompt, given.model)].find(({ class_type }) => class_type === DTYPE)?.inputs.dtype;
  const { weight_dtype } = inputs;
  return {
    kind,
    file,
    ...(weight_dtype === undefined ? {} : { weight_dtype }),
    plan,
    ...latent,
    two_sided: (number(prompt, given.cfg) ?? 1) !== 1,
    ...(steps === undefined ? {} : { steps }),
    ...(typeof compute === "string" ? { compute } : {}),
    prompts: promptsOf(prompt, given),
  };
}

/** Return the files of all of a sampler's prompts; none if another node makes one of the prompts. */
/** @type {(prompt: Prompt, given: Record<string, unknown>) => string[]} */
function promptsOf(prompt, given) {
  const links = SIDES.map((name) => given[name]).filter(isLink);
  const files = links.map((link) => promptFile(prompt, link)).filter((file) => file !== undefined);
  return files.length === links.length ? files : [];
}

/** Return the file of the prompt at a link, through nodes with no other link. */
/** @type {(prompt: Prompt, link: [string | number, number]) => string | undefined} */
function promptFile(prompt, link) {
  const { class_type, inputs = {} } = fromLink(prompt, link) ?? {};
  if (class_type === PROMPT) return typeof inputs.conditioning === "string" ? inputs.conditioning : undefined;
  const [behind, ...others] = Object.values(inputs).filter(isLink);
  return behind && !others.length ? promptFile(prompt, behind) : undefined;
}

/** Return the inputs of a loader's Parallel Plan, or else the settings; undefined if they come from other nodes. */
/** @type {(prompt: Prompt, inputs: Record<string, unknown>) => Record<string, unknown> | undefined} */
function planOf(prompt, { plan, devices = USUAL.devices, preset = USUAL.preset }) {
  if (plan === undefined) return { devices, preset };
  const node = fromLink(prompt, plan);
  if (node?.class_type !== PLAN) return undefined;
  return Object.values(node.inputs).some(isLink) ? undefined : node.inputs;
}

/** Return the size of a latent, from the nearest node upstream that has a width and a height. */
/** @type {(prompt: Prompt, link: unknown) => Pick<Asked, "width" | "height" | "length" | "batch"> | undefined} */
function latentOf(prompt, link) {
  for (const { inputs } of upFrom(prompt, link)) {
    const width = number(prompt, inputs.width);
    const height = number(prompt, inputs.height);
    if (!width || !height) continue;
    return { width, height, length: number(prompt, inputs.length) ?? 1, batch: number(prompt, inputs.batch_size) ?? 1 };
  }
  return undefined;
}

/** Return the ids of a node and of all nodes that depend on it, the nearest first. */
/** @type {(prompt: Prompt, id: string) => Set<string>} */
function downFrom(prompt, id) {
  const found = new Set([id]);
  for (const each of found) {
    for (const [other, { inputs }] of Object.entries(prompt)) {
      if (Object.values(inputs).some((value) => isLink(value) && String(value[0]) === each)) found.add(other);
    }
  }
  return found;
}

/** Yield the nodes upstream of a link, the nearest first. */
/** @type {(prompt: Prompt, link: unknown) => Generator<Prompt[string]>} */
function* upFrom(prompt, link) {
  const found = new Set(isLink(link) ? [String(link[0])] : []);
  for (const id of found) {
    const node = prompt[id];
    if (!node) continue;
    yield node;
    for (const value of Object.values(node.inputs)) if (isLink(value)) found.add(String(value[0]));
  }
}

/** Return a number that is an input's value, or the value of a node that only holds a number. */
/** @type {(prompt: Prompt, value: unknown) => number | undefined} */
function number(prompt, value) {
  const found = isLink(value) ? fromLink(prompt, value)?.inputs.value : value;
  return typeof found === "number" ? found : undefined;
}

/** @type {(prompt: Prompt, link: unknown) => Prompt[string] | undefined} */
function fromLink(prompt, link) {
  return isLink(link) ? prompt[String(link[0])] : undefined;
}

/** @type {(value: unknown) => value is [string | number, number]} */
function isLink(value) {
  return Array.isArray(value) && value.length === 2 && typeof value[1] === "number";
}
