// @ts-check
/** The pack's own errors, shown as a message and at the node that the user is to change. */

/** @import { Api, App, ExecutionError, ToastMessage } from "../comfyui" */
/** @import { Key, Words } from "../words" */

import { showMessage } from "../messages.js";
import { wantsMessages } from "../settings.js";
import { fieldsNamed, nodeAtFault } from "./fault.js";
import { Highlights } from "./highlights.js";
import { pathOf } from "./node_path.js";
import { linkMessage, remedyOf } from "./remedies.js";

/** ComfyUI's own message of a failed run, which names the node without the reason, and the button that closes it. */
const OVERLAY = '[data-testid="error-overlay"]';
const CLOSE = '[data-testid="error-overlay-dismiss"]';

/** Milliseconds between two searches for ComfyUI's message, and the number of searches. */
const SOON = 100;
const LOOKS = 20;

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
 * Return the message for an error of a run; undefined for an error that is not the pack's.
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
 * Show the whole sentence of each of the pack's errors, and highlight nodes until the next run.
 *
 * The highlighted nodes are the node to change, with the fields that the sentence names, and the subgraph nodes around it.
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
    // not at execution_start: if several runs are queued, the user can read the error of each
    for (const takeOff of told.splice(0)) takeOff();
  });
  api.addEventListener("execution_error", async ({ detail }) => {
    const message = messageOf(detail, words);
    if (!message) return;
    if (wantsMessages(app)) {
      told.push(showMessage(app, message));
      closeOverlay(pathOf(app, detail.node_id).at(-1)?.title ?? "");
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
    app.canvas.bringToFront(node); // unfolded advanced fields may reach under other nodes
  });
}

/**
 * Close ComfyUI's message of a failed run once the page shows it, unless it is of several errors.
 *
 * @param {string} title the title of the failed node, which ComfyUI's message of a single error contains
 */
function closeOverlay(title, looks = LOOKS) {
  if (!title) return; // the node is gone
  const overlay = document.querySelector(OVERLAY);
  if (!overlay && looks) setTimeout(() => closeOverlay(title, looks - 1), SOON);
  if (!overlay?.textContent?.includes(title)) return;
  /** @type {HTMLElement | null} */ (overlay.querySelector(CLOSE))?.click();
}
