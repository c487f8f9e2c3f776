// @ts-check
/** Parallel Plan in the page: it offers the GPUs of this machine. Advanced inputs are folded in the old canvas too. */

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
 * Whether a node is Parallel Plan.
 * @param {object} node
 * @returns {node is PlanNode}
 */
export function isPlan(node) {
  return "comfyClass" in node && node.comfyClass === "ParallelPlan";
}

/**
 * Whether a node of this pack's has inputs that are seldom needed: with them folded Load Parallel VAE is no higher than Load VAE.
 * @param {object} node
 * @returns {node is PlanNode}
 */
export function isFolded(node) {
  return isPlan(node) || ("comfyClass" in node && node.comfyClass === "LoadParallelVAE");
}

/**
 * Adds a list of what this machine has; choosing writes `devices`, which stays a text that takes anything else. It is the last
 * widget and not kept, so that the values of a saved graph keep their places.
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
 * The old canvas folds a widget that says so itself ("Show Advanced" in the node's menu), and leaves a gap for it unless it is
 * hidden too.
 * @param {PlanNode} node
 */
export function foldAdvanced(node) {
  for (const widget of node.widgets.filter((each) => each.options?.advanced)) {
    widget.advanced = true;
    Object.defineProperty(widget, "hidden", { configurable: true, get: () => !node.showAdvanced, set: () => {} });
  }
  node.setSize([node.size[0], node.computeSize()[1]]);
}
