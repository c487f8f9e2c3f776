// @ts-check
/** The node Parallel Plan in the page: offers this machine's GPUs, and folds advanced inputs in the old canvas too. */

/** @import { Words } from "../words" */

/**
 * @typedef {import("../comfyui").Widget & {serialize?: boolean, callback?: (value: unknown) => void}} Widget
 * @typedef {object} PlanNode
 * @property {string} comfyClass
 * @property {Widget[]} widgets
 * @property {boolean} [showAdvanced]
 * @property {[number, number]} size
 * @property {{nodeData: {input: {required: {devices: [string, {choices: [string, string][]}]}}}} & Function} constructor
 * @property {() => [number, number]} computeSize
 * @property {(size: [number, number]) => void} setSize
 * @property {(kind: string, name: string, value: string, callback: (value: string) => void, options: object) => Widget}
 *   addWidget
 */

/**
 * Return true if a node is Parallel Plan.
 * @param {object} node
 * @returns {node is PlanNode}
 */
export function isPlan(node) {
  return "comfyClass" in node && node.comfyClass === "ParallelPlan";
}

/**
 * Return the number of this machine's GPUs, each of which the node lists by its index.
 * @returns {number}
 */
export function countGpus() {
  const definition = /** @type {PlanNode["constructor"]} */ (window.LiteGraph.registered_node_types.ParallelPlan);
  const { choices } = definition.nodeData.input.required.devices[1];
  return choices.filter(([value]) => /^\d+$/.test(value)).length;
}

/** The loaders with rarely used inputs. */
const FOLDED = ["LoadParallelVAE", "LoadParallelCLIP"];

/**
 * Return true if a node of this pack has rarely used inputs. With these folded, Load Parallel VAE is as high as Load VAE.
 * @param {object} node
 * @returns {node is PlanNode}
 */
export function isFolded(node) {
  return isPlan(node) || ("comfyClass" in node && FOLDED.includes(String(node.comfyClass)));
}

/**
 * Add a list of this machine's devices. A choice writes the input `devices`, which still accepts any other text.
 *
 * The list is the last widget and is not saved, so that the values of a saved graph keep their positions.
 * @param {PlanNode} node
 * @param {Words} words
 */
export function offerDevices(node, words) {
  const unchosen = words.say("devices.choose");
  const { choices } = node.constructor.nodeData.input.required.devices[1];
  const values = new Map(choices.map(([value, meaning]) => [`${value}: ${meaning}`, value]));
  const devices = node.widgets.find((widget) => widget.name === "devices");
  /** @param {string} chosen */
  const choose = (chosen) => {
    const value = values.get(chosen);
    if (value === undefined || !devices) return;
    devices.value = value;
    devices.callback?.(value);
    offer.value = unchosen;
  };
  const options = { values: [unchosen, ...values.keys()], serialize: false };
  const offer = node.addWidget("combo", words.say("devices.name"), unchosen, choose, options);
  offer.serialize = false;
}

/**
 * Fold the advanced widgets in the old canvas, whose menu has "Show Advanced".
 *
 * The old canvas folds a widget that has `advanced` itself, and leaves a gap for the widget unless it is also hidden.
 * @param {PlanNode} node
 */
export function foldAdvanced(node) {
  for (const widget of node.widgets.filter((each) => each.options?.advanced)) {
    widget.advanced = true;
    Object.defineProperty(widget, "hidden", { configurable: true, get: () => !node.showAdvanced, set: () => {} });
  }
  node.setSize([node.size[0], node.computeSize()[1]]);
}
