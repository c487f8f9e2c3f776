// @ts-check
/** The sidebar tab: sections that are drawn anew when what they show has changed. */

/** @import { Api, App, SidebarTab } from "../comfyui" */

import { doctorView } from "./doctor.js";
import { button, element } from "./elements.js";
import { memoryView, workersView } from "./machine.js";
import { comparisonView, costsView, plansView, timeOf } from "./plans.js";
import { Source } from "./source.js";
import { timelineView } from "./timeline.js";

/**
 * Adds the tab "Parallel" to ComfyUI's sidebar.
 *
 * @param {App} app
 * @param {Api} api
 */
export function addTab(app, api) {
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
    title: "Parallel",
    tooltip: "Parallel: GPUs, workers and the last run",
    type: "custom",
    render(parent) {
      panel?.close();
      panel = new Panel(parent, api);
    },
    destroy() {
      panel?.close();
      panel = undefined;
    },
  };
  app.extensionManager.registerSidebarTab(tab);
}

/** One showing of the tab. */
class Panel {
  #source;
  #root = element("div", "pp-panel");
  /** What each section was last drawn from, so that what is the same stays, with its selection and scroll position. */
  #drawn = new Map();
  /** What came of the last action, if there is something to say: its name and a sentence. */
  #answers = { action: "", said: "" };
  #whole = false;
  #busy = "";

  /**
   * @param {HTMLElement} parent
   * @param {Api} api
   */
  constructor(parent, api) {
    this.#source = new Source(api, () => this.#draw());
    parent.replaceChildren(this.#root);
    this.#source.open();
    this.#draw();
  }

  close() {
    this.#source.close();
    this.#root.remove();
  }

  #draw() {
    const { problem, status, run } = this.#source.state;
    this.#root.classList.toggle("pp-stale", problem !== "");
    this.#section("problem", [problem], () => element("p", "pp-problem", problem), problem !== "");
    if (!status) return;
    const { workers, memory, doctor, comparison } = status;
    const { failure } = workers;
    const running = workers.groups.some(({ state }) => state === "running" || state === "starting");
    const working = running || doctor.doing !== "" || comparison.doing !== "";
    const idle = !working && !problem && !this.#busy;
    this.#section("failure", [failure, idle, doctor], () => this.#failure(failure?.text ?? "", idle), !!failure);
    this.#section("Memory", [memory, workers.groups.map(({ ranks }) => ranks.map((rank) => rank.held))], () =>
      memoryView(status),
    );
    this.#section("Workers", [workers.groups, idle, this.#answers], () => this.#workers(idle));
    this.#section("Last run", [run, this.#whole], () => this.#lastRun(), true);
    this.#section("Plans", [run?.decision, comparison, idle, this.#answers], () => this.#plans(idle), !!run);
    this.#section("Doctor", [doctor, idle, this.#answers], () => this.#doctor(idle));
  }

  /** @type {(name: string, from: unknown, make: () => HTMLElement, shown?: boolean) => void} */
  #section(name, from, make, shown = true) {
    const key = JSON.stringify([from, shown]);
    let section = this.#drawn.get(name);
    if (section?.key === key) return;
    if (!section) {
      section = { body: element("div", "") };
      const titled = /^[A-Z]/.test(name) && element("h3", "", name);
      section.frame = element(
        "section",
        `pp-section pp-on-${name.toLowerCase().replace(" ", "-")}`,
        titled,
        section.body,
      );
      this.#root.append(section.frame);
      this.#drawn.set(name, section);
    }
    section.key = key;
    section.frame.hidden = !shown;
    section.body.replaceChildren(...(shown ? [make()] : []));
  }

  /** @type {(text: string, idle: boolean) => HTMLElement} */
  #failure(text, idle) {
    const ask = this.#action("Check this machine", "doctor", "Look at this machine for the cause", idle);
    return element("div", "pp-problem", element("b", "", "The last run failed"), element("p", "pp-text", text), ask);
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #workers(idle) {
    const { status } = this.#source.state;
    if (!status) return element("div", "");
    const free = "Take all models off the devices; they wait in the computer's memory while it has room";
    const stop = "End all workers and give back all they hold; the next run starts new ones";
    const buttons = element(
      "div",
      "pp-buttons",
      this.#action("Free memory", "free", free, idle),
      this.#action("Stop workers", "stop", stop, idle),
    );
    return element("div", "", workersView(status), buttons, this.#answer("free", "stop"));
  }

  #lastRun() {
    const { run } = this.#source.state;
    if (!run) return element("p", "pp-note", "No run has come to its end yet.");
    const head = element(
      "div",
      "",
      element("p", "", `${run.model}, ${run.kind}: ${run.plan}`),
      element("p", "", timeOf(run)),
    );
    const choose = (/** @type {boolean} */ whole) => {
      this.#whole = whole;
      this.#draw();
    };
    return element("div", "", head, timelineView(run, this.#whole, choose), costsView(run));
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #plans(idle) {
    const { run, status } = this.#source.state;
    if (!status) return element("div", "");
    const again = "Forget what was measured of this machine, and measure it anew: after a new driver, or new cards";
    const one =
      "Time the last run's first steps with its plan and on its first device alone. The model is loaded there for it, and a run that is queued ends it";
    const buttons = element(
      "div",
      "pp-buttons",
      this.#action("Compare with one GPU", "compare", one, idle),
      this.#action("Measure again", "measure", again, idle),
    );
    const unpredicted = element("p", "pp-note", "Its plan was not chosen by prediction.");
    const plans = run?.decision ? plansView(run.decision) : unpredicted;
    return element("div", "", plans, buttons, this.#answer("compare", "measure"), comparisonView(status.comparison));
  }

  /** @type {(idle: boolean) => HTMLElement} */
  #doctor(idle) {
    const { status } = this.#source.state;
    if (!status) return element("div", "");
    const tooltip = "Start workers on each device, measure them and look at all they need; takes about half a minute";
    const ask = this.#action("Check this machine", "doctor", tooltip, idle);
    return element("div", "", element("div", "pp-buttons", ask), this.#answer("doctor"), doctorView(status.doctor));
  }

  /** @type {(...actions: string[]) => HTMLElement | false} */
  #answer(...actions) {
    const { action, said } = this.#answers;
    return said !== "" && actions.includes(action) && element("p", "pp-note", said);
  }

  /** @type {(text: string, action: string, tooltip: string, enabled: boolean) => HTMLButtonElement} */
  #action(text, action, tooltip, enabled) {
    const press = async () => {
      this.#busy = action;
      this.#answers = { action, said: `${text} …` };
      this.#draw();
      const { said } = await this.#source.act(action);
      this.#busy = "";
      this.#answers = { action, said };
      this.#draw();
    };
    return button(text, tooltip, press, !enabled);
  }
}
