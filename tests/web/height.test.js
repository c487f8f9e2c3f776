// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { heightOf } from "../../web/run/height.js";

test("a text's height is that of its lines, with long lines broken at the node's width", () => {
  const one = heightOf("6.8 s", 400);
  assert.ok(heightOf("6.8 s\nPeak 1.7 GB", 400) > one);
  assert.equal(heightOf("x".repeat(90), 400), heightOf("short\nshort", 400));
  assert.equal(heightOf("字".repeat(45), 400), heightOf("x".repeat(90), 400));
  assert.ok(heightOf("x".repeat(90), 100) > heightOf("x".repeat(90), 400));
});
