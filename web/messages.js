// @ts-check
/** The pack's messages over the graph. */

/** @import { App, ToastMessage } from "./comfyui" */

/** CSS class by which panel/panel.css moves the messages below ComfyUI's own error message, which has the same place. */
const STYLE = "pp-message";

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
