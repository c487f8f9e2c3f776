/** The parts of a saved workflow that a swap reads and writes. */

export interface SavedSlot {
  name: string;
  type: string;
  link?: number | null;
  links?: number[] | null;
  /** The field that the slot belongs to. */
  widget?: { name: string };
}

export interface SavedNode {
  id: string | number;
  type: string;
  size: [number, number];
  inputs?: SavedSlot[];
  outputs?: SavedSlot[];
  properties: Record<string, unknown>;
  widgets_values?: unknown[];
}

export type ListedLink = [id: number, origin: unknown, from: number, target: unknown, slot: number, type: string];

export interface NamedLink {
  id: number;
  target_id: unknown;
  target_slot: number;
}

export interface SavedGraph {
  id?: string;
  nodes: SavedNode[];
  links: (ListedLink | NamedLink)[];
  /** The inputs of a subgraph. */
  inputs?: { linkIds?: number[] }[];
  extra?: { linearData?: { inputs?: [id: string | number, field: string, ...more: unknown[]][] } };
}

export interface Workflow extends SavedGraph {
  definitions?: { subgraphs?: SavedGraph[] };
}
