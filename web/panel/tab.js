// @ts-check
/** The sidebar tab, whose sections are drawn again when their content has changed. */

/** @import { Api, App, SidebarTab } from "../comfyui" */
/** @import { Expectation } from "../run/expectations" */
/** @import { Swap } from "../swap/swap" */
/** @import { Key, Words } from "../words" */
/** @import { Status } from "./state" */

import { linkTo, remedyOf } from "../run/remedies.js";
import { setDevices, unplanned } from "../settings.js";
import { benchView } from "./bench.js";
import { derivedView, doctorView } from "./doctor.js";
import { button, element } from "./elements.js";
import { loadersView } from "./loaders.js";
import { memoryView, workersView } from "./machine.js";
import { comparisonView, costsView, plansView, predictionOf, timeOf } from "./plans.js";
import { Source } from "./source.js";
import { timelineView } from "./timeline.js";
import { clock } from "./units.js";

/** Titles of the sections that have one. */
/** @type {Record<string, Key>} */
const TITLES = {
  loaders: "section.loaders",
  memory: "section.memory",
  workers: "section.workers",
  "last-run": "section.last-run",
  plans: "section.plans",
  bench: "section.bench",
  derived: "section.derived",
  doctor: "section.doctor",
};

/** Messages after an action, for actions without another visible effect. */
/** @type {Record<string, Key>} */
const DONE = { free: "workers.free.done", stop: "workers.stop.done", measure: "plans.measure.done" };

/**
 * Add the tab "Parallel" to ComfyUI's sidebar.
 *
 * @param {App} app
 * @param {Api} api
 * @param {Words} words
 * @param {Swap} swap
 * @param {() => readonly Expectation[]} expectations returns the open workflow's expectations
 * @returns {() => void} draws the tab again after a change of its content
 */
export function addTab(app, api, words, swap, expectations) {
  const sheet = element("link", "");
  sheet.rel = "stylesheet";
  sheet.href = new URL("./panel.css", import.meta.url).href;
  document.head.append(sheet);
  /** @type {Panel | undefined} */
  let panel;
  /** @type {SidebarTab} */
  const tab = {
    id: "parallel",
    icon: "pi pi-sitemap",
    title: words.say("tab.title"),
    tooltip: words.say("tab.tooltip"),
    type: "custom",
    render(parent) {
      panel?.close();
      panel = new Panel(parent, app, api, words, swap, expectations);
    },
    destroy() {
      panel?.close();
      panel = undefined;
    },
  };
  app.extensionManager.registerSidebarTab(tab);
  return () => panel?.draw();
}

/** The content of the tab, from opening to closing. */
class Panel {
  #source;
  #app;
  #expectations;
  #words;
  #api;
  #swap;
  #root = element("div", "pp-panel");
  /** The data that each section was last drawn from. Unchanged sections keep their selection and scroll position. */
  #drawn = new Map();
  /** The last action and the message about it, if there is one. */
  #answers = { action: "", said: "" };
  #whole = false;
  #busy = "";

  /**
   * @param {HTMLElement} parent
   * @param {App} app
   * @param {Api} api
   * @param {Words} words
   * @param {Swap} swap
   * @param {() => readonly Expectation[]} expectations
   */
  constructor(parent, app, api, words, swap, expectations) {
    this.#app = app;
    this.#expectations = expectations;
    this.#words = words;
    this.#api = api;
    this.#swap = swap;
    this.#source = new Source(api, () => this.draw(), words);
    parent.replaceChildren(this.#root);
    this.#source.open();
    this.draw();
    api.addEventListener("graphChanged", this.draw);
  }

  close() {
    this.#api.removeEventListener("graphChanged", this.draw);
    this.#source.close();
    this.#root.remove();
  }

  draw = () => {
    const { problem, status, run } = this.#source.state;
    this.#root.classList.toggle("pp-stale", problem !== "");
    this.#section("problem", [problem], () => element("p", "pp-problem", problem), problem !== "");
    const { one, encoders, all } = this.#swap.loaders;
    const loaders = [...one, ...encoders, ...all].map(({ place, node }) => [place, node.type]);
    const expected = this.#expectations();
    this.#section("loaders", [loaders, expected], () => loadersView(this.#swap, expected, this.#words));
    if (!status) return;
    const { workers, memory, derived, doctor, comparison, bench } = status;
    const { failure } = workers;
    const running = workers.groups.some(({ state }) => state === "running" || state === "starting");
    const working = running || [doctor, comparison, bench].some(({ doing }) => doing !== "");
    const idle = !working && !problem && !this.#busy;
    this.#section(
      "failure",
      [failure, idle, doctor],
      () => this.#failure(failure?.text ?? "", idle),
      !!failure && !running,
    );
    const { devices } = unplanned(this.#app);
    const choose = (/** @type {string} */ other) => void setDevices(this.#app, other);
    const held = workers.groups.map(({ ranks }) => ranks.map((rank) => rank.held));
    this.#section("memory", [memory, held, devices], () => memoryView(status, { devices, choose }, this.#words));
    this.#section("workers", [workers.groups, idle, this.#answers], () => this.#workers(idle));
    const other = !!run?.workflow && run.workflow !== this.#app.rootGraph.id;
    const last = [run, status.last_end, other, this.#whole];
    this.#section("last-run", last, () => this.#lastRun(status, other), true);
    const chosen = [run?.decision, run?.plan, comparison, other, idle, this.#answers];
    this.#section("plans", chosen, () => this.#plans(idle, other), !!run);
    this.#section("bench", [bench, idle, this.#answers, loaders.length > 0], () => this.#bench(idle));
    this.#section("derived", derived, () => derivedView(derived, this.#words), derived.length > 0);
    this.#section("doctor", [doctor, idle, this.#answers], () => this.#doctor(idle));
  };

  /** @type {(name: string, from: unknown, make: () => HTMLElement, shown?: boolean) => void} */
  #section(name, from, make, shown = true) {
    const key = JSON.stringify([from, shown, this.#words.locale]);
    let section = this.#drawn.get(name);
    if (section?.key === key) return;
    if (!section) {
      section = { frame: element("section", `pp-section pp-on-${name}`) };
      this.#root.append(section.frame);
      this.#drawn.set(name, section);
    }
    section.key = key;
    section.frame.hidden = !shown;
    const title = TITLES[name];
    const heading = title ? [element("h3", "", this.#words.say(title))] : [];
    section.frame.replaceChildren(...(shown ? [...heading, make()] : []));
  }

  /** @type {(text: string, idle: boolean) => HTMLElement} */
  #failure(text, idle) {
    const ask = this.#action("doctor", "doctor.check", "failure.tooltip", idle);
    const title = element("b", "", this.#words.say("failure.title"));
    const said = element("p", "pp-text", text);
    void remedyOf(this.#api, text).then((url) => url && said.append(" ", linkTo(url, this.#words.say("remedy.link"))));
    return element("div", "pp-problem", title, said, ask);
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #workers(idle) {
    const { status } = this.#source.state;
    if (!status) return element("div", "");
    const buttons = element(
      "div",
      "pp-buttons",
      this.#action("free", "workers.free", "workers.free.tooltip", idle),
      this.#action("stop", "workers.stop", "workers.stop.tooltip", idle),
    );
    return element("div", "", workersView(status, this.#words), buttons, this.#answer("free", "stop"));
  }

  /** @type {(status: Status, other: boolean) => HTMLElement} */
  #lastRun({ last_end: { text, at } }, other) {
    const { run } = this.#source.state;
    const { locale } = this.#words;
    const end = text && this.#words.say("run.end", { said: this.#words.told(text), time: clock(at, locale) });
    if (!run) return element("p", "pp-note", end || this.#words.say("run.none"));
    const before = end && this.#words.say("run.before", { time: clock(run.ended, locale) });
    const plan = this.#words.told(run.plan);
    const what = this.#words.say("run.head", { model: run.model, kind: this.#words.name(run.kind), plan });
    const head = element(
      "div",
      "",
      end && element("p", "", end),
      before && element("p", "pp-note", before),
      other && this.#other(),
      element("p", "", what),
      element("p", "", timeOf(run, this.#words)),
    );
    const choose = (/** @type {boolean} */ whole) => {
      this.#whole = whole;
      this.draw();
    };
    const timeline = timelineView(run, this.#whole, choose, this.#words);
    return element("div", "", head, timeline, costsView(run, this.#words));
  }

  /** Return the note that a section is about a run of another workflow than the open one. */
  #other() {
    return element("p", "pp-note", this.#words.say("run.other"));
  }

  /** @type {(idle: boolean, other: boolean) => HTMLElement} */
  #plans(idle, other) {
    const { run, status } = this.#source.state;
    if (!status) return element("div", "");
    const several = (run?.ranks.length ?? 0) > 1;
    const buttons = element(
      "div",
      "pp-buttons",
      several && this.#action("compare", "plans.compare", "plans.compare.tooltip", idle),
      this.#action("measure", "plans.measure", "plans.measure.tooltip", idle),
    );
    const unpredicted = element("p", "pp-note", this.#words.say("plans.unpredicted"));
    const predicted = run && predictionOf(run);
    const plans = predicted ? plansView(predicted, this.#words) : unpredicted;
    const comparison = comparisonView(status.comparison, run?.number ?? 0, this.#words);
    return element("div", "", other && this.#other(), plans, buttons, this.#answer("compare", "measure"), comparison);
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #bench(idle) {
    const { status } = this.#source.state;
    if (!status) return element("div", "");
    const { one, all } = this.#swap.loaders;
    const buttons = element(
      "div",
      "pp-buttons",
      one.length + all.length > 0 &&
        this.#action("bench", "bench.workflow", "bench.workflow.tooltip", idle, () => this.#job()),
      this.#action("bench", "bench.small", "bench.small.tooltip", idle),
    );
    return element("div", "", buttons, this.#answer("bench"), benchView(status.bench, this.#api, this.#words));
  }

  /** Return the open workflow as a job for the benchmark. */
  async #job() {
    const { output } = await this.#app.graphToPrompt();
    return { graph: output, name: this.#app.extensionManager.workflow.activeWorkflow?.filename ?? "" };
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #doctor(idle) {
    const { status } = this.#source.state;
    if (!status) return element("div", "");
    const buttons = element(
      "div",
      "pp-buttons",
      this.#action("doctor", "doctor.check", "doctor.tooltip", idle),
      this.#action("models", "doctor.models", "doctor.models.tooltip", idle),
    );
    return element("div", "", buttons, this.#answer("doctor", "models"), doctorView(status.doctor, this.#words));
  }

  /** @type {(...actions: string[]) => HTMLElement | false} */
  #answer(...actions) {
    const { action, said } = this.#answers;
    return said !== "" && actions.includes(action) && element("p", "pp-note", said);
  }

  /** @type {(action: string, label: Key, tooltip: Key, enabled: boolean, content?: () => Promise<object>) => HTMLButtonElement} */
  #action(action, label, tooltip, enabled, content = undefined) {
    const text = this.#words.say(label);
    const press = async () => {
      this.#busy = action;
      this.#answers = { action, said: `${text} …` };
      this.draw();
      const { done, said } = await this.#source.act(action, await content?.());
      const success = DONE[action];
      this.#busy = "";
      this.#answers = { action, said: done && success ? this.#words.say(success) : said };
      this.draw();
    };
    return button(text, this.#words.say(tooltip), press, !enabled);
  }
}
