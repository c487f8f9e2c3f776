// @ts-check
/** The doctor's lines: how each thing is, and what to do about it. */

/** @import { Finding, Status } from "./state" */

import { element, progress } from "./elements.js";

const SIGNS = { ok: "✓", warning: "!", failure: "✗" };
/** What needs attention comes first. */
const ORDER = ["failure", "warning", "ok"];

/**
 * How far the doctor has got, and its last findings.
 *
 * @param {Status["doctor"]} doctor
 * @returns {HTMLElement}
 */
export function doctorView({ doing, findings }) {
  const lines = ORDER.flatMap((status) => (findings ?? []).filter((finding) => finding.status === status)).map(line);
  return element(
    "div",
    "",
    doing && progress(doing),
    findings && !doing && element("p", "", verdict(findings)),
    ...lines,
  );
}

/**
 * The findings in a sentence.
 *
 * @param {readonly Finding[]} findings
 * @returns {string}
 */
export function verdict(findings) {
  const failures = findings.filter((finding) => finding.status === "failure").length;
  const warnings = findings.filter((finding) => finding.status === "warning").length;
  if (!failures && !warnings) return "Everything is all right.";
  const told = [failures && counted(failures, "fault"), warnings && counted(warnings, "warning")].filter(Boolean);
  return `${told.join(" and ")}; the rest is all right.`;
}

/** @type {(count: number, what: string) => string} */
function counted(count, what) {
  return `${count} ${what}${count > 1 ? "s" : ""}`;
}

/** @type {(finding: Finding) => HTMLElement} */
function line({ name, status, text, remedy }) {
  const sign = element("span", `pp-sign pp-${status}`, SIGNS[status]);
  sign.title = status;
  const body = element("div", "", element("b", "", name), element("div", "pp-text", text));
  if (remedy) body.append(element("div", "pp-remedy", `→ ${remedy}`));
  return element("div", `pp-finding pp-${status}-line`, sign, body);
}
