// @ts-check
/** The pack's own errors, told as the sentences they are, and shown at the node that is to be changed. */

/** @import { Api, App, ExecutionError, ToastMessage } from "../comfyui" */

import { fieldsNamed, nodeAtFault } from "./fault.js";
import { Marks, nodeOf } from "./marks.js";

/** What each of the pack's errors (parallel_backend/errors.py) means, in a word. */
const KINDS = new Map([
  ["Refused", "Cannot run"],
  ["PlanRefused", "This plan cannot run"],
  ["NotFinite", "Not a number"],
  ["WorkerFailed", "A worker failed"],
  ["WorkerOutOfMemory", "Not enough GPU memory"],
]);

/**
 * The message for an error of a run; nothing for an error that is not the pack's.
 *
 * @param {ExecutionError} error
 * @returns {ToastMessage | undefined}
 */
export function messageOf(error) {
  const summary = KINDS.get(error.exception_type);
  if (summary === undefined) return undefined;
  return { severity: "error", summary, detail: error.exception_message.trim() };
}

/**
 * Shows the whole sentence of each of the pack's errors, and marks the node and the fields it speaks of until the next run.
 *
 * @param {App} app
 * @param {Api} api
 */
export function showRefusals(app, api) {
  const marks = new Marks();
  api.addEventListener("execution_start", () => marks.clear());
  api.addEventListener("execution_error", async ({ detail }) => {
    const message = messageOf(detail);
    if (!message) return;
    app.extensionManager.toast.add(message);
    const { output } = await app.graphToPrompt();
    const node = nodeOf(app, nodeAtFault(detail, output));
    if (node) marks.mark(node, fieldsNamed(message.detail, node.widgets ?? []));
  });
}
