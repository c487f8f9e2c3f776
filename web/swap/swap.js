// @ts-check
/** "Use all GPUs" and "Back to one GPU": swap the loaders of the open workflow, and report the result. */

/** @import { Api, App, GraphNode } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Left, Read, Use } from "./found" */
/** @import { Loaded } from "./swapped" */

import { showMessage } from "../messages.js";
import { saidIn } from "../panel/source.js";
import { decide, follows, isAnothers, isForAll, isForOne, loadedBy, read, usesIn, whyNotBack } from "./found.js";
import { pairOfOne } from "./pairs.js";
import { outcomeOf } from "./said.js";
import { onAll, onOne, placeOf } from "./swapped.js";
import { goTo, stateOf } from "./undoable.js";

/** A function that returns true for the uses to swap; by default for all. */
/** @typedef {(use: Use) => boolean} Meant */

/** @type {Meant} */
const EVERY = () => true;

export class Swap {
  #app;
  #api;
  #words;
  #isThere;
  #busy = false;

  /**
   * @param {App} app
   * @param {Api} api
   * @param {Words} words
   * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
   */
  constructor(app, api, words, isThere) {
    this.#app = app;
    this.#api = api;
    this.#words = words;
    this.#isThere = isThere;
  }

  /** The loaders of the open workflow that use one GPU, and those that use all GPUs. */
  get loaders() {
    const uses = [...usesIn(this.#app.rootGraph)];
    return { one: uses.filter(({ node }) => isForOne(node)), all: uses.filter(({ node }) => isForAll(node)) };
  }

  /**
   * Make loaders use all GPUs if the backend can run their files.
   *
   * @param {Meant} [meant]
   */
  useAll(meant = EVERY) {
    return this.#once(async () => {
      const uses = [...usesIn(this.#app.rootGraph)].filter(meant);
      const loaders = read(
        uses.filter(({ node }) => isForOne(node)),
        await this.#prompt(),
        this.#isThere,
      );
      const whys = await this.#whys(loaders);
      const { places, left } = decide(loaders, (use, file) => this.#whyNot(use, file, whys));
      const others = uses.filter(({ node }) => isAnothers(node));
      const all = [...left, ...others.map((use) => ({ use, why: { key: /** @type {const} */ ("swap.other") } }))];
      await this.#go("all", uses, places, all);
    });
  }

  /**
   * Make loaders use one GPU again.
   *
   * @param {Meant} [meant]
   */
  useOne(meant = EVERY) {
    return this.#once(async () => {
      const every = [...usesIn(this.#app.rootGraph)];
      const uses = every.filter((use) => isForAll(use.node) && meant(use));
      const { places, left } = decide(read(uses, await this.#prompt(), this.#isThere), whyNotBack(this.#isThere));
      const following = places.size ? every.filter(({ node }) => follows(node)) : [];
      for (const use of following) places.set(use.place, loadedBy(use, ""));
      await this.#go("one", uses, places, left);
    });
  }

  /**
   * Return the uses for a node's menu: the loader itself, or all loaders inside of a subgraph.
   *
   * @param {GraphNode} node
   * @returns {{ uses: Use[], meant: Meant }}
   */
  of(node) {
    const graph = node.graph === this.#app.rootGraph ? "" : (node.graph?.id ?? "");
    const uses = node.subgraph
      ? [...usesIn(node.subgraph, node.subgraph.id)]
      : [{ place: placeOf(graph, node.id), id: "", node }];
    const places = new Set(uses.map(({ place }) => place));
    return { uses, meant: ({ place }) => places.has(place) };
  }

  /** @type {(work: () => Promise<void>) => Promise<void>} */
  async #once(work) {
    if (this.#busy) return;
    this.#busy = true;
    try {
      if (this.#app.canvas.read_only) this.#tell("warn", this.#words.say("swap.locked"));
      else await work();
    } catch (error) {
      this.#tell("error", error instanceof Error ? error.message : String(error));
    } finally {
      this.#busy = false;
    }
  }

  async #prompt() {
    return (await this.#app.graphToPrompt()).output;
  }

  /** Return the server's reason against each file, by loader and file; empty if there is none. */
  /** @type {(loaders: readonly Read[]) => Promise<Map<string, string>>} */
  async #whys(loaders) {
    const asked = loaders.flatMap((each) => ("file" in each ? [{ kind: each.use.node.type, file: each.file }] : []));
    if (!asked.length) return new Map();
    const answer = await this.#api.fetchApi("/parallel/loaders", { method: "POST", body: JSON.stringify(asked) });
    const text = await answer.text();
    if (!answer.ok) throw new Error(saidIn(text));
    /** @type {string[]} */
    const whys = JSON.parse(text);
    return new Map(asked.map(({ kind, file }, at) => [`${kind} ${file}`, whys[at] ?? ""]));
  }

  /** @type {(use: Use, file: string, whys: ReadonlyMap<string, string>) => Left["why"] | undefined} */
  #whyNot({ node: { type } }, file, whys) {
    const said = whys.get(`${type} ${file}`);
    if (!this.#isThere(pairOfOne(type)?.all ?? "")) return { key: "swap.other" };
    return said ? { said } : undefined;
  }

  /** @type {(way: "all" | "one", uses: readonly Use[], places: ReadonlyMap<string, Loaded>, left: readonly Left[]) => Promise<void>} */
  async #go(way, uses, places, left) {
    const changing = uses.filter(({ place }) => places.has(place));
    const message = outcomeOf(way, changing, left, this.#words); // before the nodes change
    const tracker = this.#app.extensionManager.workflow.activeWorkflow?.changeTracker;
    if (changing.length && tracker) {
      const state = stateOf(this.#app);
      const next = way === "all" ? onAll(state, new Set(places.keys())) : onOne(state, places);
      await goTo(this.#app, tracker, next);
    }
    showMessage(this.#app, message);
  }

  /** @type {(severity: "warn" | "error", detail: string) => void} */
  #tell(severity, detail) {
    showMessage(this.#app, { severity, summary: this.#words.say("swap.failed"), detail });
  }
}
