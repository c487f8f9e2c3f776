/** The parts of ComfyUI's extension API that this pack uses. */

export interface Extension {
  name: string;
  init?(app: App): void | Promise<void>;
  setup?(app: App): void | Promise<void>;
  /** Called before the page's own lists and searches read the definitions of all nodes. */
  beforeRegisterVueAppNodeDefs?(definitions: NodeDefinition[]): void;
  nodeCreated?(node: object): void;
  commands?: Command[];
  keybindings?: Keybinding[];
  settings?: Setting[];
  getNodeMenuItems?(node: GraphNode): MenuItem[];
  /** Called when a graph and all of its nodes have been opened. */
  afterConfigureGraph?(): void;
}

/** The scores of a node for the words of a search: the kind of match, then tie-breakers. The lower, the better. */
export type SearchScores = [number, ...number[]];

/** A node's definition, as the server sends it. */
export interface NodeDefinition {
  name: string;
  python_module: string;
  /** Change the node's scores in the node search. ComfyUI inserts the node's frequency of use after the first score. */
  postProcessSearchScores?(scores: SearchScores): SearchScores;
}

export interface Command {
  id: string;
  label: string;
  icon?: string;
  function(): void | Promise<void>;
}

export interface Setting {
  id: string;
  /** The page of the settings, the group on that page, and the setting's name. */
  category: [string, string, string];
  name: string;
  tooltip: string;
  type: "boolean" | "text" | "combo";
  options?: string[];
  defaultValue: boolean | string;
  onChange?(): void;
}

export interface Keybinding {
  commandId: string;
  combo: { key: string; ctrl?: boolean; alt?: boolean; shift?: boolean };
}

export interface MenuItem {
  content: string;
  callback(): void;
}

/** The undo and redo history of a workflow. */
export interface ChangeTracker {
  activeState: object;
  undoQueue: object[];
  redoQueue: object[];
  beforeChange(): void;
  afterChange(): void;
  /** Go to the last state of the list `from`, and add the previous state to the list `to`. */
  updateState(from: object[], to: object[]): Promise<void>;
}

export interface ToastMessage {
  severity: "success" | "info" | "warn" | "error";
  summary: string;
  detail: string;
  /** Milliseconds until the message disappears; without it the message stays until the user closes it. */
  life?: number;
  /** A CSS class for the message's element. */
  styleClass?: string;
}

/** A sidebar tab that draws itself. ComfyUI calls `render` whenever the user opens the tab. */
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
  toast: { add(message: ToastMessage): void; remove(message: ToastMessage): void };
  command: { execute(id: string): Promise<void> };
  /** Ask a yes-or-no question; null if the user closes the dialog. */
  dialog: { confirm(question: { title: string; message: string }): Promise<boolean | null> };
  setting: { get<Value = string>(id: string): Value | undefined; set(id: string, value: unknown): Promise<void> };
  workflow: { activeWorkflow: { changeTracker: ChangeTracker; filename?: string } | null };
  registerSidebarTab(tab: SidebarTab): void;
}

/** A field of a node. */
export interface Widget {
  name: string;
  /** The text shown instead of the name. */
  label?: string;
  value: unknown;
  advanced?: boolean;
  /** Properties of the component that draws the widget, if there is one. */
  props?: Readonly<Record<string, unknown>>;
  options?: { values?: unknown; advanced?: boolean; getMinHeight?: () => number };
  /** False if the value is not saved. */
  serialize?: boolean;
  /** Return the value for a prompt, instead of `value`. */
  serializeValue?(): unknown;
}

export interface Badge {
  text: string;
}

export type BadgeClass = new (options: { text: string; fgColor?: string; bgColor?: string }) => Badge;

export interface GraphNode {
  id: string | number;
  type: string;
  title: string;
  graph: Graph | null;
  inputs?: { name?: string; type: unknown; link?: number | null }[];
  /** Return the node that an input comes from; null also for an input from outside of a subgraph. */
  getInputNode?(slot: number): GraphNode | null;
  removeInput?(slot: number): void;
  mode?: number;
  outputs?: { type: unknown }[];
  properties?: Record<string, unknown>;
  widgets?: Widget[];
  size: [number, number];
  computeSize(): [number, number];
  setSize(size: [number, number]): void;
  has_errors?: boolean;
  showAdvanced?: boolean;
  /** Called with the data that is saved of the node. */
  onSerialize?: (saved: object) => void;
  badges: (Badge | (() => Badge))[];
  /** The graph inside of a subgraph node. */
  subgraph?: Graph;
  setDirtyCanvas(foreground: boolean, background?: boolean): void;
}

export interface Graph {
  id?: string;
  nodes: GraphNode[];
  getNodeById(id: string | number): GraphNode | null | undefined;
  /** Called with the data that is saved of the graph. */
  onSerialize?: (saved: { extra?: Record<string, unknown> }) => void;
  trigger(action: string, event: object): void;
}

/** A graph in ComfyUI's API format: nodes by their ids in an execution. A link is `[id, output]`. */
export interface Prompt {
  [id: string]: { class_type: string; inputs: Record<string, unknown> };
}

export interface App {
  /** The open workflow; `serialize` returns it in the saved form. */
  rootGraph: Graph & { serialize(): object };
  /** The canvas that draws the graph. */
  canvas: { bringToFront(node: GraphNode): void; read_only: boolean; canvas: HTMLCanvasElement };
  /** The old user interface, whose settings dispatch the event `<id>.change` after a change of a setting. */
  ui: { settings: EventTarget };
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

/** The outcome of a node's run (parallel_backend/host/runs/outcome.py). */
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
  gain_is: "measured" | "predicted" | "";
  warnings: string[];
  starting: number;
  /** Seconds a step of the run on one device that a measured gain compares with, and its end in seconds since 1970; or 0. */
  alone: number;
  alone_at: number;
}

export interface Events {
  "parallel.ran": { prompt_id: string; node: string; outcome: Outcome };
  /** Sent when the user queues a graph. */
  promptQueueing: object;
  execution_start: { prompt_id: string };
  execution_error: ExecutionError;
  execution_success: { prompt_id: string };
  execution_interrupted: { prompt_id: string };
  /** A line for a node. ComfyUI shows it in a widget of the node. */
  progress_text: { nodeId: string; text: string };
  /** Sent when the saved data of the open workflow have changed. */
  graphChanged: object;
  /** Sent when the connection to the server is lost, and when it is back. */
  reconnecting: undefined;
  reconnected: undefined;
  /** The pack's own event, with the state for the panel. */
  "parallel.status": import("./panel/state").Status;
}

/** The names of packs' templates, by the names of the packs' folders. */
export type Templates = Record<string, string[]>;

export interface Api {
  addEventListener<Name extends keyof Events>(name: Name, listener: (event: CustomEvent<Events[Name]>) => void): void;
  removeEventListener<Name extends keyof Events>(
    name: Name,
    listener: (event: CustomEvent<Events[Name]>) => void,
  ): void;
  /** Return the template browser's list. */
  getWorkflowTemplates?(): Promise<Templates>;
  /** Return one of the user's stored settings, also of an id that the page does not know; null if there is none. */
  getSetting<Value>(id: string): Promise<Value | null>;
  storeSetting(id: string, value: unknown): Promise<unknown>;
  /** Return the page's address for a path of the server. */
  apiURL(path: string): string;
  /** Fetch a path of the server. */
  fetchApi(path: string, options?: RequestInit): Promise<Response>;
}
