// @ts-check
/** The node Parallel Plan in the page: offers this machine's GPUs, orders its fields, and folds advanced ones in the old canvas too. */

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
 * @property {() => Saved} serialize
 * @property {(saved: Saved) => void} configure
 */

/** A saved node. The values are in the order of the node's inputs, in which all versions have saved them. */
/** @typedef {{ widgets_values?: unknown[] }} Saved */

/** The first fields on the node. */
const FIRST = ["devices", "preset"];

/** The last fields on the node: those with which the picture differs slightly, and those that only apply with them. */
const APPROXIMATE = ["pipefusion", "patches", "warmup_steps", "stages", "exchange"];

/** The mark of these fields, before the name, which a narrow node cuts at its end. */
const MARK = "≈ ";

/**
 * Return true if a node is Parallel Plan.
 * @param {object} node
 * @returns {node is PlanNode}
 */
export function isPlan(node) {
  return "comfyClass" in node && node.comfyClass === "ParallelPlan";
}

/**
 * Return the number of this machine's GPUs, each of which the node lists by its index; 0 if the node is missing.
 * @returns {number}
 */
export function countGpus() {
  const definition = /** @type {PlanNode["constructor"] | undefined} */ (
    window.LiteGraph.registered_node_types.ParallelPlan
  );
  const { choices = [] } = definition?.nodeData.input.required.devices[1] ?? {};
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
 * The list is not saved.
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
 * Show the list of devices first, then the most used fields, the exact ones, and the approximate ones last, with a mark.
 *
 * The node still saves and reads the values in the order of its inputs: saved graphs have the values without names.
 * @param {PlanNode} node
 */
export function orderFields(node) {
  const { serialize, configure, widgets } = node;
  const inputs = widgets.filter((widget) => widget.serialize !== false);
  /** @type {(names: string[]) => Widget[]} */
  const named = (names) => names.flatMap((name) => inputs.find((widget) => widget.name === name) ?? []);
  const [first, last] = [named(FIRST), named(APPROXIMATE)];
  const exact = inputs.filter((widget) => !first.includes(widget) && !last.includes(widget));
  const unsaved = widgets.filter((widget) => widget.serialize === false);
  for (const widget of last) widget.label = MARK + (widget.label ?? widget.name);
  const shown = [...first, ...exact, ...last];
  node.widgets.splice(0, widgets.length, ...unsaved, ...shown);
  node.serialize = () => ({ ...serialize.call(node), widgets_values: inputs.map(({ value }) => value) });
  node.configure = (saved) => {
    const values = saved.widgets_values;
    if (!Array.isArray(values)) return configure.call(node, saved);
    const read = shown.map((widget) => {
      const at = inputs.indexOf(widget);
      return at < values.length ? values[at] : widget.value; // an earlier version had fewer inputs
    });
    return configure.call(node, { ...saved, widgets_values: read });
  };
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
