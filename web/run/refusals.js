// @ts-check
/** The pack's own errors, told as the sentences they are, and shown at the node that is to be changed. */

/** @import { Api, App, ExecutionError, ToastMessage } from "../comfyui" */
/** @import { Key, Words } from "../words" */

import { showMessage } from "../messages.js";
import { wantsMessages } from "../settings.js";
import { fieldsNamed, nodeAtFault } from "./fault.js";
import { Highlights } from "./highlights.js";
import { pathOf } from "./node_path.js";
import { linkMessage, remedyOf } from "./remedies.js";

/** The title of each of the pack's errors (parallel_backend/errors.py). */
/** @type {Record<string, Key>} */
const TITLES = {
  Refused: "error.Refused",
  PlanRefused: "error.PlanRefused",
  NotFinite: "error.NotFinite",
  RequestFailed: "error.RequestFailed",
  WorkerFailed: "error.WorkerFailed",
  WorkerOutOfMemory: "error.WorkerOutOfMemory",
};

/**
 * The message for an error of a run; nothing for an error that is not the pack's.
 *
 * @param {ExecutionError} error
 * @param {Words} words
 * @returns {ToastMessage | undefined}
 */
export function messageOf(error, words) {
  const title = TITLES[error.exception_type];
  if (title === undefined) return undefined;
  return { severity: "error", summary: words.say(title), detail: error.exception_message.trim() };
}

/**
 * Shows the whole sentence of each of the pack's errors, and marks the node and the fields it speaks of, and the subgraph
 * nodes that it is inside of, until the next run.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 */
export function showRefusals(app, api, words) {
  const highlights = new Highlights();
  /** @type {(() => void)[]} */
  const told = [];
  api.addEventListener("execution_start", () => highlights.clear());
  api.addEventListener("promptQueueing", () => {
    // not when the next one starts: of several that are queued each is to be read
    for (const takeOff of told.splice(0)) takeOff();
  });
  api.addEventListener("execution_error", async ({ detail }) => {
    const message = messageOf(detail, words);
    if (!message) return;
    if (wantsMessages(app)) {
      told.push(showMessage(app, message));
      void remedyOf(api, message.detail).then(
        (url) => url && linkMessage(message.detail, url, words.say("remedy.link")),
      );
    }
    const { output } = await app.graphToPrompt();
    const path = pathOf(app, nodeAtFault(detail, output));
    const node = path.pop();
    if (!node) return;
    for (const outer of path) highlights.add(outer, []);
    highlights.add(node, fieldsNamed(message.detail, node.widgets ?? []));
    app.canvas.bringToFront(node); // its advanced fields, if they are unfolded for the mark, may reach under other nodes
  });
}
