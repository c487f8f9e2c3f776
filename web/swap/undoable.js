// @ts-check
/** Another state of the open workflow, to which the page goes as it does with Redo: one Ctrl+Z goes back. */

/** @import { App, ChangeTracker } from "../comfyui" */
/** @import { Workflow } from "./graph" */

/**
 * The open workflow as it is now, as it would be saved.
 *
 * @param {App} app
 * @returns {Workflow}
 */
export function stateOf(app) {
  return /** @type {Workflow} */ (JSON.parse(JSON.stringify(app.rootGraph.serialize())));
}

/**
 * Goes to a state.
 *
 * @param {App} app
 * @param {ChangeTracker} tracker of the open workflow
 * @param {Workflow} state
 */
export async function goTo(app, tracker, state) {
  tracker.beforeChange();
  tracker.afterChange(); // what has changed until now can be undone for itself
  await tracker.updateState([state], tracker.undoQueue);
  tracker.redoQueue.length = 0;
  tracker.activeState = stateOf(app); // what the page adds to nodes is no change of its own
}
