// @ts-check
/** Links from the pack's messages to the entries of the troubleshooting page. */

/** @import { Api } from "../comfyui" */

const PAGE = "/parallel/troubleshooting";

/** Milliseconds between two searches for a message on the page, and the number of searches. */
const SOON = 100;
const LOOKS = 20;

/**
 * Return the address of a message's entry on the troubleshooting page; empty if there is none.
 *
 * @param {Api} api
 * @param {string} message
 * @returns {Promise<string>}
 */
export async function remedyOf(api, message) {
  const answer = await api.fetchApi(PAGE, { method: "POST", body: message }).catch(() => undefined); // the server may be gone
  if (!answer?.ok) return "";
  /** @type {{ entry: string }} */
  const { entry } = await answer.json();
  return entry && `${new URL(api.apiURL(PAGE), window.location.href)}#${entry}`;
}

/**
 * Append a link to the text of a message over the graph, once the page shows it. ComfyUI's messages hold text only.
 *
 * @param {string} detail the message's text
 * @param {string} url
 * @param {string} label
 */
export function linkMessage(detail, url, label, looks = LOOKS) {
  const shown = [...document.querySelectorAll(".p-toast-detail")].findLast(
    (each) => each.textContent?.trim() === detail,
  );
  if (shown) shown.append(" ", linkTo(url, label));
  else if (looks) setTimeout(() => linkMessage(detail, url, label, looks - 1), SOON);
}

/**
 * Create a link that opens in a new tab.
 *
 * @param {string} url
 * @param {string} label
 * @returns {HTMLAnchorElement}
 */
export function linkTo(url, label) {
  const link = document.createElement("a");
  link.href = url;
  link.target = "_blank";
  link.rel = "noopener";
  link.className = "pp-link";
  link.textContent = label;
  return link;
}
