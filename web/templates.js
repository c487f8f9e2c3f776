// @ts-check
/**
 * The pack's cards in ComfyUI's template browser: ordered with templates that run at once first, and with descriptions.
 *
 * ComfyUI lists a pack's templates in the order of the disk, and shows a file's name as title and description. Its search reads
 * nothing but that name: only ComfyUI's own templates have tags.
 */

/** @import { Api, Templates } from "./comfyui" */
/** @import { Words } from "./words" */

import { PACK } from "./pack.js";

/**
 * Order and describe the pack's templates in the browser. A ComfyUI with another browser shows them like other packs'.
 *
 * @param {Api} api
 * @param {Words} words
 */
export function describeTemplates(api, words) {
  const list = api.getWorkflowTemplates?.bind(api);
  if (list) api.getWorkflowTemplates = async () => inOrder(await list(), PACK, Object.keys(words.templates));
  const sheet = document.createElement("style");
  sheet.textContent = styleOf(words.templates);
  document.head.append(sheet);
}

/**
 * Return all packs' templates, with those of one pack in the given order. Templates that the order lacks come last.
 *
 * @param {Templates} templates
 * @param {string} pack
 * @param {readonly string[]} order
 * @returns {Templates}
 */
export function inOrder(templates, pack, order) {
  const ours = templates[pack];
  if (!ours) return templates;
  const place = (/** @type {string} */ name) => (order.includes(name) ? order.indexOf(name) : order.length);
  return { ...templates, [pack]: ours.toSorted((one, other) => place(one) - place(other)) };
}

/**
 * Return CSS that shows descriptions instead of those on the cards, or below the titles of cards without description.
 *
 * @param {Readonly<Record<string, string>>} descriptions by the templates' names
 * @returns {string}
 */
export function styleOf(descriptions) {
  const rules = Object.entries(descriptions).map(([name, description]) => {
    const card = `[data-testid=${JSON.stringify(`template-workflow-${name}`)}]`;
    const after = `::after { content: ${JSON.stringify(description)}; font-size: 0.875rem }`;
    return `${card} p { font-size: 0 } ${card} p${after} ${card}:not(:has(p)) :has(> h3)${after}`;
  });
  return rules.join("\n");
}
