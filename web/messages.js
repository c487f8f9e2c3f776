// @ts-check
/** The pack's messages over the graph. */

/** @import { Api, App, ToastMessage } from "./comfyui" */
/** @import { Words } from "./words" */

/** CSS class by which panel/panel.css moves the messages below ComfyUI's own error message, which has the same place. */
const STYLE = "pp-message";

/** The greatest number of GPUs that a greeting has named, among ComfyUI's settings, where the user does not see it. */
const GREETED = "Parallel.Greeted";

/**
 * Show a message.
 *
 * @param {Pick<App, "extensionManager">} app
 * @param {ToastMessage} message
 * @returns {() => void} removes the message
 */
export function showMessage({ extensionManager: { toast } }, message) {
  const shown = { ...message, styleClass: STYLE };
  toast.add(shown);
  return () => toast.remove(shown);
}

/**
 * Greet the user at the first start, and at the first start with several GPUs: show the number of GPUs, and the next step.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 * @param {number} count the number of this machine's GPUs
 */
export async function greet(app, api, words, count) {
  /** @type {number | null} */
  const before = await api.getSetting(GREETED);
  if (before !== null && count <= Math.max(before, 1)) return;
  await api.storeSetting(GREETED, count);
  if (count === 1) return;
  const summary = count ? words.say("greeting.gpus", { count }) : words.say("greeting.none");
  const detail = words.say(count ? (count === 2 ? "greeting.both" : "greeting.all") : "greeting.cpu");
  showMessage(app, { severity: "info", summary, detail });
}
