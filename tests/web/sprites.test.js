// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { offerSprites } from "../../web/sprites.js";
import { Words } from "../../web/words.js";
import { LANGUAGES } from "./languages.js";

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
  await offerSprites(/** @type {any} */ (app), /** @type {any} */ (api), new Words(LANGUAGES, () => "en"));
  return done;
}

const REFRESH = "Comfy.RefreshNodeDefinitions";

test("the page offers no files that are there", async () => {
  assert.deepEqual(await happens([MODEL], true, new Response("{}")), []);
});

test("a click installs the sprites", async () => {
  const done = await happens(["other"], true, new Response("{}"));
  assert.deepEqual(done, ["asked", "/parallel/sprites", REFRESH, "The sprites are in place: Press Run."]);
});

test("without a click nothing happens", async () => {
  assert.deepEqual(await happens([], null, new Response("{}")), ["asked"]);
});

test("a message gives the reason if the sprites could not be copied", async () => {
  const refusal = new Response(JSON.stringify({ said: "the disk is full." }), { status: 500 });
  const done = await happens([], true, refusal);
  assert.deepEqual(done, ["asked", "/parallel/sprites", "The sprites are not in place: the disk is full."]);
});
