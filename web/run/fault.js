// @ts-check
/** The node, and the fields of it, that an error asks the user to change. */

/** @import { ExecutionError, Prompt, Widget } from "../comfyui" */

/**
 * Return the id of the node to change.
 *
 * For an error of the plan, that is the nearest Parallel Plan upstream of the failed node; otherwise the failed node.
 *
 * @param {ExecutionError} error
 * @param {Prompt} prompt the graph as it was queued
 * @returns {string}
 */
export function nodeAtFault({ node_id, exception_type }, prompt) {
  if (exception_type !== "PlanRefused") return node_id;
  const seen = new Set([node_id]);
  for (const id of seen) {
    const node = prompt[id]; // iterating over a set includes ids added meanwhile, so the nearest come first
    if (node?.class_type === "ParallelPlan") return id;
    for (const value of Object.values(node?.inputs ?? {})) {
      if (Array.isArray(value)) seen.add(String(value[0]));
    }
  }
  return node_id;
}

/**
 * Return the fields that a sentence names, with a value after the name such as `ring 2` or `ring to 2`, or by their present value.
 *
 * @template {Widget} T
 * @param {string} sentence
 * @param {readonly T[]} widgets
 * @returns {T[]}
 */
export function fieldsNamed(sentence, widgets) {
  return widgets.filter((widget) => isNamed(sentence, widget) || hasItsValue(sentence, widget));
}

/** @type {(sentence: string, widget: Widget) => boolean} */
function isNamed(sentence, { name, options }) {
  const values = Array.isArray(options?.values) ? options.values.map(String) : [];
  const some = ["-?\\d", "['\"]", ...values.map((value) => `${literally(value)}\\b`)];
  return new RegExp(`\\b${literally(name)} (?:to )?(?:${some.join("|")})`).test(sentence);
}

/** @type {(sentence: string, widget: Widget) => boolean} */
function hasItsValue(sentence, { value }) {
  if (typeof value !== "string" || !value) return false;
  const name = value.slice(value.lastIndexOf("/") + 1); // a file's name without its folder
  return sentence.includes(`'${value}'`) || (/[.:]/.test(name) && sentence.includes(name));
}

/** @type {(text: string) => string} */
function literally(text) {
  return text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
}
