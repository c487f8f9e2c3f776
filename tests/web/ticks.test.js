// @ts-check

import assert from "node:assert/strict";
import { test } from "node:test";

import { afterTick, tickedOf } from "../../web/plan/ticks.js";

test("a list of GPUs ticks the GPUs in it, and auto and all tick every GPU", () => {
  assert.deepEqual(tickedOf("auto", 3), [0, 1, 2]);
  assert.deepEqual(tickedOf(" All ", 2), [0, 1]);
  assert.deepEqual(tickedOf("0,2", 4), [0, 2]);
  assert.deepEqual(tickedOf("cuda:1, 2-3", 4), [1, 2, 3]);
});

test("a text that is no list of GPUs that are here ticks none", () => {
  for (const devices of ["cpu:2", "tcp://host:1", "0,0", "0,7", "2-1", "", "-1", "0,"]) {
    assert.equal(tickedOf(devices, 4), undefined, devices);
  }
});

test("a tick removes a GPU or adds it, all GPUs become auto, and the last one stays", () => {
  assert.equal(afterTick("auto", 4, 1), "0,2,3");
  assert.equal(afterTick("0,2,3", 4, 1), "auto");
  assert.equal(afterTick("2", 4, 0), "0,2");
  assert.equal(afterTick("2", 4, 2), "2");
  assert.equal(afterTick("cpu:2", 4, 3), "3");
});
