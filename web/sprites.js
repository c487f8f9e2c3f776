// @ts-check
/** The template that needs no GPU: its files came with the pack, and are put in place with one click. */

/** @import { Api, App, GraphNode } from "./comfyui" */
/** @import { Words } from "./words" */

import { showMessage } from "./messages.js";
import { saidIn } from "./panel/source.js";

const MODEL = "sprites-flux-schnell.safetensors";

/**
 * Asks whether to put the files in place where a graph that was opened chooses the model and it is not there.
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
  await command.execute("Comfy.RefreshNodeDefinitions"); // what R does: the lists, and what is said to be missing
  node.setDirtyCanvas(true, true); // its mark is gone, which R does not draw
  showMessage(app, {
    severity: "success",
    summary: words.say("sprites.done"),
    detail: words.say("sprites.run"),
    life: 5000,
  });
}

/**
 * Whether a node chooses the sprites' model, and its list does not have it.
 *
 * @param {GraphNode} node
 * @returns {boolean}
 */
export function lacksModel({ widgets }) {
  const chosen = widgets?.find(({ value }) => value === MODEL);
  const values = chosen?.options?.values;
  return Array.isArray(values) && !values.includes(MODEL);
}
