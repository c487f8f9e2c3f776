// @ts-check
/** Links from the pack's messages to what the troubleshooting page says of them. */

/** @import { Api } from "../comfyui" */

const PAGE = "/parallel/troubleshooting";

/** Milliseconds between two looks for a message, and how often. */
const SOON = 100;
const LOOKS = 20;

/**
 * Where the page speaks of a message; empty where it does not.
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
 * Puts a link behind the text of a message over the graph, once that is there. ComfyUI's messages are texts alone.
 *
 * @param {string} detail of the message
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
 * A link that opens beside ComfyUI's page.
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
