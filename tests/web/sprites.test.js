// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { offerSprites } from "../../web/sprites.js";
import { Words } from "../../web/words.js";
import { LANGUAGES } from "./languages.js";

const MODEL = "sprites-flux-schnell.safetensors";

/**
 * What happens in a page where the model is chosen, the list has some files, and the user answers.
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

test("files that are there are not offered", async () => {
  assert.deepEqual(await happens([MODEL], true, new Response("{}")), []);
});

test("a click puts them in place", async () => {
  const done = await happens(["other"], true, new Response("{}"));
  assert.deepEqual(done, ["asked", "/parallel/sprites", REFRESH, "The sprites are in place: Press Run."]);
});

test("without it nothing is done", async () => {
  assert.deepEqual(await happens([], null, new Response("{}")), ["asked"]);
});

test("why they could not be copied is said", async () => {
  const refusal = new Response(JSON.stringify({ said: "the disk is full." }), { status: 500 });
  const done = await happens([], true, refusal);
  assert.deepEqual(done, ["asked", "/parallel/sprites", "The sprites are not in place: the disk is full."]);
});
