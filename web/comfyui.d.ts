/** The parts of ComfyUI's extension API that this pack uses. */

export interface Extension {
  name: string;
  init?(app: App): void | Promise<void>;
  setup?(app: App): void | Promise<void>;
  nodeCreated?(node: object): void;
  /** A graph has been opened, with all of its nodes. */
  afterConfigureGraph?(): void;
}

export interface ToastMessage {
  severity: "success" | "info" | "warn" | "error";
  summary: string;
  detail: string;
  /** Milliseconds; without it the message stays until it is closed. */
  life?: number;
}

/** A tab of the sidebar that draws itself; `render` is called whenever it is opened. */
export interface SidebarTab {
  id: string;
  icon: string;
  title: string;
  tooltip: string;
  type: "custom";
  render(parent: HTMLElement): void;
  destroy(): void;
}

export interface ExtensionManager {
  toast: { add(message: ToastMessage): void };
  command: { execute(id: string): Promise<void> };
  /** Asks yes or no; null where it is closed. */
  dialog: { confirm(question: { title: string; message: string }): Promise<boolean | null> };
  setting: { get(id: string): string | undefined };
  registerSidebarTab(tab: SidebarTab): void;
}

/** A field of a node. */
export interface Widget {
  name: string;
  /** What is shown for the name. */
  label?: string;
  value: unknown;
  advanced?: boolean;
  /** Of the component that draws it, if one does. */
  props?: Readonly<Record<string, unknown>>;
  options?: { values?: unknown; advanced?: boolean; getMinHeight?: () => number };
}

export interface Badge {
  text: string;
}

export type BadgeClass = new (options: { text: string; fgColor?: string; bgColor?: string }) => Badge;

export interface GraphNode {
  id: string | number;
  title: string;
  graph: Graph | null;
  widgets?: Widget[];
  size: [number, number];
  computeSize(): [number, number];
  setSize(size: [number, number]): void;
  has_errors?: boolean;
  showAdvanced?: boolean;
  badges: (Badge | (() => Badge))[];
  /** The graph inside of a subgraph node. */
  subgraph?: Graph;
  setDirtyCanvas(foreground: boolean, background?: boolean): void;
}

export interface Graph {
  nodes: GraphNode[];
  getNodeById(id: string | number): GraphNode | null | undefined;
  trigger(action: string, event: object): void;
}

/** A graph in ComfyUI's API format, nodes by their ids in an execution; a link is `[id, output]`. */
export interface Prompt {
  [id: string]: { class_type: string; inputs: Record<string, unknown> };
}

export interface App {
  rootGraph: Graph;
  /** The graph as it is drawn. */
  canvas: { bringToFront(node: GraphNode): void };
  graphToPrompt(): Promise<{ output: Prompt }>;
  registerExtension(extension: Extension): void;
  extensionManager: ExtensionManager;
}

/** The detail of an `execution_error` event. */
export interface ExecutionError {
  prompt_id: string;
  node_id: string;
  node_type: string;
  exception_type: string;
  exception_message: string;
}

/** What a run of a node came to (parallel_backend/host/runs/outcome.py). */
export interface Outcome {
  plan: string;
  why: string;
  seconds: number;
  steps: number;
  seconds_a_step: number;
  peak: Record<string, number>;
  waiting: number;
  sent: number;
  gain: number | null;
  gain_is: "measured" | "predicted";
  warnings: string[];
}

export interface Events {
  "parallel.ran": { prompt_id: string; node: string; outcome: Outcome };
  execution_start: { prompt_id: string };
  execution_error: ExecutionError;
  /** A line for a node; ComfyUI puts it into a widget of the node. */
  progress_text: { nodeId: string; text: string };
  /** The connection to the server is lost; it is back. */
  reconnecting: undefined;
  reconnected: undefined;
  /** The pack's own. */
  "parallel.status": import("./panel/state").Status;
}

export interface Api {
  addEventListener<Name extends keyof Events>(name: Name, listener: (event: CustomEvent<Events[Name]>) => void): void;
  removeEventListener<Name extends keyof Events>(
    name: Name,
    listener: (event: CustomEvent<Events[Name]>) => void,
  ): void;
  /** fetch of a path of the server. */
  fetchApi(path: string, options?: RequestInit): Promise<Response>;
}
