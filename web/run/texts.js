// @ts-check
/** The pack's lines on a node: in ComfyUI's language, with room for them, and broken between words. */

/** @import { Api, App } from "../comfyui" */
/** @import { Words } from "../words" */

import { fitText, textOf } from "./height.js";
import { nodeOf } from "./marks.js";

/** Of panel/panel.css; ComfyUI's own style breaks lines within words. */
const STYLE = "pp-on-node";

/**
 * Shows each of the pack's lines so; another's lines stay as ComfyUI shows them.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 */
export function showTexts(app, api, words) {
  api.addEventListener("progress_text", ({ detail: { nodeId, text } }) => {
    const told = words.line(text);
    if (told === undefined) return;
    queueMicrotask(() => {
      // once ComfyUI, which hears of it too, has put the text on the node
      const node = nodeOf(app, nodeId);
      const widget = node && textOf(node);
      if (!widget) return;
      widget.props = { ...widget.props, class: STYLE };
      widget.value = told;
      fitText(node);
    });
  });
}
