// @ts-check
/**
 * The pack's lines on a node: in ComfyUI's language, with enough height, and with line breaks between words.
 *
 * The subgraph nodes around the node show the first line as a sign, so that the run is visible from outside.
 */

/** @import { Api, App, GraphNode } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Signs } from "./signs" */

import { fitText, textOf } from "./height.js";
import { pathOf } from "./node_path.js";
import { remedyOf } from "./remedies.js";

/** A CSS class of panel/panel.css. ComfyUI's own style breaks lines within words. */
const STYLE = "pp-on-node";
const KIND = "text";

/** The beginning of the text of a run without result. The next run removes the text. */
const IN_VAIN = /^(Cancelled|Failed)/;

/** The beginning of a warning in the text of a successful run. */
const WARNING = /^⚠ /m;

/**
 * Show each of the pack's lines in this way. Other packs' lines stay as ComfyUI shows them.
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
      // after ComfyUI, which handles the same event, has put the text on the node
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

/** Append a link to the troubleshooting page's entry to a text, if the node still shows the text. */
/** @type {(api: Api, node: GraphNode, told: string, said: string, words: Words) => Promise<void>} */
async function addRemedy(api, node, told, said, words) {
  const url = await remedyOf(api, said);
  if (url && textOf(node)?.value === told) write(node, `${told}\n${words.say("remedy", { url })}`);
}

/** @type {(node: GraphNode, text: string) => void} */
function write(node, text) {
  const widget = textOf(node);
  if (!widget) return;
  if (widget.props?.class !== STYLE) widget.props = { ...widget.props, class: STYLE };
  widget.value = text;
  fitText(node);
}
