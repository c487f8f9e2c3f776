// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { inOrder, styleOf } from "../../web/templates.js";
import { ENGLISH, LANGUAGES } from "./languages.js";

test("the pack's templates come in its order, then those that the order does not name; others' stay as they are", () => {
  const others = { another: ["b", "a"] };
  const listed = { ...others, "A pack": ["new", "Chroma", "FLUX.1 dev", "Sprites"] };
  assert.deepEqual(inOrder(listed, "A pack", ["Sprites", "FLUX.1 dev", "Chroma"]), {
    ...others,
    "A pack": ["Sprites", "FLUX.1 dev", "Chroma", "new"],
  });
  assert.deepEqual(inOrder(others, "A pack", ["Sprites"]), others);
});

test("a description replaces the card's own, with any characters", () => {
  const style = styleOf({ "FLUX.1 dev": 'Pictures of "words".' });
  assert.match(style, /^\[data-testid="template-workflow-FLUX\.1 dev"\] p \{ font-size: 0 \} /);
  assert.match(style, / p::after \{ content: "Pictures of \\"words\\"\."; /);
});

test("every language describes the templates, and none by its name", () => {
  assert.equal(Object.keys(ENGLISH.templates)[0], "Sprites without a GPU");
  for (const { parallel } of Object.values(LANGUAGES))
    for (const [name, text] of Object.entries(parallel.templates)) assert.ok(text && !text.includes(name), name);
});
