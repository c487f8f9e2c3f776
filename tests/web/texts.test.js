// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { Signs } from "../../web/run/signs.js";
import { showTexts } from "../../web/run/texts.js";
import { Words } from "../../web/words.js";
import { badgesOf, events, OneBadge } from "./comfyui.js";
import { LANGUAGES } from "./languages.js";

/** @import { App, Widget } from "../../web/comfyui" */

/** The troubleshooting entries of a server, by the text of the request. */
/** @type {Record<string, string>} */
const ENTRIES = {
  "Failed: Worker 1 of 2 (cpu) was killed by SIGKILL.": "entry-70",
  "⚠ One device alone would be faster for this job: choose devices 0 in Parallel Plan.": "entry-18",
};

globalThis.window = /** @type {any} */ ({ location: { href: "http://here:8188/" } });

/**
 * Returns a page with a node 3, which is also in the subgraph node 7, and a function that sends a line to the page.
 *
 * ComfyUI puts a line into the node's widget after the pack has received the line.
 *
 * @param {string} locale
 */
function page(locale) {
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
  const outer = {
    title: "Text to image",
    /** @type {OneBadge[]} */
    badges: [],
    graph: null,
    subgraph: { getNodeById: () => node },
    setDirtyCanvas() {},
  };
  const app = { rootGraph: { getNodeById: (/** @type {string} */ id) => (id === "7" ? outer : node) } };
  const { api, tell: tellOf } = events({
    apiURL: (/** @type {string} */ path) => `/api${path}`,
    /** @type {(path: string, asked: { body: string }) => Promise<object>} */
    fetchApi: async (_, { body }) => ({ ok: true, json: async () => ({ entry: ENTRIES[body] ?? "" }) }),
  });
  const signs = new Signs(OneBadge, () => false);
  showTexts(/** @type {App} */ (/** @type {unknown} */ (app)), api, signs, new Words(LANGUAGES, () => locale));
  /** @type {(text: string, nodeId?: string) => Promise<void>} */
  const tell = async (text, nodeId = "3") => {
    tellOf("progress_text", { nodeId, text });
    widget.value = text;
    for (const _ of ["the line", "its link"]) await new Promise((resolve) => setTimeout(resolve));
  };
  return { node, outer, widget, tell, start: () => tellOf("execution_start") };
}

/** @type {(text: string, locale: string) => Promise<{ text: unknown, height: number | undefined, props: Widget["props"] }>} */
async function shown(text, locale) {
  const { node, widget, tell } = page(locale);
  await tell(text);
  return { text: widget.value, height: node.size[1], props: widget.props };
}

test("the first line has room on its node, and ComfyUI's language; a line of another pack stays as it is", async () => {
  const { text, height, props } = await shown("Starting 4 workers, 0 s", "zh");
  assert.equal(text, "正在启动 4 个工作进程，0 秒");
  assert.ok(Number(height) > 100);
  assert.deepEqual(props, { nodeId: "3", class: "pp-on-node" });
  assert.equal((await shown("Starting 4 workers, 0 s", "en")).text, "Starting 4 workers, 0 s");
  const other = "Uploading to the cloud";
  assert.deepEqual(await shown(other, "zh"), { text: other, height: 100, props: { nodeId: "3" } });
});

test("the subgraph node around the node has the first line as a sign, which the next line replaces", async () => {
  const { outer, tell, start } = page("en");
  await tell("Step 1 of 4", "7:3");
  await tell("3.5 s on 1 worker (cpu).\nPeak 1.0 GB a device.", "7:3");
  assert.deepEqual(badgesOf(outer), ["3.5 s on 1 worker (cpu)."]);
  start();
  assert.deepEqual(outer.badges, []);
});

test("the message of a run without a result disappears when the next run starts; an outcome stays", async () => {
  const { widget, tell, start } = page("en");
  for (const [text, left] of [
    ["Cancelled after 91 of 400", ""],
    ["Failed: the disk is full.", ""],
    ["3.5 s on 1 worker (cpu).", "3.5 s on 1 worker (cpu)."],
  ]) {
    await tell(text ?? "");
    start();
    assert.equal(widget.value, left);
  }
});

test("a failure and a warning link to their entry on the troubleshooting page", async () => {
  const { widget, tell } = page("en");
  const link = "What to do: http://here:8188/api/parallel/troubleshooting";
  for (const [text, entry] of Object.entries(ENTRIES)) {
    const before = text.startsWith("⚠") ? "3.5 s on 1 worker (cpu).\n" : "";
    await tell(before + text);
    assert.equal(widget.value, `${before}${text}\n${link}#${entry}`);
  }
  await tell("Failed: nobody knows why.");
  assert.equal(widget.value, "Failed: nobody knows why.");
});
