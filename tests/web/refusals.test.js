// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { messageOf, showRefusals } from "../../web/run/refusals.js";
import { events } from "./comfyui.js";
import { ENGLISH } from "./languages.js";

/** @import { App } from "../../web/comfyui" */

const error = { prompt_id: "p", node_id: "3", node_type: "KSampler", exception_message: "ring 2 is too many.\n" };

test("each of the pack's errors is shown as its sentence under its title", () => {
  for (const [exception_type, summary] of [
    ["Refused", "Cannot run"],
    ["PlanRefused", "This plan cannot run"],
    ["NotFinite", "Not a number"],
    ["RequestFailed", "This run failed"],
    ["WorkerFailed", "A worker failed"],
    ["WorkerOutOfMemory", "Not enough GPU memory"],
  ]) {
    const message = messageOf({ ...error, exception_type: exception_type ?? "" }, ENGLISH);
    assert.deepEqual(message, { severity: "error", summary, detail: "ring 2 is too many." });
  }
  assert.equal(messageOf({ ...error, exception_type: "ValueError" }, ENGLISH), undefined, "ComfyUI shows it");
});

/**
 * Returns the messages that a page shows, and a function that sends events to the page.
 *
 * @param {boolean} wanted
 */
function page(wanted) {
  /** @type {object[]} */
  const shown = [];
  const toast = {
    add: (/** @type {object} */ message) => shown.push(message),
    remove: (/** @type {object} */ message) => shown.splice(shown.indexOf(message), 1),
  };
  const app = {
    extensionManager: { toast, setting: { get: () => wanted } },
    graphToPrompt: async () => ({ output: {} }),
    rootGraph: { getNodeById: () => undefined },
  };
  const { api, tell } = events({ fetchApi: async () => ({ ok: false }) });
  showRefusals(/** @type {App} */ (/** @type {unknown} */ (app)), api, ENGLISH);
  return { shown, tell };
}

const refused = { exception_type: "Refused", exception_message: "no.", node_id: "1" };

test("messages disappear when the user queues the next run, not when an already queued run starts", () => {
  const { shown, tell } = page(true);
  tell("execution_error", refused);
  tell("execution_start");
  tell("execution_error", refused);
  assert.equal(shown.length, 2);
  tell("promptQueueing");
  assert.deepEqual(shown, []);
});

test("a user who switched messages off gets none", () => {
  const { shown, tell } = page(false);
  tell("execution_error", refused);
  assert.deepEqual(shown, []);
});
