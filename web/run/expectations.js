// @ts-check
/** The expected time and memory of each loader's next run, shown on the loader and on the subgraph nodes around it. */

/** @import { Api, App, GraphNode } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Signs } from "./signs" */

import { usesIn } from "../swap/found.js";
import { askedOf } from "./expected.js";
import { pathOf } from "./node_path.js";

/** Milliseconds without a change after which the server is asked. */
const QUIET = 250;
/** Events of the page after which a field may have another value. ComfyUI itself sees some values only at a later click. */
const EDITS = /** @type {const} */ (["keyup", "click", "change"]);
const KIND = "expected";
const WARNING = "⚠";
const REFUSED = { fgColor: "#1a1300", bgColor: "#f5b301" };
const ENDS = /** @type {const} */ (["execution_success", "execution_error", "execution_interrupted"]);
const LOADER = /^LoadParallel(?!VAE)/;

/** @typedef {{ said: string, sign: string, brief: string, refused: boolean }} Answer */

/** An expectation in ComfyUI's language, and its loader: the title and the file. */
/** @typedef {{ title: string, file: string, said: string }} Expectation */

/** @type {(text: string) => import("./signs").Colours} */
const coloursOf = (text) => (text.includes(WARNING) ? REFUSED : {});

/** Return a file's name without its folder and its ending, which would take the space of the numbers. */
/** @type {(file: string) => string} */
const nameOf = (file) => file.slice(file.lastIndexOf("/") + 1).replace(/\.\w+$/, "");

export class Expectations {
  /** The latest expectations, which the tab shows. */
  /** @type {Expectation[]} */
  latest = [];

  #app;
  #api;
  #signs;
  #words;
  #changed;
  /** @type {Map<string, Answer>} */
  #answers = new Map();
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #turn = 0;
  #running = false;

  /**
   * @param {App} app
   * @param {Api} api
   * @param {Signs} signs
   * @param {Words} words
   * @param {() => void} changed called when the expectations have changed
   */
  constructor(app, api, signs, words, changed) {
    this.#app = app;
    this.#api = api;
    this.#signs = signs;
    this.#words = words;
    this.#changed = changed;
    api.addEventListener("graphChanged", this.look);
    for (const edit of EDITS) window.addEventListener(edit, this.look, { capture: true });
    api.addEventListener("execution_start", () => {
      this.#running = true;
      signs.clear(KIND); // the run's own lines replace them
    });
    for (const end of ENDS) {
      api.addEventListener(end, () => {
        this.#running = false;
        this.#answers.clear(); // the workers exist now
        this.look();
      });
    }
  }

  /** Request expectations for the open workflow once it has not changed for a moment. */
  look = () => {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => void this.#look().catch(console.error), QUIET);
  };

  /**
   * Return the server's answers about the loaders of the open workflow as it is now.
   *
   * @returns {Promise<Answer[]>}
   */
  async now() {
    return (await this.#told()).flatMap(({ answer }) => answer ?? []);
  }

  /** Return the server's answer about each loader of the open workflow, with the loader's id and file. */
  async #told() {
    const { output } = await this.#app.graphToPrompt();
    const loaders = Object.keys(output).filter((id) => LOADER.test(output[id]?.class_type ?? ""));
    return Promise.all(
      loaders.map(async (id) => {
        const asked = askedOf(output, id);
        return { id, file: nameOf(asked?.file ?? ""), answer: await this.#ask(asked) };
      }),
    );
  }

  async #look() {
    if (this.#running) return;
    this.#turn += 1;
    const turn = this.#turn;
    const loads = [...usesIn(this.#app.rootGraph)].some(({ node }) => LOADER.test(node.type));
    const told = loads ? await this.#told() : []; // the page's `graphToPrompt` may have effects, such as a picture of the camera
    if (turn !== this.#turn || this.#running) return; // the workflow has changed, or a run has started
    this.#signs.clear(KIND);
    this.latest = [];
    /** @type {Map<GraphNode, Map<string, string[]>>} */
    const around = new Map(); // the files of the loaders inside of each subgraph node, by their line
    for (const { id, file, answer } of told) {
      const path = pathOf(this.#app, id);
      const loader = path.at(-1);
      if (!answer?.said || !loader) continue;
      const line = answer.refused
        ? `${WARNING} ${this.#words.say("error.PlanRefused")}`
        : this.#words.told(answer.sign);
      this.#signs.show(loader, KIND, line, coloursOf(line));
      for (const outer of path.slice(0, -1)) {
        const lines = around.get(outer) ?? new Map();
        around.set(outer, lines.set(line, [...(lines.get(line) ?? []), file]));
      }
      this.latest.push({ title: loader.title, file, said: this.#words.told(answer.said) });
    }
    for (const [outer, lines] of around) {
      const text = [...lines].map(([line, files]) => `${line} (${files.join(", ")})`).join(" · ");
      this.#signs.show(outer, KIND, text, coloursOf(text));
    }
    this.#changed();
  }

  /** @type {(asked: import("./expected").Asked | undefined) => Promise<Answer | undefined>} */
  async #ask(asked) {
    if (!asked) return undefined;
    const body = JSON.stringify(asked);
    const before = this.#answers.get(body);
    if (before) return before;
    const answer = await this.#api.fetchApi("/parallel/expectation", { method: "POST", body });
    if (!answer.ok) return undefined;
    const told = /** @type {Answer} */ (await answer.json());
    this.#answers.set(body, told);
    return told;
  }
}
