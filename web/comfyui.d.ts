/** The parts of ComfyUI's extension API that this pack uses. */

export interface Extension {
  name: string;
  init?(app: App): void | Promise<void>;
  setup?(app: App): void | Promise<void>;
  /** Before the page's own lists and searches take the definitions of all nodes. */
  beforeRegisterVueAppNodeDefs?(definitions: NodeDefinition[]): void;
  nodeCreated?(node: object): void;
  commands?: Command[];
  keybindings?: Keybinding[];
  settings?: Setting[];
  getNodeMenuItems?(node: GraphNode): MenuItem[];
  /** A graph has been opened, with all of its nodes. */
  afterConfigureGraph?(): void;
}

/** How well a node fits the words of a search: its kind of match first, then what decides between equals; the lower the better. */
export type SearchScores = [number, ...number[]];

/** A node's definition, as the server tells it. */
export interface NodeDefinition {
  name: string;
  python_module: string;
  /** What the node search does with the node's scores; ComfyUI puts how often the node is used behind the first. */
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
  /** The page of the settings, the group in it, and the setting. */
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

/** What the page undoes and redoes of a workflow. */
export interface ChangeTracker {
  activeState: object;
  undoQueue: object[];
  redoQueue: object[];
  beforeChange(): void;
  afterChange(): void;
  /** Goes to the last state of one list and puts the one before into the other. */
  updateState(from: object[], to: object[]): Promise<void>;
}

export interface ToastMessage {
  severity: "success" | "info" | "warn" | "error";
  summary: string;
  detail: string;
  /** Milliseconds; without it the message stays until it is closed. */
  life?: number;
  /** A class of its element. */
  styleClass?: string;
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
  toast: { add(message: ToastMessage): void; remove(message: ToastMessage): void };
  command: { execute(id: string): Promise<void> };
  /** Asks yes or no; null where it is closed. */
  dialog: { confirm(question: { title: string; message: string }): Promise<boolean | null> };
  setting: { get<Value = string>(id: string): Value | undefined; set(id: string, value: unknown): Promise<void> };
  workflow: { activeWorkflow: { changeTracker: ChangeTracker; filename?: string } | null };
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
  /** Not saved where it is false. */
  serialize?: boolean;
  /** What a prompt gets in place of the value. */
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
  inputs?: { name?: string; type: unknown }[];
  /** Where an input comes from; null for one from outside of a subgraph too. */
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
  /** Called with what is to be saved of it. */
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
  /** Called with what is to be saved of it. */
  onSerialize?: (saved: { extra?: Record<string, unknown> }) => void;
  trigger(action: string, event: object): void;
}

/** A graph in ComfyUI's API format, nodes by their ids in an execution; a link is `[id, output]`. */
export interface Prompt {
  [id: string]: { class_type: string; inputs: Record<string, unknown> };
}

export interface App {
  /** The open workflow; `serialize` gives it as it would be saved. */
  rootGraph: Graph & { serialize(): object };
  /** The graph as it is drawn. */
  canvas: { bringToFront(node: GraphNode): void; read_only: boolean };
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
  gain_is: "measured" | "predicted" | "";
  warnings: string[];
  starting: number;
}

export interface Events {
  "parallel.ran": { prompt_id: string; node: string; outcome: Outcome };
  /** The user queues a graph. */
  promptQueueing: object;
  execution_start: { prompt_id: string };
  execution_error: ExecutionError;
  execution_success: { prompt_id: string };
  execution_interrupted: { prompt_id: string };
  /** A line for a node; ComfyUI puts it into a widget of the node. */
  progress_text: { nodeId: string; text: string };
  /** What is saved of the open workflow has changed. */
  graphChanged: object;
  /** The connection to the server is lost; it is back. */
  reconnecting: undefined;
  reconnected: undefined;
  /** The pack's own. */
  "parallel.status": import("./panel/state").Status;
}

/** The names of packs' templates, by the folders that ComfyUI has the packs in. */
export type Templates = Record<string, string[]>;

export interface Api {
  addEventListener<Name extends keyof Events>(name: Name, listener: (event: CustomEvent<Events[Name]>) => void): void;
  removeEventListener<Name extends keyof Events>(
    name: Name,
    listener: (event: CustomEvent<Events[Name]>) => void,
  ): void;
  /** What the template browser lists. */
  getWorkflowTemplates?(): Promise<Templates>;
  /** The page's address for a path of the server. */
  apiURL(path: string): string;
  /** fetch of a path of the server. */
  fetchApi(path: string, options?: RequestInit): Promise<Response>;
}
