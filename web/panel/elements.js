// @ts-check
/** Functions that create elements of the page. Texts are always inserted as text, never as markup. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | null | false} Child */

/**
 * Create an HTML element with a class and children. Empty children are left out.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {string} kind the CSS class; "" for none
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function element(tag, kind, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  for (const child of children) if (child) made.append(child);
  return made;
}

/**
 * Create a button.
 *
 * @param {string} text
 * @param {string} tooltip
 * @param {() => void} press
 * @param {boolean} [disabled]
 * @returns {HTMLButtonElement}
 */
export function button(text, tooltip, press, disabled = false) {
  const made = element("button", "pp-button", text);
  made.type = "button";
  made.title = tooltip;
  made.disabled = disabled;
  made.addEventListener("click", press);
  return made;
}

/**
 * Create a line that says what is in progress, with a spinner.
 *
 * @param {string} doing
 * @returns {HTMLElement}
 */
export function progress(doing) {
  return element("p", "pp-progress", element("i", "pi pi-spin pi-spinner"), ` ${doing} …`);
}

/**
 * Create an SVG element.
 *
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {...Node} children
 * @returns {SVGElement}
 */
export function shape(tag, attributes, ...children) {
  const made = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}
