// @ts-check
/** The pack's lines on a node: in ComfyUI's language, with room for them, and broken between words. The subgraph nodes that it is
 * inside of have the first of them as a sign, so that a run is seen from outside.
 */

/** @import { Api, App, GraphNode } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Signs } from "./signs" */

import { fitText, textOf } from "./height.js";
import { pathOf } from "./node_path.js";
import { remedyOf } from "./remedies.js";

/** Of panel/panel.css; ComfyUI's own style breaks lines within words. */
const STYLE = "pp-on-node";
const KIND = "text";

/** What is said of a run that has come to nothing; it goes with the next one. */
const IN_VAIN = /^(Cancelled|Failed)/;

/** What a run that has come to something could do better. */
const WARNING = /^⚠ /m;

/**
 * Shows each of the pack's lines so; another's lines stay as ComfyUI shows them.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Signs} signs
 * @param {Words} words
 */
export function showTexts(app, api, signs, words) {
  /** @type {Set<GraphNode>} */
  const inVain = new Set();
  api.addEventListener("execution_start", () => {
    signs.clear(KIND);
    for (const node of inVain) write(node, "");
    inVain.clear();
  });
  api.addEventListener("progress_text", ({ detail: { nodeId, text } }) => {
    const told = words.line(text);
    if (told === undefined) return;
    queueMicrotask(() => {
      // once ComfyUI, which hears of it too, has put the text on the node
      const path = pathOf(app, nodeId);
      const node = path.pop();
      if (!node) return;
      write(node, told);
      if (IN_VAIN.test(text)) inVain.add(node);
      const [first = ""] = told.split("\n");
      for (const outer of path) signs.show(outer, KIND, first);
      const asks = IN_VAIN.exec(text) ?? WARNING.exec(text);
      if (asks) void addRemedy(api, node, told, text.slice(asks.index), words);
    });
  });
}

/** Puts where the troubleshooting page speaks of it behind a text, if that is still there. */
/** @type {(api: Api, node: GraphNode, told: string, said: string, words: Words) => Promise<void>} */
async function addRemedy(api, node, told, said, words) {
  const url = await remedyOf(api, said);
  if (url && textOf(node)?.value === told) write(node, `${told}\n${words.say("remedy", { url })}`);
}

/** @type {(node: GraphNode, text: string) => void} */
function write(node, text) {
  const widget = textOf(node);
  if (!widget) return;
  widget.props = { ...widget.props, class: STYLE };
  widget.value = text;
  fitText(node);
}
