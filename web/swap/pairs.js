// @ts-check
/** The pairs of a loader, of ComfyUI or of another pack, and its counterpart in this pack. */

/**
 * @typedef {object} Pair
 * @property {string} one the node for one GPU
 * @property {string} all the node that uses all GPUs
 * @property {string} field the input that names the file; the same on both
 * @property {number} values the number of values that the first node saves; the second adds further ones
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

/**
 * Nodes that accept only this pack's MODEL or VAE, with their counterparts for any. They go back to one GPU with the loaders.
 */
/** @type {Readonly<Record<string, { one: string, values: number }>>} */
export const FOLLOWERS = {
  ParallelSampler: { one: "KSampler", values: 7 },
  CogVideoParallelDecode: { one: "VAEDecode", values: 0 },
};

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
 * Return the pair for taking a loader back to one GPU, by the file that it loads.
 *
 * ComfyUI's loaders load neither a full checkpoint as a diffusion model nor a folder.
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
