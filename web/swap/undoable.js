// @ts-check
/** A change of the open workflow to another state, in the same way as Redo, so that one Ctrl+Z undoes it. */

/** @import { App, ChangeTracker } from "../comfyui" */
/** @import { Workflow } from "./graph" */

/**
 * Return the open workflow in its saved form.
 *
 * @param {App} app
 * @returns {Workflow}
 */
export function stateOf(app) {
  return /** @type {Workflow} */ (JSON.parse(JSON.stringify(app.rootGraph.serialize())));
}

/**
 * Change the open workflow to another state.
 *
 * @param {App} app
 * @param {ChangeTracker} tracker the open workflow's tracker
 * @param {Workflow} state
 */
export async function goTo(app, tracker, state) {
  tracker.beforeChange();
  tracker.afterChange(); // earlier changes stay a separate step of undo
  await tracker.updateState([state], tracker.undoQueue);
  tracker.redoQueue.length = 0;
  tracker.activeState = stateOf(app); // the page's own additions to nodes are no change by the user
}
