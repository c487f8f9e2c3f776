// @ts-check
/** A strip below the graph during a run, with each GPU's load, memory and temperature, as far as the driver reports them. */

/** @import { Api, App } from "../comfyui" */
/** @import { DeviceMemory } from "../panel/state" */
/** @import { Words } from "../words" */

import { element } from "../panel/elements.js";
import { bytes } from "../panel/units.js";
import { wantsStrip } from "../settings.js";

/** Milliseconds between requests to the server, which sends changes for a minute after each. */
const AGAIN = 30_000;

/** The part of the page that ComfyUI's side panels leave for the graph. */
const CANVAS = ".graph-canvas-panel";

const ENDS = /** @type {const} */ (["execution_success", "execution_error", "execution_interrupted"]);

/**
 * Show the strip during each run, unless the user has turned it off or there is no GPU.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 */
export function showStrip(app, api, words) {
  const strip = element("div", "pp-strip");
  /** @type {ReturnType<typeof setInterval> | undefined} */
  let asking;
  /** @type {(memory: readonly DeviceMemory[]) => void} */
  const show = (memory) => {
    const gpus = memory.filter(({ device }) => device !== "cpu");
    if (asking === undefined || !gpus.length) return;
    strip.replaceChildren(...gpus.map((gpu) => cellOf(gpu, words)));
    if (!strip.isConnected) (document.querySelector(CANVAS) ?? document.body).append(strip);
  };
  const ask = async () => {
    const answer = await api.fetchApi("/parallel/status").catch(() => undefined); // the server may be gone
    if (answer?.ok) show((await answer.json()).memory);
  };
  const end = () => {
    clearInterval(asking);
    asking = undefined;
    strip.remove();
  };
  api.addEventListener("execution_start", () => {
    end();
    if (!wantsStrip(app)) return;
    asking = setInterval(() => void ask(), AGAIN);
    void ask();
  });
  for (const each of ENDS) api.addEventListener(each, end);
  api.addEventListener("parallel.status", ({ detail: { memory } }) => show(memory));
}

/** @type {(gpu: DeviceMemory, words: Words) => HTMLElement} */
function cellOf(gpu, words) {
  const cell = element("div", "pp-gpu", element("b", "", gpu.device), ` ${figuresOf(gpu, words)}`);
  cell.title = gpu.name;
  cell.style.setProperty("--load", `${gpu.load ?? 0}%`);
  return cell;
}

/**
 * Return the figures of a GPU, in a line.
 *
 * @param {DeviceMemory} gpu
 * @param {Words} words
 * @returns {string}
 */
export function figuresOf({ load, temperature, total, free }, words) {
  const parts = [
    load !== null && `${load} %`,
    words.say("strip.memory", { used: free === null ? "?" : bytes(total - free), total: bytes(total) }),
    temperature !== null && `${temperature} °C`,
  ];
  return parts.filter(Boolean).join(" · ");
}
