// @ts-check
/** The pairs of a loader, of ComfyUI or of another pack, and its counterpart in this pack. */

/** A field of the first node, and its name on the second; without a counterpart, the second node has no such field. */
/** @typedef {readonly [one: string, all?: string]} Field */

/**
 * @typedef {object} Pair
 * @property {string} one the node for one GPU
 * @property {string} all the node that uses all GPUs
 * @property {readonly Field[]} fields the fields of the first node, in the order of its saved values; files come first
 * @property {number} files the number of fields that name files
 * @property {string} [type] the type of text encoder that the first node loads, which has no field for it
 * @property {"model" | "text encoder" | "vae"} holds
 */

/** The files that a loader loads, and the type of text encoder, if it loads one. */
/** @typedef {{ files: readonly string[], encoder?: string }} Loads */

/** @type {Field} */
const DEVICE = ["device"];

/** @type {(names: readonly string[]) => readonly Field[]} */
const same = (names) => names.map((name) => [name, name]);

/** @type {readonly Pair[]} */
export const PAIRS = [
  {
    one: "UNETLoader",
    all: "LoadParallelDiffusionModel",
    fields: same(["unet_name", "weight_dtype"]),
    files: 1,
    holds: "model",
  },
  { one: "UnetLoaderGGUF", all: "LoadParallelDiffusionModel", fields: same(["unet_name"]), files: 1, holds: "model" },
  {
    one: "CheckpointLoaderSimple",
    all: "LoadParallelCheckpoint",
    fields: same(["ckpt_name"]),
    files: 1,
    holds: "model",
  },
  { one: "VAELoader", all: "LoadParallelVAE", fields: same(["vae_name"]), files: 1, holds: "vae" },
  { one: "UNETLoader", all: "LoadParallelFlux", fields: same(["unet_name", "weight_dtype"]), files: 1, holds: "model" },
  {
    one: "CLIPLoader",
    all: "LoadParallelCLIP",
    fields: [...same(["clip_name", "type"]), DEVICE],
    files: 1,
    holds: "text encoder",
  },
  {
    one: "LTXAVTextEncoderLoader",
    all: "LoadParallelCLIP",
    fields: [["text_encoder", "clip_name"], ["ckpt_name", "clip_name2"], DEVICE],
    files: 2,
    type: "ltxv",
    holds: "text encoder",
  },
  {
    one: "DualCLIPLoader",
    all: "LoadParallelCLIP",
    fields: [["clip_name1", "clip_name"], ...same(["clip_name2", "type"]), DEVICE],
    files: 2,
    holds: "text encoder",
  },
  {
    one: "TripleCLIPLoader",
    all: "LoadParallelCLIP",
    fields: [["clip_name1", "clip_name"], ...same(["clip_name2", "clip_name3"])],
    files: 3,
    type: "sd3",
    holds: "text encoder",
  },
  {
    one: "QuadrupleCLIPLoader",
    all: "LoadParallelCLIP",
    fields: [["clip_name1", "clip_name"], ...same(["clip_name2", "clip_name3", "clip_name4"])],
    files: 4,
    type: "hidream",
    holds: "text encoder",
  },
];

/** The fields of nodes that use all GPUs, in the order of their saved values, where the order differs from the first node's. */
/** @type {Readonly<Record<string, readonly string[]>>} */
const FIELDS = { LoadParallelCLIP: ["clip_name", "type", "clip_name2", "clip_name3", "clip_name4"] };

/** The choice of LoadParallelCLIP for no further file. */
const NONE = "none";

/**
 * Nodes that accept only this pack's MODEL or VAE, with their counterparts for any. They go back to one GPU with the loaders.
 */
/** @type {Readonly<Record<string, { one: string, values: number }>>} */
export const FOLLOWERS = {
  ParallelSampler: { one: "KSampler", values: 7 },
  CogVideoParallelDecode: { one: "VAEDecode", values: 0 },
};

/**
 * Return the fields of a pair's second node, in the order of its saved values.
 *
 * @param {Pair} pair
 * @returns {readonly string[]}
 */
export function fieldsOfAll({ all, fields }) {
  return FIELDS[all] ?? fields.flatMap(([, name]) => name ?? []);
}

/**
 * Return the names of a pair's fields by the names on its other node. A field without a counterpart has the value undefined.
 *
 * @param {Pair} pair
 * @param {"all" | "one"} way the node to which the fields change
 * @returns {ReadonlyMap<string, string | undefined>}
 */
export function renamed(pair, way) {
  if (way === "all") return new Map(pair.fields.map(([one, all]) => [one, all]));
  const names = new Map(pair.fields.map(([one, all]) => [all, one]));
  return new Map(fieldsOfAll(pair).map((name) => [name, names.get(name)]));
}

/**
 * Return the values of a loader's inputs that name its files, without those that name none.
 *
 * @param {string} type
 * @param {Readonly<Record<string, unknown>>} inputs
 * @returns {unknown[]}
 */
export function filesIn(type, inputs) {
  const pair = PAIRS.find(({ one, all }) => [one, all].includes(type));
  if (!pair) return [];
  const names = FIELDS[type]?.filter((name) => name !== "type") ?? pair.fields.slice(0, pair.files).map(([one]) => one);
  const files = names.map((name) => inputs[name] ?? NONE);
  return files.slice(0, files.findLastIndex((file) => file !== NONE) + 1);
}

/**
 * Return the pair of a loader for one GPU.
 *
 * @param {string} type
 * @returns {Pair | undefined}
 */
export function pairOfOne(type) {
  return PAIRS.find(({ one }) => one === type);
}

/**
 * Return true if a pair's first node loads these files as this type of text encoder.
 *
 * ComfyUI makes the same text encoder from three or four files, whatever the type.
 *
 * @param {Pair} pair
 * @param {Loads} loads
 * @returns {boolean}
 */
export function canLoad(pair, { files, encoder = "" }) {
  return pair.files === files.length && (files.length > 2 || pair.type === undefined || pair.type === encoder);
}

/**
 * Return the pair for taking a loader back to one GPU, by the files that it loads.
 *
 * ComfyUI's loaders load neither a full checkpoint by the name of its folder, nor a folder, nor a third file without a second.
 *
 * @param {string} type
 * @param {Loads} loads
 * @returns {Pair | undefined}
 */
export function pairOfAll(type, loads) {
  const { files } = loads;
  const [file = ""] = files;
  const gguf = file.endsWith(".gguf");
  if (files.some((each) => each.startsWith("checkpoints/") || each === NONE || !/\.\w+$/.test(each))) return undefined;
  return PAIRS.find((pair) => pair.all === type && canLoad(pair, loads) && (pair.one === "UnetLoaderGGUF") === gguf);
}
