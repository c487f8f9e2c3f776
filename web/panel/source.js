// @ts-check
/** The source of the panel's state: requests when the panel opens and when the server is back, and events in between. */

/** @import { Api } from "../comfyui" */
/** @import { Words } from "../words" */
/** @import { Run, State, Status } from "./state" */

/** Milliseconds between two attempts while the server is gone, and between two requests while events come. */
const AGAIN = 2_000;
const STILL_THERE = 30_000;

export class Source {
  /** @type {State} */
  state = { problem: "", status: null, run: null };

  #api;
  #changed;
  #words;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  #timer;
  #open = false;

  /**
   * @param {Api} api
   * @param {() => void} changed called whenever the state has changed
   * @param {Words} words
   */
  constructor(api, changed, words) {
    this.#words = words;
    this.#api = api;
    this.#changed = changed;
  }

  /** Follow the server until `close`. */
  open() {
    this.#open = true;
    this.#api.addEventListener("parallel.status", this.#told);
    this.#api.addEventListener("reconnecting", this.#gone);
    this.#api.addEventListener("reconnected", this.ask);
    void this.ask();
  }

  close() {
    this.#open = false;
    clearTimeout(this.#timer);
    this.#api.removeEventListener("parallel.status", this.#told);
    this.#api.removeEventListener("reconnecting", this.#gone);
    this.#api.removeEventListener("reconnected", this.ask);
  }

  /** Request the whole state, and schedule the next request. */
  ask = async () => {
    try {
      await this.#take(await this.#get("status"));
      this.#askAgain(STILL_THERE);
    } catch (error) {
      this.#lost(error);
    }
  };

  /**
   * Request an action of the server.
   *
   * @param {string} action
   * @param {object} [content] the action's input
   * @returns {Promise<{ done: boolean, said: string }>} true if the action succeeded, and the server's sentence
   */
  async act(action, content) {
    try {
      const body = content && JSON.stringify(content);
      const answer = await this.#api.fetchApi(`/parallel/${action}`, { method: "POST", ...(body && { body }) });
      const text = await answer.text();
      return { done: answer.ok, said: saidIn(text) };
    } catch (error) {
      this.#lost(error);
      return { done: false, said: "" };
    } finally {
      void this.ask();
    }
  }

  /** @type {(event: CustomEvent<Status>) => void} */
  #told = ({ detail }) => {
    void this.#take(detail).catch(this.#lost);
  };

  #gone = () => this.#lost(undefined);

  /** @type {(error: unknown) => void} */
  #lost = (error) => {
    this.state = { ...this.state, problem: error instanceof Refusal ? error.message : this.#words.say("tab.gone") };
    this.#changed();
    this.#askAgain(AGAIN);
  };

  /** @type {(milliseconds: number) => void} */
  #askAgain(milliseconds) {
    clearTimeout(this.#timer);
    if (this.#open) this.#timer = setTimeout(this.ask, milliseconds);
  }

  /** @type {(status: Status) => Promise<void>} */
  async #take(status) {
    const { run } = this.state;
    this.state = { problem: "", status, run };
    this.#changed();
    if (status.workers.runs !== (run?.number ?? 0)) {
      const latest = /** @type {Run | null} */ (await this.#get("run"));
      this.state = { ...this.state, run: latest };
      this.#changed();
    }
  }

  /** @type {(name: string) => Promise<any>} */
  async #get(name) {
    const answer = await this.#api.fetchApi(`/parallel/${name}`);
    if (!answer.ok) throw new Refusal(await answer.text());
    return answer.json();
  }
}

/** An error: the server has refused a request. */
class Refusal extends Error {}

/**
 * Return the sentence in a reply: `said` of the panel's JSON, or the whole text of a refusal.
 *
 * @param {string} text
 * @returns {string}
 */
export function saidIn(text) {
  try {
    return JSON.parse(text).said;
  } catch {
    return text;
  }
}
