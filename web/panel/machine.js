// @ts-check
/** What the machine has and what the workers do: memory of each device, and a line for each rank. */

/** @import { DeviceMemory, GroupStatus, RankStatus, Status } from "./state" */

import { element } from "./elements.js";
import { bytes } from "./units.js";

/**
 * A bar for each device: what workers hold, what else is used, what is free.
 *
 * @param {Status} status
 * @returns {HTMLElement}
 */
export function memoryView(status) {
  return element("div", "", ...status.memory.map((device) => memoryBar(device, heldOn(status, device.device))));
}

/**
 * Bytes of weights that all workers hold on a device, in the computer's memory those included that wait there.
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
 * A line for each rank of each group of workers.
 *
 * @param {Status} status
 * @returns {HTMLElement}
 */
export function workersView({ workers: { groups } }) {
  if (!groups.length) return element("p", "pp-note", "No workers are running; the next run starts them.");
  return element("div", "", ...groups.map(groupView));
}

/** @type {(memory: DeviceMemory, held: number) => HTMLElement} */
function memoryBar({ device, name, total, free }, held) {
  const used = free === null ? held : Math.max(0, total - free);
  const ours = Math.min(held, used);
  const bar = element("div", "pp-bar", part("pp-held", ours, total), part("pp-used", used - ours, total));
  const figures = free === null ? `${bytes(total)}, free not known` : `${bytes(used)} used, ${bytes(free)} free`;
  bar.title = `${bytes(held)} held by workers, ${bytes(used - ours)} used by others, of ${bytes(total)}`;
  const title = device === "cpu" ? "Computer's memory" : `${device} ${name}`;
  const told = element("div", "pp-spread", element("span", "pp-name", title), element("span", "pp-figures", figures));
  return element("div", "pp-device", told, bar);
}

/** @type {(kind: string, count: number, total: number) => HTMLElement} */
function part(kind, count, total) {
  const made = element("span", kind);
  made.style.width = `${(100 * count) / total}%`;
  return made;
}

/** @type {(group: GroupStatus) => HTMLElement} */
function groupView(group) {
  return element("div", "pp-group", ...group.ranks.map((rank) => rankLine(rank, group)));
}

/** @type {(rank: RankStatus, group: GroupStatus) => HTMLElement} */
function rankLine(rank, { state, model }) {
  const waits = rank.waiting && state === "running";
  const held = rank.held.map((each) => `${each.model} ${bytes(each.nbytes)}`);
  if (rank.on_host) held.push(`${bytes(rank.on_host)} waiting in the computer's memory`);
  const dot = element("i", `pp-dot pp-is-${waits ? "waiting" : state}`);
  const models = element("div", "pp-models", held.join(", ") || model || "holds no model");
  models.title = held.join("\n");
  const doing = element("span", "pp-doing", doingOf(rank, state));
  doing.title = waits ? `${rank.phase}: waits for other ranks` : rank.phase;
  const head = element("div", "pp-spread", element("span", "", dot, `${rank.rank} ${rank.device}`), doing);
  return element("div", "pp-worker", head, models);
}

/**
 * What a rank does, in words.
 *
 * @param {Pick<RankStatus, "phase" | "step" | "waiting">} rank
 * @param {GroupStatus["state"]} state
 * @returns {string}
 */
export function doingOf({ phase, step, waiting }, state) {
  if (state === "failed") return "has ended";
  if (state !== "running") return state === "ready" ? "idle" : state;
  const what = step ? `${phase}, step ${step}` : phase;
  return waiting ? `${what}, waits` : what;
}
