// @ts-check
/** The pack's cards in ComfyUI's template browser: those that run at once come first, and each says what it makes.
 *
 * ComfyUI lists a pack's templates as the disk has them, and shows a file's name as title and as description. Its search has no
 * more than that name to go by: tags are of ComfyUI's own templates alone.
 */

/** @import { Api, Templates } from "./comfyui" */
/** @import { Words } from "./words" */

import { PACK } from "./pack.js";

/**
 * Has the template browser show them so. A ComfyUI that lists or draws them in another way shows them as it does others'.
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
 * All packs' templates, with those of one pack in an order; what the order does not name comes last.
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
 * What shows descriptions in the place of those on the cards, or below the titles of cards that have none.
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
