// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { offerSprites } from "../../web/sprites.js";
import { ENGLISH } from "./languages.js";

const MODEL = "sprites-flux-schnell.safetensors";

/**
 * Returns the calls of a page in which the model is chosen, the list has these files, and the user gives an answer.
 *
 * @param {string[]} values
 * @param {boolean | null} wanted
 * @param {Response} answer
 */
async function happens(values, wanted, answer) {
  /** @type {string[]} */
  const done = [];
  const node = { widgets: [{ name: "unet_name", value: MODEL, options: { values } }], setDirtyCanvas() {} };
  const app = {
    rootGraph: { nodes: [{}, node] },
    extensionManager: {
      dialog: { confirm: async () => done.push("asked") && wanted },
      command: { execute: async (/** @type {string} */ id) => done.push(id) },
      toast: { add: ({ summary = "", detail = "" }) => done.push(`${summary}: ${detail}`) },
    },
  };
  const api = { fetchApi: async (/** @type {string} */ path) => done.push(path) && answer };
  await offerSprites(/** @type {any} */ (app), /** @type {any} */ (api), ENGLISH);
  return done;
}

test("a click installs the sprites if they are not there, or a message gives the reason", async () => {
  const asked = ["asked", "/parallel/sprites"];
  assert.deepEqual(await happens([MODEL], true, new Response("{}")), [], "they are there");
  assert.deepEqual(await happens([], null, new Response("{}")), ["asked"], "without a click nothing happens");
  const done = await happens(["other"], true, new Response("{}"));
  assert.deepEqual(done, [...asked, "Comfy.RefreshNodeDefinitions", "The sprites are in place: Press Run."]);
  const refusal = new Response(JSON.stringify({ said: "the disk is full." }), { status: 500 });
  const failed = await happens([], true, refusal);
  assert.deepEqual(failed, [...asked, "The sprites are not in place: the disk is full."]);
});
