// @ts-check
/** The template that needs no GPU. One click copies its files, which came with the pack, to ComfyUI's folders. */

/** @import { Api, App, GraphNode } from "./comfyui" */
/** @import { Words } from "./words" */

import { showMessage } from "./messages.js";
import { saidIn } from "./panel/source.js";

const MODEL = "sprites-flux-schnell.safetensors";

/**
 * Offer to copy the files if the opened graph uses the model and the model's file is missing.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 */
export async function offerSprites(app, api, words) {
  const node = app.rootGraph.nodes.find(lacksModel);
  if (!node) return;
  const { command, dialog } = app.extensionManager;
  const wanted = await dialog.confirm({ title: words.say("sprites.title"), message: words.say("sprites.message") });
  if (!wanted) return;
  const answer = await api.fetchApi("/parallel/sprites", { method: "POST" });
  if (!answer.ok) {
    showMessage(app, { severity: "error", summary: words.say("sprites.failed"), detail: saidIn(await answer.text()) });
    return;
  }
  await command.execute("Comfy.RefreshNodeDefinitions"); // like R: updates the lists and the missing-file marks
  node.setDirtyCanvas(true, true); // draws the node without its mark, which R does not
  showMessage(app, {
    severity: "success",
    summary: words.say("sprites.done"),
    detail: words.say("sprites.run"),
    life: 5000,
  });
}

/**
 * Return true if a node uses the sprites' model and its list of files lacks the model.
 *
 * @param {GraphNode} node
 * @returns {boolean}
 */
export function lacksModel({ widgets }) {
  const chosen = widgets?.find(({ value }) => value === MODEL);
  const values = chosen?.options?.values;
  return Array.isArray(values) && !values.includes(MODEL);
}
