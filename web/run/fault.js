// @ts-check
/** Which node, and which of its fields, an error asks to change. */

/** @import { ExecutionError, Prompt, Widget } from "../comfyui" */

/**
 * The id of the node that is to be changed: where the plan is at fault, the nearest Parallel Plan that the failed node's
 * inputs come from; else the failed node.
 *
 * @param {ExecutionError} error
 * @param {Prompt} prompt the graph as it was queued
 * @returns {string}
 */
export function nodeAtFault({ node_id, exception_type }, prompt) {
  if (exception_type !== "PlanRefused") return node_id;
  const seen = new Set([node_id]);
  for (const id of seen) {
    const node = prompt[id]; // a set goes on with what is added meanwhile, so the nearest come first
    if (node?.class_type === "ParallelPlan") return id;
    for (const value of Object.values(node?.inputs ?? {})) {
      if (Array.isArray(value)) seen.add(String(value[0]));
    }
  }
  return node_id;
}

/**
 * The fields that a sentence speaks of: named with a value behind, such as `ring 2`, or by the value they have now.
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
  return new RegExp(`\\b${literally(name)} (?:${some.join("|")})`).test(sentence);
}

/** @type {(sentence: string, widget: Widget) => boolean} */
function hasItsValue(sentence, { value }) {
  if (typeof value !== "string" || !value) return false;
  const name = value.slice(value.lastIndexOf("/") + 1); // of a file, without its folder
  return sentence.includes(`'${value}'`) || (/[.:]/.test(name) && sentence.includes(name));
}

/** @type {(text: string) => string} */
function literally(text) {
  return text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
}
