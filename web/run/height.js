// @ts-check
/** The height of a node that shows all lines of its run's outcome. ComfyUI's text widget shows two lines and scrolls. */

/** @import { GraphNode, Widget } from "../comfyui" */

/** ComfyUI's name of the widget that shows a progress text. */
const TEXT = "$$node-text-preview";

const LINE = 17;
const MARGIN = 30;
const CHARACTERS_A_PIXEL = 0.16;
const WIDE = /[\u2e80-\uffef]/g;

/**
 * Return the height in pixels of a text on a node of the given width.
 *
 * @param {string} text
 * @param {number} width
 * @returns {number}
 */
export function heightOf(text, width) {
  const fitting = Math.max(1, (width - 2 * MARGIN) * CHARACTERS_A_PIXEL);
  const lines = text.split("\n").map((line) => Math.max(1, Math.ceil(widthOf(line) / fitting)));
  return MARGIN + LINE * lines.reduce((sum, count) => sum + count, 0);
}

/**
 * Return the widget in which ComfyUI shows a text on a node; undefined before the first text.
 *
 * @param {GraphNode} node
 * @returns {Widget | undefined}
 */
export function textOf(node) {
  return node.widgets?.find(({ name }) => name === TEXT);
}

/**
 * Make the node high enough for its text, if there is one. Do nothing if the height is unchanged.
 *
 * @param {GraphNode} node
 */
export function fitText(node) {
  const widget = textOf(node);
  if (!widget?.options) return;
  const height = heightOf(String(widget.value), node.size[0]);
  if (widget.options.getMinHeight?.() === height) return;
  widget.options.getMinHeight = () => height;
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
}

/** Return the width in characters. Chinese characters are twice as wide. */
/** @type {(line: string) => number} */
function widthOf(line) {
  return line.length + (line.match(WIDE)?.length ?? 0);
}
