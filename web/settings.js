// @ts-check
/** The user's settings under Parallel in ComfyUI's settings. Their texts are also in locales/<language>/settings.json. */

/** @import { App, Setting } from "./comfyui" */

import { AUTO } from "./plan/ticks.js";

const DEVICES = "Parallel.Devices";
const PRESET = "Parallel.Preset";
const MESSAGES = "Parallel.Messages";
const STRIP = "Parallel.Strip";

const AUTOMATIC = "automatic";

/** The devices and the preset of loaders without a Parallel Plan (nodes/without_plan.py). */
/** @typedef {{ devices: string, preset: string }} Unplanned */

/** @type {Unplanned} */
export const USUAL = { devices: AUTO, preset: AUTOMATIC };

/**
 * Return the settings.
 *
 * @param {() => void} changed called when the devices or the preset of loaders have changed
 * @returns {Setting[]}
 */
export function settings(changed) {
  return [
    {
      id: DEVICES,
      category: ["Parallel", "Loaders without a Parallel Plan", "Devices"],
      name: "Devices",
      tooltip:
        'The GPUs for loaders without a Parallel Plan. "auto": the GPUs that are faster together; "0,1" or "0-3": these GPUs; ' +
        '"cpu:2": two workers on the CPU. Queued and exported workflows contain the value.',
      type: "text",
      defaultValue: USUAL.devices,
      onChange: changed,
    },
    {
      id: PRESET,
      category: ["Parallel", "Loaders without a Parallel Plan", "Preset"],
      name: "Preset",
      tooltip:
        "automatic: the fastest plan. smallest memory: the weights lie in the computer's memory. The picture is the same.",
      type: "combo",
      options: [AUTOMATIC, "smallest memory"],
      defaultValue: USUAL.preset,
      onChange: changed,
    },
    {
      id: MESSAGES,
      category: ["Parallel", "Runs", "Messages"],
      name: "Messages when a run fails",
      tooltip: "Shows the reason as a message over the graph. The node is marked in any case.",
      type: "boolean",
      defaultValue: true,
    },
    {
      id: STRIP,
      category: ["Parallel", "Runs", "Strip"],
      name: "GPUs during a run",
      tooltip: "Shows each GPU's load, memory and temperature in a strip below the graph, if the driver reports them.",
      type: "boolean",
      defaultValue: true,
    },
  ];
}

/**
 * Return true if the user wants messages.
 *
 * @param {App} app
 * @returns {boolean}
 */
export function wantsMessages(app) {
  return /** @type {boolean | undefined} */ (app.extensionManager.setting.get(MESSAGES)) !== false;
}

/**
 * Return true if the user wants to see the GPUs during a run.
 *
 * @param {App} app
 * @returns {boolean}
 */
export function wantsStrip(app) {
  return /** @type {boolean | undefined} */ (app.extensionManager.setting.get(STRIP)) !== false;
}

/**
 * Return the devices and the preset of loaders without a Parallel Plan.
 *
 * @param {App} app
 * @returns {Unplanned}
 */
export function unplanned(app) {
  const { setting } = app.extensionManager;
  return { devices: setting.get(DEVICES)?.trim() || USUAL.devices, preset: setting.get(PRESET) ?? USUAL.preset };
}

/**
 * Set the devices of loaders without a Parallel Plan.
 *
 * @param {App} app
 * @param {string} devices
 */
export async function setDevices(app, devices) {
  await app.extensionManager.setting.set(DEVICES, devices);
}
