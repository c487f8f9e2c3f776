/** Types of the server's messages to the panel (nodes/routes/panel.py, parallel_backend/host/workers/status.py, host/runs). */

export interface Held {
  model: string;
  nbytes: number;
}

export interface RankStatus {
  rank: number;
  device: string;
  phase: string;
  step: number;
  waiting: boolean;
  held: Held[];
  on_host: number;
}

export interface GroupStatus {
  state: "starting" | "ready" | "running" | "failed" | "stopped";
  /** The model that the group works on. */
  model: string;
  ranks: RankStatus[];
}

export interface DeviceMemory {
  device: string;
  name: string;
  total: number;
  free: number | null;
  /** The load of a GPU, in percent. */
  load: number | null;
  /** The temperature in degrees Celsius. */
  temperature: number | null;
}

export interface Finding {
  name: string;
  status: "ok" | "warning" | "failure";
  text: string;
  remedy: string;
}

export interface Status {
  workers: { groups: GroupStatus[]; runs: number; failure: { text: string; at: number } | null };
  memory: DeviceMemory[];
  /** Findings about classes without a declaration of their own. */
  derived: Finding[];
  doctor: { doing: string; findings: Finding[] | null };
  /** `run` is the number of the run that the result belongs to. */
  comparison: { doing: string; result: Comparison | null; said: string; run: number };
  /** `row` is the results' row in Markdown, `file` the name of their file. */
  bench: { doing: string; sides: BenchSide[]; row: string; file: string; said: string };
  /** The end of the last run without a result, such as "Cancelled after 3 of 20"; `text` is empty after a result. */
  last_end: { text: string; at: number };
}

/**
 * Stock ComfyUI, or the pack on some devices: seconds, and bytes of the fullest device. `failed` is the reason for no result.
 */
export interface BenchSide {
  name: string;
  plan: string;
  step: number;
  whole: number;
  peak: number;
  /** The relative error of the latent against stock ComfyUI's. */
  error: number | null;
  failed: string;
}

/** Measured and predicted seconds per step. The predicted ones are 0 on the CPU. */
export interface Comparison {
  plan: string;
  seconds: number;
  alone: number;
  predicted: number;
  predicted_alone: number;
  steps: number;
  of: number;
  without_adapters: boolean;
}

export interface Alternative {
  plan: string;
  devices: number;
  chosen: boolean;
  seconds: number;
  parts: Record<string, number>;
  memory: number;
  fits: boolean;
  changes: boolean;
}

export interface RankCost {
  rank: number;
  device: string;
  seconds: number;
  waiting: number;
  sent: Record<string, number>;
  weights: number;
  cache: number;
  peak: number;
  read: number;
}

export interface RankTimeline {
  rank: number;
  device: string;
  seconds: number;
  phases: [string, number][];
  /** Thousandths of each bin. */
  waiting: number[];
  sending: number[];
}

export interface Timeline {
  width: number;
  bins: number;
  steps: number[];
  ranks: RankTimeline[];
}

export interface Run {
  number: number;
  kind: string;
  model: string;
  plan: string;
  steps: number;
  /** For a run whose loop stays in ComfyUI, the number of its model calls so far; otherwise 0. */
  calls: number;
  ended: number;
  decision: { why: string; memory: number; single: Alternative; alternatives: Alternative[] } | null;
  ranks: RankCost[];
  timeline: Timeline;
  /** The id of the workflow; empty if unknown. */
  workflow: string;
}

/** The state that the panel shows. `problem` is the reason why the server does not reply; empty while it does. */
export interface State {
  problem: string;
  status: Status | null;
  run: Run | null;
}
