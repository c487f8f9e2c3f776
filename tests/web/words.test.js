// @ts-check
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { Words } from "../../web/words.js";
import { LANGUAGES } from "./languages.js";

const WEB = new URL("../../web/", import.meta.url);
const modules = readdirSync(WEB, { recursive: true }).filter((path) => String(path).endsWith(".js"));
const source = modules.map((path) => readFileSync(new URL(String(path), WEB), "utf8")).join("\n");

const { texts, lines, sentences } = LANGUAGES.en.parallel;

/** @type {(text: string) => string[]} */
const placeholders = (text) => (text.match(/\{\w+\}/g) ?? []).sort();

for (const [language, { parallel }] of Object.entries(LANGUAGES)) {
  test(`${language} has every text with its values, and no name is empty`, () => {
    const values = (/** @type {Record<string, string>} */ all) => Object.values(all).map(placeholders);
    assert.deepEqual(values(parallel.texts), values(texts));
    for (const list of /** @type {const} */ (["lines", "sentences"])) {
      for (const [text, other] of Object.entries(parallel[list]))
        assert.deepEqual(placeholders(other), placeholders(text));
    }
    assert.ok([...Object.values(parallel.texts), ...Object.values(parallel.names)].every(Boolean));
  });
}

/** @type {(keys: string[]) => string[]} */
const unsaid = (keys) => keys.filter((key) => !source.includes(`"${key}"`));

test("the page uses every text that there is", () => {
  assert.ok(modules.length > 20 && Object.keys(texts).length > 100);
  assert.deepEqual(unsaid(Object.keys(texts)), []);
  assert.deepEqual(unsaid(["workers.free", "workers.none-of-it"]), ["workers.none-of-it"]);
});

test("a text is in ComfyUI's current language, with its values", () => {
  let locale = "en";
  const words = new Words(LANGUAGES, () => locale);
  assert.equal(words.say("memory.figures", { used: "1 GB", free: "2 GB" }), "1 GB used, 2 GB free");
  locale = "zh";
  assert.equal(words.say("memory.figures", { used: "1 GB", free: "2 GB" }), "已用 1 GB，空闲 2 GB");
  assert.equal(words.name("sampling"), "采样");
  assert.equal(words.name("something new"), "something new", "the server's word, without a name");
});

test("a text that a language lacks comes from its base language, otherwise from English", () => {
  const texts = { "workers.free": "釋放顯存" };
  const languages = { ...LANGUAGES, "zh-TW": { parallel: { texts } } };
  const words = new Words(languages, () => "zh-TW");
  assert.equal(words.say("workers.free"), "釋放顯存");
  assert.equal(words.say("workers.stop"), LANGUAGES.zh.parallel.texts["workers.stop"]);
  assert.equal(new Words(languages, () => "fr").say("workers.stop"), "Stop workers");
  assert.equal(new Words(languages, () => undefined).say("workers.stop"), "Stop workers");
});

test("the English texts equal the server's, word for word", () => {
  assert.ok(Object.keys(lines).length > 50 && Object.keys(sentences).length > 50);
  for (const [english, told] of Object.entries({ ...lines, ...sentences })) assert.equal(told, english);
});

test("a refusal stays English, and a line with values is translated", () => {
  const words = new Words(LANGUAGES, () => "zh");
  const refusal = "3 workers were asked for (ring 3), but 2 devices are there: set ring to 2, or to 0 for automatic.";
  assert.equal(words.told(refusal), refusal);
  assert.equal(words.line(`Failed: ${refusal}`), `失败：${refusal}`);
  assert.equal(words.told("WAN21_T2V, 3 of 40"), "WAN21_T2V，第 3 个，共 40 个");
  assert.equal(words.line("Loading 6.1 of 23.8 GB"), "正在加载 6.1 / 23.8 GB");
});

test("texts come from the server, and the keys replace them if it has none", async () => {
  const app = { extensionManager: { setting: { get: () => "zh" } } };
  const words = Words.of(/** @type {any} */ (app));
  assert.equal(words.say("workers.free"), "workers.free");
  const asked = /** @type {string[]} */ ([]);
  const fetchApi = async (/** @type {string} */ path) => {
    asked.push(path);
    return new Response(JSON.stringify(LANGUAGES));
  };
  await words.load(/** @type {any} */ ({ fetchApi }));
  assert.deepEqual(asked, ["/i18n"]);
  assert.equal(words.say("workers.free"), "释放显存");
});
