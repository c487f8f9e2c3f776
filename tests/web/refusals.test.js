// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { messageOf } from "../../web/run/refusals.js";
import { ENGLISH } from "./languages.js";

const error = { prompt_id: "p", node_id: "3", node_type: "KSampler", exception_message: "ring 2 is too many.\n" };

test("one of the pack's errors is shown as its sentence", () => {
  assert.deepEqual(messageOf({ ...error, exception_type: "PlanRefused" }, ENGLISH), {
    severity: "error",
    summary: "This plan cannot run",
    detail: "ring 2 is too many.",
  });
});

test("another node's error is left to ComfyUI", () => {
  assert.equal(messageOf({ ...error, exception_type: "ValueError" }, ENGLISH), undefined);
});
