// @ts-check
/** "Use all GPUs" and "Back to one GPU": swap the loaders of the open workflow, and report the result. */

/** @import { Api, App, GraphNode } from "../comfyui" */
/** @import { Answer } from "../run/expectations" */
/** @import { Words } from "../words" */
/** @import { Decision, Read, Use, Verdict } from "./found" */

import { showMessage } from "../messages.js";
import { saidIn } from "../panel/source.js";
import { unplanned } from "../settings.js";
import {
  decide,
  follows,
  goesBack,
  isAnothers,
  isForAll,
  isForOne,
  isTextEncoder,
  linkInTheWay,
  loadedBy,
  read,
  usesIn,
} from "./found.js";
import { pairOfOne } from "./pairs.js";
import { nextOf, outcomeOf } from "./said.js";
import { onAll, onOne, placeOf } from "./swapped.js";
import { goTo, stateOf } from "./undoable.js";

/** Milliseconds for which the message after a swap waits for the expected gain. */
const PATIENCE = 3_000;

/** A function that returns true for the uses to swap; by default for all. */
/** @typedef {(use: Use) => boolean} Meant */

/** @type {Meant} */
const EVERY = () => true;

/**
 * A loader that the server judges.
 *
 * @typedef {{ kind: string, file: string, further_files: string[], type: string, devices: string }} Asked
 */

/** The server's answer about a loader. The reason, a sentence, is empty for a loader that changes or stays as usual. */
/** @typedef {{ swap: boolean, why: string }} Judgement */

export class Swap {
  #app;
  #api;
  #words;
  #isThere;
  #expected;
  #busy = false;

  /**
   * @param {App} app
   * @param {Api} api
   * @param {Words} words
   * @param {(type: string) => boolean} isThere returns true if the page has nodes of a type
   * @param {() => Promise<readonly Answer[] | undefined>} expected returns the server's answers about the next run of the
   *   workflow's loaders; undefined without a GPU
   */
  constructor(app, api, words, isThere, expected) {
    this.#app = app;
    this.#api = api;
    this.#words = words;
    this.#isThere = isThere;
    this.#expected = expected;
  }

  /**
   * The loaders of the open workflow: those of models and VAEs that use one GPU, those of text encoders that do, and those
   * that use all GPUs.
   */
  get loaders() {
    const uses = [...usesIn(this.#app.rootGraph)];
    const one = uses.filter(({ node }) => isForOne(node));
    return {
      one: one.filter(({ node }) => !isTextEncoder(node)),
      encoders: one.filter(({ node }) => isTextEncoder(node)),
      all: uses.filter(({ node }) => isForAll(node)),
    };
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
      const judged = await this.#judged(loaders);
      const decision = decide(loaders, (each) => this.#verdict(each, judged));
      const others = uses.filter(({ node }) => isAnothers(node));
      decision.left.push(...others.map((use) => ({ use, why: { key: /** @type {const} */ ("swap.other") } })));
      await this.#go("all", uses, decision);
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
      const decision = decide(read(uses, await this.#prompt(), this.#isThere), goesBack(this.#isThere));
      const { places } = decision;
      const following = places.size ? every.filter(({ node }) => follows(node)) : [];
      for (const use of following) places.set(use.place, loadedBy(use, []));
      await this.#go("one", uses, decision);
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

  /** Return the server's judgement of each loader whose files are known, by what it was asked. */
  /** @type {(loaders: readonly Read[]) => Promise<Map<string, Judgement>>} */
  async #judged(loaders) {
    const asked = loaders.flatMap((each) => (each.files ? this.#asked({ ...each, files: each.files }) : []));
    if (!asked.length) return new Map();
    const answer = await this.#api.fetchApi("/parallel/loaders", { method: "POST", body: JSON.stringify(asked) });
    const text = await answer.text();
    if (!answer.ok) throw new Error(saidIn(text));
    /** @type {Judgement[]} */
    const judged = JSON.parse(text);
    return new Map(judged.map((judgement, at) => [JSON.stringify(asked[at]), judgement]));
  }

  /** @type {(read: Read & { files: string[] }) => Asked} */
  #asked({ use, files: [file = "", ...further], type = "" }) {
    return { kind: use.node.type, file, further_files: further, type, devices: unplanned(this.#app).devices };
  }

  /** @type {(read: Read & { files: string[] }, judged: ReadonlyMap<string, Judgement>) => Verdict} */
  #verdict(each, judged) {
    const { node } = each.use;
    if (!this.#isThere(pairOfOne(node.type)?.all ?? "")) return { swap: false, why: { key: "swap.other" } };
    const { swap, why } = judged.get(JSON.stringify(this.#asked(each))) ?? { swap: false, why: "" };
    const link = swap ? linkInTheWay(node) : undefined;
    if (link) return { swap: false, why: link };
    return why ? { swap, why: { said: why } } : { swap };
  }

  /** @type {(way: "all" | "one", uses: readonly Use[], decision: Decision) => Promise<void>} */
  async #go(way, uses, decision) {
    const { places } = decision;
    const changing = uses.filter(({ place }) => places.has(place));
    const message = outcomeOf(way, changing, decision, this.#words); // before the nodes change
    const tracker = this.#app.extensionManager.workflow.activeWorkflow?.changeTracker;
    if (changing.length && tracker) {
      const state = stateOf(this.#app);
      const next = way === "all" ? onAll(state, new Set(places.keys())) : onOne(state, places);
      await goTo(this.#app, tracker, next);
      if (way === "all") {
        const { line, refused } = await this.#next();
        message.detail = `${line}\n${message.detail}`;
        if (refused) {
          message.severity = "warn";
          delete message.life;
        }
      }
    }
    showMessage(this.#app, message);
  }

  /** Return the line about the next run, without the expected gain if it takes too long. */
  async #next() {
    /** @type {Promise<readonly Answer[]>} */
    const late = new Promise((resolve) => setTimeout(() => resolve([]), PATIENCE));
    return nextOf(await Promise.race([this.#expected().catch(() => []), late]), this.#words);
  }

  /** @type {(severity: "warn" | "error", detail: string) => void} */
  #tell(severity, detail) {
    showMessage(this.#app, { severity, summary: this.#words.say("swap.failed"), detail });
  }
}
