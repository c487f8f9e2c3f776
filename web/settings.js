// @ts-check
/** What the user may set, under Parallel in ComfyUI's settings; its words are in locales/<language>/settings.json too. */

/** @import { App, Setting } from "./comfyui" */

const MESSAGES = "Parallel.Messages";

/** @type {Setting[]} */
export const SETTINGS = [
  {
    id: MESSAGES,
    category: ["Parallel", "Runs", "Messages"],
    name: "Messages when a run fails",
    tooltip: "Shows why as a message over the graph. The node is marked either way.",
    type: "boolean",
    defaultValue: true,
  },
];

/**
 * Whether the user wants messages.
 *
 * @param {App} app
 * @returns {boolean}
 */
export function wantsMessages(app) {
  return /** @type {boolean | undefined} */ (app.extensionManager.setting.get(MESSAGES)) !== false;
}
