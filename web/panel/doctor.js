// @ts-check
/** The doctor's findings: the state of each thing, and a remedy. */

/** @import { Words } from "../words" */
/** @import { Finding, Status } from "./state" */

import { element, progress } from "./elements.js";

const SIGNS = { ok: "✓", warning: "!", failure: "✗" };
/** The order of the findings, with those that need attention first. */
const ORDER = ["failure", "warning", "ok"];

/**
 * Return the view of the doctor's progress and of its last findings.
 *
 * @param {Status["doctor"]} doctor
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function doctorView({ doing, findings }, words) {
  const sorted = ORDER.flatMap((status) => (findings ?? []).filter((finding) => finding.status === status));
  const lines = sorted.map((finding) => line(finding, words));
  return element(
    "div",
    "",
    doing && progress(words.told(doing)),
    findings && !doing && element("p", "", verdict(findings, words)),
    ...lines,
  );
}

/**
 * Summarise the findings in a sentence.
 *
 * @param {readonly Finding[]} findings
 * @param {Words} words
 * @returns {string}
 */
export function verdict(findings, words) {
  const failures = findings.filter((finding) => finding.status === "failure").length;
  const warnings = findings.filter((finding) => finding.status === "warning").length;
  if (!failures && !warnings) return words.say("doctor.fine");
  const one = words.say(failures === 1 ? "doctor.fault" : "doctor.faults", { count: failures });
  const other = words.say(warnings === 1 ? "doctor.warning" : "doctor.warnings", { count: warnings });
  const found = failures && warnings ? words.say("doctor.and", { one, other }) : failures ? one : other;
  return words.say("doctor.found", { found });
}

/**
 * Return the view of derived classes: the axes that a class was proved to be divided by, or the reason why it is not.
 *
 * @param {readonly Finding[]} findings
 * @param {Words} words
 * @returns {HTMLElement}
 */
export function derivedView(findings, words) {
  const note = element("p", "pp-note", words.say("derived.note"));
  return element("div", "", note, ...findings.map((finding) => line(finding, words)));
}

/** @type {(finding: Finding, words: Words) => HTMLElement} */
function line({ name, status, text, remedy }, words) {
  const sign = element("span", `pp-sign pp-${status}`, SIGNS[status]);
  sign.title = words.name(status);
  const told = element("div", "pp-text", words.told(text));
  const body = element("div", "", element("b", "", words.told(name)), told);
  if (remedy) body.append(element("div", "pp-remedy", `→ ${words.told(remedy)}`));
  return element("div", `pp-finding pp-${status}-line`, sign, body);
}
