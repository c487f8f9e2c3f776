// @ts-check
/** Which loader of ComfyUI's or of another pack has which counterpart of this pack's. */

/**
 * @typedef {object} Pair
 * @property {string} one the node for one GPU
 * @property {string} all the node that uses all
 * @property {string} field the input that names the file; the same on both
 * @property {number} values how many values of its fields the first one keeps; the second's begin with these
 * @property {"model" | "vae"} holds
 */

/** @type {readonly Pair[]} */
export const PAIRS = [
  { one: "UNETLoader", all: "LoadParallelDiffusionModel", field: "unet_name", values: 2, holds: "model" },
  { one: "UnetLoaderGGUF", all: "LoadParallelDiffusionModel", field: "unet_name", values: 1, holds: "model" },
  { one: "CheckpointLoaderSimple", all: "LoadParallelCheckpoint", field: "ckpt_name", values: 1, holds: "model" },
  { one: "VAELoader", all: "LoadParallelVAE", field: "vae_name", values: 1, holds: "vae" },
  { one: "UNETLoader", all: "LoadParallelFlux", field: "unet_name", values: 2, holds: "model" },
];

/** What insists on a MODEL or VAE of this pack's, and what takes any: with the loaders it goes back to one GPU. */
/** @type {Readonly<Record<string, { one: string, values: number }>>} */
export const FOLLOWERS = {
  ParallelSampler: { one: "KSampler", values: 7 },
  CogVideoParallelDecode: { one: "VAEDecode", values: 0 },
};

/**
 * The pair of a loader for one GPU.
 *
 * @param {string} type
 * @returns {Pair | undefined}
 */
export function pairOfOne(type) {
  return PAIRS.find(({ one }) => one === type);
}

/**
 * What a loader that uses all GPUs goes back to, by the file that it loads; ComfyUI's loaders take no full checkpoint as a
 * diffusion model, and no folder.
 *
 * @param {string} type
 * @param {string} file
 * @returns {Pair | undefined}
 */
export function pairOfAll(type, file) {
  const gguf = file.endsWith(".gguf");
  if (file.startsWith("checkpoints/") || !/\.\w+$/.test(file)) return undefined;
  return PAIRS.find(({ one, all }) => all === type && (one === "UnetLoaderGGUF") === gguf);
}
