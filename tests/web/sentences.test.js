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
};

test("sentences are translated one by one, with their values, which may be sentences themselves", () => {
  const text = "1.5 s on 1 worker (cpu).\nPeak 1.7 GB a device. ⚠ Use fewer.";
  assert.equal(translated(text, SENTENCES), "1 个进程（cpu） 用了 1.5 秒。\n峰值 1.7 GB。⚠ 请减少。");
});

test("an unknown sentence stays untranslated after a known one", () => {
  assert.equal(
    translated("Failed: It rained. Use fewer. (So it did.)", SENTENCES),
    "失败：It rained. 请减少。(So it did.)",
  );
});

test("a text that begins with an unknown sentence is not translated", () => {
  assert.equal(translated("It rained. Use fewer.", SENTENCES), undefined);
  assert.equal(translated("Peak a device.", SENTENCES), undefined);
});
