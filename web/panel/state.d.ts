/** What the server tells the panel (nodes/routes/panel.py, parallel_backend/host/workers/status.py, host/runs). */

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
  /** That they work on. */
  model: string;
  ranks: RankStatus[];
}

export interface DeviceMemory {
  device: string;
  name: string;
  total: number;
  free: number | null;
  /** Of a GPU, in percent. */
  load: number | null;
  /** In degrees Celsius. */
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
  /** What was found of classes that nobody declared. */
  derived: Finding[];
  doctor: { doing: string; findings: Finding[] | null };
  /** `run` is the number of the run that the result is of. */
  comparison: { doing: string; result: Comparison | null; said: string; run: number };
  /** `row` is the sides' in Markdown, `file` the name of what is kept of them. */
  bench: { doing: string; sides: BenchSide[]; row: string; file: string; said: string };
}

/** Stock ComfyUI, or the pack on some devices: seconds, and bytes of the fullest device; `failed` is why there are none. */
export interface BenchSide {
  name: string;
  plan: string;
  step: number;
  whole: number;
  peak: number;
  /** Of the latent beside stock ComfyUI's. */
  error: number | null;
  failed: string;
}

/** Measured and predicted seconds a step. */
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
  /** Of a run whose loop stays in ComfyUI: its model calls so far; else 0. */
  calls: number;
  ended: number;
  decision: { why: string; memory: number; single: Alternative; alternatives: Alternative[] } | null;
  ranks: RankCost[];
  timeline: Timeline;
}

/** All that the panel shows. `problem` is why the server does not tell; empty while it does. */
export interface State {
  problem: string;
  status: Status | null;
  run: Run | null;
}
