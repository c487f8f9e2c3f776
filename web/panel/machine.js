// @ts-check
/** The machine and the workers: the memory of each device, and a line for each rank. */

/** @import { Words } from "../words" */
/** @import { DeviceMemory, GroupStatus, RankStatus, Status } from "./state" */

import { AUTO, afterTick, tickedOf } from "../plan/ticks.js";
import { element } from "./elements.js";
import { bytes } from "./units.js";

/** The devices that the settings name for loaders without a Parallel Plan, and a function that sets them. */
/** @typedef {{ devices: string, choose: (devices: string) => void }} Chosen */

/**
 * Return a bar for each device: the memory that workers hold, other used memory, and free memory.
 *
 * If there are several GPUs, each has a tick box, which includes the GPU for loaders without a Parallel Plan or not.
 *
 * @param {Status} status
 * @param {Chosen} chosen
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function memoryView(status, chosen, words) {
  const gpus = status.memory.filter(({ device }) => device !== "cpu").length;
  const ticked = tickedOf(chosen.devices, gpus);
  const bars = status.memory.map((device, index) => {
    const tick = gpus > 1 && index < gpus && tickBox(index, gpus, ticked ?? [], chosen, words);
    return memoryBar(device, heldOn(status, device.device), tick, words);
  });
  const usual = chosen.devices === AUTO;
  const note = words.say(usual ? "devices.usual" : "devices.set", { devices: chosen.devices });
  return element("div", "", ...bars, (gpus > 1 || !usual) && element("p", "pp-note", note));
}

/** @type {(index: number, gpus: number, ticked: number[], chosen: Chosen, words: Words) => HTMLElement} */
function tickBox(index, gpus, ticked, { devices, choose }, words) {
  const box = element("input", "pp-tick");
  box.type = "checkbox";
  box.checked = ticked.includes(index);
  box.disabled = box.checked && ticked.length === 1; // at least one GPU must work
  box.title = words.say("devices.tick");
  box.addEventListener("change", () => choose(afterTick(devices, gpus, index)));
  return box;
}

/**
 * Return the bytes of weights that all workers hold on a device. For the computer's memory, weights that wait there count too.
 *
 * @param {Status} status
 * @param {string} device
 * @returns {number}
 */
export function heldOn(status, device) {
  let sum = 0;
  for (const rank of status.workers.groups.flatMap((group) => group.ranks)) {
    if (rank.device === device) sum += rank.held.reduce((held, model) => held + model.nbytes, 0);
    if (device === "cpu" && !rank.device.includes("/")) sum += rank.on_host;
  }
  return sum;
}

/**
 * Return a line for each rank of each group of workers.
 *
 * @param {Status} status
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function workersView({ workers: { groups } }, words) {
  if (!groups.length) return element("p", "pp-note", words.say("workers.none"));
  return element("div", "", ...groups.map((group) => groupView(group, words)));
}

/** @type {(memory: DeviceMemory, held: number, tick: HTMLElement | false, words: Words) => HTMLElement} */
function memoryBar({ device, name, total, free }, held, tick, words) {
  const used = free === null ? held : Math.max(0, total - free);
  const ours = Math.min(held, used);
  const bar = element("div", "pp-bar", part("pp-held", ours, total), part("pp-used", used - ours, total));
  const known = { used: bytes(used), free: bytes(free ?? 0), total: bytes(total) };
  const figures = words.say(free === null ? "memory.unknown" : "memory.figures", known);
  bar.title = words.say("memory.tooltip", { held: bytes(held), others: bytes(used - ours), total: bytes(total) });
  const title = device === "cpu" ? words.say("memory.host") : `${device} ${name}`;
  const named = element(tick ? "label" : "span", "pp-name", tick, title);
  const told = element("div", "pp-spread", named, element("span", "pp-figures", figures));
  return element("div", "pp-device", told, bar);
}

/** @type {(kind: string, count: number, total: number) => HTMLElement} */
function part(kind, count, total) {
  const made = element("span", kind);
  made.style.width = `${(100 * count) / total}%`;
  return made;
}

/** @type {(group: GroupStatus, words: Words) => HTMLElement} */
function groupView(group, words) {
  return element("div", "pp-group", ...group.ranks.map((rank) => rankLine(rank, group, words)));
}

/** @type {(rank: RankStatus, group: GroupStatus, words: Words) => HTMLElement} */
function rankLine(rank, { state, model }, words) {
  const waits = rank.waiting && state === "running";
  const held = rank.held.map((each) => `${each.model} ${bytes(each.nbytes)}`);
  if (rank.on_host) held.push(words.say("workers.waiting", { bytes: bytes(rank.on_host) }));
  const dot = element("i", `pp-dot pp-is-${waits ? "waiting" : state}`);
  const models = element("div", "pp-models", held.join(", ") || model || words.say("workers.empty"));
  models.title = held.join("\n");
  const doing = element("span", "pp-doing", doingOf(rank, state, words));
  const phase = words.name(rank.phase);
  doing.title = waits ? words.say("rank.waits.tooltip", { phase }) : phase;
  const head = element("div", "pp-spread", element("span", "", dot, `${rank.rank} ${rank.device}`), doing);
  return element("div", "pp-worker", head, models);
}

/**
 * Return the rank's present work, in words.
 *
 * @param {Pick<RankStatus, "phase" | "step" | "waiting">} rank
 * @param {GroupStatus["state"]} state
 * @param {Words} words
 * @returns {string}
 */
export function doingOf({ phase, step, waiting }, state, words) {
  if (state !== "running") return words.name(state);
  const doing = step ? words.say("rank.step", { phase: words.name(phase), step }) : words.name(phase);
  return waiting ? words.say("rank.waits", { doing }) : doing;
}
