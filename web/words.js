// @ts-check
/** The page's texts in ComfyUI's language: `locales/<language>/main.json` under "parallel", as ComfyUI's server hands it out. */

/** @import { Api, App } from "./comfyui" */
/** @import { Sentences } from "./sentences" */

import { translated } from "./sentences.js";

/** @typedef {typeof import("../locales/en/main.json")["parallel"]} English */
/** @typedef {keyof English["texts"]} Key */
/** @typedef {{ texts?: Partial<Record<Key, string>>, names?: Record<string, string>,
 *   templates?: Record<string, string>, lines?: Sentences, sentences?: Sentences }} Language */
/** @typedef {Record<string, { parallel?: Language }>} Languages by their codes, such as `en` and `zh-TW` */

const ENGLISH = "en";

export class Words {
  /** @type {Languages} */
  #languages;
  #locale;

  /**
   * @param {Languages} languages
   * @param {() => string | undefined} locale ComfyUI's language of the moment
   */
  constructor(languages, locale) {
    this.#languages = languages;
    this.#locale = locale;
  }

  /**
   * Those of a page, once `load` has got them.
   *
   * @param {App} app
   */
  static of(app) {
    return new Words({}, () => app.extensionManager.setting.get("Comfy.Locale"));
  }

  /**
   * Gets all languages from the server.
   *
   * @param {Api} api
   */
  async load(api) {
    const answer = await api.fetchApi("/i18n");
    if (answer.ok) this.#languages = await answer.json();
  }

  /** ComfyUI's language; what was made in another one is to be made anew. */
  get locale() {
    return this.#locale() ?? ENGLISH;
  }

  /**
   * A text, with values in place of `{name}`.
   *
   * @param {Key} key
   * @param {Readonly<Record<string, string | number>>} [values]
   * @returns {string}
   */
  say(key, values = {}) {
    const text = this.#first((language) => language.texts?.[key]) ?? key;
    return text.replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
  }

  /**
   * The word for what the server calls so in English, such as a phase; as it is where there is none.
   *
   * @param {string} english
   * @returns {string}
   */
  name(english) {
    return this.#first((language) => language.names?.[english]) ?? english;
  }

  /** What each template makes, by its name, in the order in which they are shown. */
  get templates() {
    return this.#first((language) => language.templates) ?? {};
  }

  /**
   * A line that the server puts on a node in English; nothing where it is not the pack's.
   *
   * @param {string} english
   * @returns {string | undefined}
   */
  line(english) {
    return this.#first((language) => translated(english, language.lines ?? {}));
  }

  /**
   * What else the server says in English, such as why a plan was chosen; as it is where this language has it not.
   *
   * @param {string} english
   * @returns {string}
   */
  told(english) {
    return this.#first(({ lines, sentences }) => translated(english, { ...lines, ...sentences })) ?? english;
  }

  /**
   * From the first language that has it: zh-TW, zh, English.
   *
   * @type {<Found>(find: (language: Language) => Found | undefined) => Found | undefined}
   */
  #first(find) {
    const base = this.locale.split("-")[0] ?? ENGLISH;
    for (const code of [this.locale, base, ENGLISH]) {
      const found = find(this.#languages[code]?.parallel ?? {});
      if (found !== undefined) return found;
    }
    return undefined;
  }
}
