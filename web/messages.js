// @ts-check
/** The pack's messages over the graph. */

/** @import { App, ToastMessage } from "./comfyui" */

/** By which panel/panel.css has them stand under ComfyUI's own word of an error, which is in the same place. */
const STYLE = "pp-message";

/**
 * Shows a message.
 *
 * @param {Pick<App, "extensionManager">} app
 * @param {ToastMessage} message
 * @returns {() => void} takes it off again
 */
export function showMessage({ extensionManager: { toast } }, message) {
  const shown = { ...message, styleClass: STYLE };
  toast.add(shown);
  return () => toast.remove(shown);
}
