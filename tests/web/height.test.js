// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { fitText, heightOf } from "../../web/run/height.js";

test("a text's height is that of its lines, with long lines broken at the node's width", () => {
  const one = heightOf("6.8 s", 400);
  assert.ok(heightOf("6.8 s\nPeak 1.7 GB", 400) > one);
  assert.equal(heightOf("x".repeat(90), 400), heightOf("short\nshort", 400));
  assert.equal(heightOf("字".repeat(45), 400), heightOf("x".repeat(90), 400));
  assert.ok(heightOf("x".repeat(90), 100) > heightOf("x".repeat(90), 400));
});

test("a node is measured again only for a text of another height", () => {
  let sizes = 0;
  const widget = { name: "$$node-text-preview", value: "Step 1 of 20", options: {} };
  /** @type {import("../../web/comfyui").GraphNode} */
  const node = /** @type {any} */ ({
    ...{ size: [300, 100], widgets: [widget], computeSize: () => [300, 120] },
    setSize: () => {
      sizes += 1;
    },
  });
  fitText(node);
  widget.value = "Step 2 of 20";
  fitText(node);
  assert.equal(sizes, 1);
  widget.value = "6.8 s\nPeak 1.7 GB";
  fitText(node);
  assert.equal(sizes, 2);
});
