// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { translated } from "../../web/sentences.js";

const SENTENCES = {
  "{seconds} s on {plan}.": "{plan} 用了 {seconds} 秒。",
  "Peak {peak} a device.": "峰值 {peak}。",
  "⚠ {warning}": "⚠ {warning}",
  "Failed: {why}": "失败：{why}",
  "Use fewer.": "请减少。",
  "1 worker ({where})": "1 个进程（{where}）",
  "{kind}, {number} of {count}": "{kind}，第 {number} 个，共 {count} 个",
};

const TYPES = {
  number: { pattern: "[0-9]+(?:\\.[0-9]+)?", names: ["seconds", "number", "count"] },
  class: { pattern: "\\w+", names: ["kind"] },
};

test("sentences are translated one by one, with their values, which may be sentences themselves", () => {
  const text = "1.5 s on 1 worker (cpu).\nPeak 1.7 GB a device. ⚠ Use fewer.";
  assert.equal(translated(text, SENTENCES, TYPES), "1 个进程（cpu） 用了 1.5 秒。\n峰值 1.7 GB。⚠ 请减少。");
});

test("an unknown sentence stays untranslated after a known one, and a text that begins with one is not translated", () => {
  const told = translated("Failed: It rained. Use fewer. (So it did.)", SENTENCES, TYPES);
  assert.equal(told, "失败：It rained. 请减少。(So it did.)");
  assert.equal(translated("It rained. Use fewer.", SENTENCES, TYPES), undefined);
  assert.equal(translated("Peak a device.", SENTENCES, TYPES), undefined);
});

test("a value matches its type only", () => {
  assert.equal(translated("FluxSchnell, 3 of 40", SENTENCES, TYPES), "FluxSchnell，第 3 个，共 40 个");
  for (const other of ["Use ring 1, 2 of 3", "FluxSchnell, one of 40", "FluxSchnell, 3 of 40 or 50"]) {
    assert.equal(translated(other, SENTENCES, TYPES), undefined);
    assert.notEqual(translated(other, SENTENCES, {}), undefined);
  }
});
