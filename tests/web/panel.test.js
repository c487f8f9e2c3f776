// @ts-check
import assert from "node:assert/strict";
import { test } from "node:test";
import { verdict } from "../../web/panel/doctor.js";
import { doingOf, heldOn } from "../../web/panel/machine.js";
import { gain, timeOf } from "../../web/panel/plans.js";
import { phaseAt, prepared, shares, totals } from "../../web/panel/shares.js";
import { saidIn } from "../../web/panel/source.js";
import { layer } from "../../web/panel/timeline.js";
import { bytes, percent, seconds } from "../../web/panel/units.js";
import { ENGLISH } from "./languages.js";

test("numbers have three digits and a unit", () => {
  assert.deepEqual([0.0123, 0.9996, 12.34, 300].map(seconds), ["12.3 ms", "1.00 s", "12.3 s", "300 s"]);
  assert.deepEqual([percent(1, 3), percent(1, 0)], ["33 %", "0 %"]);
});

/** @type {[string, number][]} */
const phases = [
  ["loading the model", 0],
  ["sampling", 1],
];
const rank = { rank: 0, device: "cuda:0", seconds: 2.5, phases, waiting: [0, 0, 500, 0], sending: [0, 0, 250, 0] };
const timeline = { width: 0.75, bins: 4, steps: [1, 2], ranks: [rank] };

test("a rank's shares of a bin add up to the whole bin until the rank is done", () => {
  const parts = shares(rank, timeline);
  assert.deepEqual(parts[0], { preparing: 1, computing: 0, sending: 0, waiting: 0 });
  assert.deepEqual(parts[2], { preparing: 0, computing: 0.25, sending: 0.25, waiting: 0.5 });
  assert.ok(Math.abs((parts[3]?.computing ?? 0) - (2.5 / 0.75 - 3)) < 1e-9);
  const all = totals(rank, timeline, 0);
  assert.ok(Math.abs(all.preparing + all.computing + all.sending + all.waiting - 2.5) < 1e-9);
});

test("the preparation ends with the first rank that computes", () => {
  assert.equal(prepared(timeline), 1);
  assert.equal(prepared({ ...timeline, ranks: [rank, { ...rank, phases: [["sampling", 0.5]] }] }), 0.5);
  assert.equal(phaseAt(rank, 0.5), "loading the model");
});

test("a layer is drawn from its foot to its head, and not where it is empty", () => {
  assert.equal(layer([0, 0.5, 1], [0.25, 1, 1]), "M0 1V0.75h1V1zM1 0.5V0h1V0.5z");
});

test("a rank's state is given in words", () => {
  const sampling = { phase: "sampling", step: 3, waiting: true };
  assert.equal(doingOf(sampling, "running", ENGLISH), "sampling, step 3, waits");
  assert.equal(doingOf(sampling, "ready", ENGLISH), "idle");
  assert.equal(doingOf(sampling, "failed", ENGLISH), "has ended");
});

test("weights that wait in host memory are counted there", () => {
  const idle = { phase: "", step: 0, waiting: false };
  const held = [{ model: "flux", nbytes: 5 }];
  const ranks = [0, 1].map((rank) => ({ rank, device: `cuda:${rank}`, held, on_host: 7, ...idle }));
  const group = { state: /** @type {const} */ ("ready"), model: "", ranks };
  const workers = { groups: [group], runs: 0, failure: null };
  const status = {
    workers,
    memory: [],
    derived: [],
    doctor: { doing: "", findings: null },
    comparison: { doing: "", result: null, said: "", run: 0 },
    bench: { doing: "", sides: [], row: "", file: "", said: "" },
    last_end: { text: "", at: 0 },
  };
  assert.equal(heldOn(status, "cuda:1"), 5);
  assert.equal(heldOn(status, "cpu"), 14);
});

test("findings and gains are given in one sentence", () => {
  const finding = { name: "GPUs", text: "", remedy: "" };
  assert.equal(verdict([{ ...finding, status: "ok" }], ENGLISH), "Everything is all right.");
  assert.equal(verdict([{ ...finding, status: "failure" }], ENGLISH), "1 fault; the rest is all right.");
  const times = { seconds: 0.25, alone: 0.5, predicted: 0.2, predicted_alone: 0.5 };
  const measured = { plan: "ulysses 2", ...times, steps: 6, of: 20, without_adapters: true };
  assert.equal(
    gain(measured, ENGLISH),
    "Measured on 6 of 20 steps, without LoRA: 250 ms a step with ulysses 2, 500 ms on one device, so 2.00x as fast (2.50x predicted).",
  );
  const told = gain({ ...measured, predicted: 0, predicted_alone: 0 }, ENGLISH);
  assert.match(told, /500 ms on one device, so 2.00x as fast\.$/, "only what was measured");
});

test("an answer's sentence is found in the panel's JSON and in a refusal's text", () => {
  assert.equal(saidIn('{"said": "done"}'), "done");
  assert.equal(saidIn("'evil' is not this machine's name"), "'evil' is not this machine's name");
});

const cost = { rank: 0, device: "cuda:0", seconds: 2, waiting: 0, sent: {}, weights: 0, cache: 0, peak: 0, read: 0 };
const run = { number: 1, kind: "sampling", model: "flux", plan: "", calls: 0, ended: 0, timeline, workflow: "" };

test("a run without steps shows only its time", () => {
  const decoding = { ...run, kind: "decoding", decision: null, ranks: [cost] };
  assert.equal(timeOf({ ...decoding, steps: 0 }, ENGLISH), "2.00 s");
  assert.equal(timeOf({ ...decoding, steps: 4 }, ENGLISH), "2.00 s for 4 steps: 500 ms each");
  assert.equal(timeOf({ ...decoding, steps: 0, calls: 8 }, ENGLISH), "2.00 s of 8 model calls: 250 ms each");
});

test("on one device, without measurements, and on the CPU there is no prediction", () => {
  const each = { plan: "ulysses 2", parts: {}, memory: 0, fits: true, changes: false };
  const alone = { ...each, plan: "", devices: 1, chosen: true, seconds: 0.0148 };
  const decision = { why: "", memory: 0, single: alone };
  /** @type {(alternatives: (typeof alone)[], device?: string) => string} */
  const told = (alternatives, device = "cuda:0") => {
    const ranks = [{ ...cost, device }];
    return timeOf({ ...run, steps: 4, decision: { ...decision, alternatives }, ranks }, ENGLISH);
  };
  assert.equal(told([alone]), "2.00 s for 4 steps: 500 ms each");
  const several = [alone, { ...each, devices: 2, chosen: false, seconds: 0.02 }]; // one may be the fastest of several
  assert.equal(told(several), "2.00 s for 4 steps: 500 ms each, 14.8 ms predicted");
  for (const device of ["cpu", "machine-2/cpu"]) assert.equal(told(several, device), "2.00 s for 4 steps: 500 ms each");
});

test("bytes are written as in the nodes' texts", () => {
  const told = [0, 999, 1000, 1234, 99960, 5e6, 6.13e9, 23.8e9, 999.6e9].map(bytes).join(", ");
  assert.equal(told, "0 B, 999 B, 1.00 kB, 1.23 kB, 100 kB, 5.00 MB, 6.13 GB, 23.8 GB, 1.00 TB");
});
