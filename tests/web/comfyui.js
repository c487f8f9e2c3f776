// @ts-check
/** Parts of ComfyUI's page that tests replace. */

/** @import { Api, Badge } from "../../web/comfyui" */

/** A replacement of ComfyUI's class of badges. */
export class OneBadge {
  /** @param {{ text: string }} options */
  constructor({ text }) {
    this.text = text;
  }
}

/**
 * Returns the texts of a node's badges.
 *
 * @param {{ badges: (Badge | (() => Badge))[] }} node
 * @returns {string[]}
 */
export function badgesOf({ badges }) {
  return badges.map((badge) => (typeof badge === "function" ? badge() : badge).text);
}

/**
 * Returns ComfyUI's API with these functions, and a function that sends an event to its listener.
 *
 * @param {object} functions
 * @returns {{ api: Api, tell: (name: string, detail?: object) => void }}
 */
export function events(functions = {}) {
  /** @type {Record<string, (event: object) => void>} */
  const listeners = {};
  /** @type {(name: string, listener: (event: object) => void) => void} */
  const addEventListener = (name, listener) => {
    listeners[name] = listener;
  };
  return {
    api: /** @type {Api} */ (/** @type {unknown} */ ({ ...functions, addEventListener })),
    tell: (name, detail = {}) => listeners[name]?.({ detail }),
  };
}
