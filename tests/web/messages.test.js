// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { greet } from "../../web/messages.js";
import { ENGLISH } from "./languages.js";

/** @import { Api, App, ToastMessage } from "../../web/comfyui" */

/**
 * Greet the user on a machine, and return the messages and what is stored.
 *
 * @param {number} count the number of GPUs
 * @param {number | null} stored the number of GPUs of the last greeting
 */
async function greeted(count, stored) {
  /** @type {ToastMessage[]} */
  const shown = [];
  const app = { extensionManager: { toast: { add: (/** @type {ToastMessage} */ message) => shown.push(message) } } };
  const api = {
    getSetting: async () => stored,
    storeSetting: async (/** @type {string} */ _, /** @type {number} */ value) => {
      stored = value;
    },
  };
  const [ofApp, ofApi] = /** @type {[App, Api]} */ (/** @type {unknown} */ ([app, api]));
  await greet(ofApp, ofApi, ENGLISH, count);
  return [shown.map(({ summary, detail }) => [summary, detail]), stored];
}

const CPU = "Runs use the CPU, which is slow. Check this machine, in the tab Parallel, looks for the cause.";

test("the first start names the GPUs and the shortcut, or says that there is none", async () => {
  assert.deepEqual(await greeted(2, null), [[["2 GPUs found", "Alt+G uses both."]], 2]);
  assert.deepEqual(await greeted(4, null), [[["4 GPUs found", "Alt+G uses all."]], 4]);
  assert.deepEqual(await greeted(0, null), [[["No GPU found", CPU]], 0]);
  assert.deepEqual(await greeted(1, null), [[], 1]);
});

test("a later start says something only if there are several GPUs, and more than before", async () => {
  for (const stored of [0, 1]) assert.deepEqual(await greeted(2, stored), [[["2 GPUs found", "Alt+G uses both."]], 2]);
  for (const count of [0, 1]) assert.deepEqual(await greeted(count, 0), [[], 0]);
  for (const count of [0, 1, 2]) assert.deepEqual(await greeted(count, 2), [[], 2]);
  assert.deepEqual(await greeted(2, 4), [[], 4]);
});
