// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { showTexts } from "../../web/run/texts.js";
import { Words } from "../../web/words.js";
import { LANGUAGES } from "./languages.js";

/** @import { Api, App, Widget } from "../../web/comfyui" */

/**
 * What a node shows of a line, which ComfyUI puts into its widget after the pack has heard of it.
 *
 * @param {string} text
 * @param {string} locale
 */
async function shown(text, locale) {
  /** @type {Widget} */
  const widget = { name: "$$node-text-preview", value: "", props: { nodeId: "3" }, options: {} };
  const node = {
    widgets: [widget],
    size: [300, 100],
    computeSize: () => [300, 60 + (widget.options?.getMinHeight?.() ?? 0)],
    /** @type {(size: [number, number]) => void} */
    setSize(size) {
      node.size = size;
    },
  };
  const app = { rootGraph: { getNodeById: () => node } };
  const api = {
    /** @type {(name: string, listener: (event: object) => void) => void} */
    addEventListener(name, listener) {
      assert.equal(name, "progress_text");
      listener({ detail: { nodeId: "3", text } });
      widget.value = text;
    },
  };
  const words = new Words(LANGUAGES, () => locale);
  showTexts(
    /** @type {App} */ (/** @type {unknown} */ (app)),
    /** @type {Api} */ (/** @type {unknown} */ (api)),
    words,
  );
  await new Promise((resolve) => setTimeout(resolve));
  return { text: widget.value, height: node.size[1], props: widget.props };
}

test("the first line has room on its node, and ComfyUI's language", async () => {
  const { text, height, props } = await shown("Starting 4 workers, 0 s", "zh");
  assert.equal(text, "正在启动 4 个工作进程，0 秒");
  assert.ok(Number(height) > 100);
  assert.deepEqual(props, { nodeId: "3", class: "pp-on-node" });
  assert.equal((await shown("Starting 4 workers, 0 s", "en")).text, "Starting 4 workers, 0 s");
});

test("a line of another pack stays as it is", async () => {
  assert.deepEqual(await shown("Uploading to the cloud", "zh"), {
    text: "Uploading to the cloud",
    height: 100,
    props: { nodeId: "3" },
  });
});
