// @ts-check
/** The page's texts in ComfyUI's language: "parallel" in `locales/<language>/main.json`, as ComfyUI's server sends them. */

/** @import { Api, App } from "./comfyui" */
/** @import { Sentences, ValueTypes } from "./sentences" */

import { translated } from "./sentences.js";

/** @typedef {typeof import("../locales/en/main.json")["parallel"]} English */
/** @typedef {keyof English["texts"]} Key */
/** @typedef {{ texts?: Partial<Record<Key, string>>, names?: Record<string, string>,
 *   templates?: Record<string, string>, values?: ValueTypes, lines?: Sentences, sentences?: Sentences }} Language */
/** @typedef {Record<string, { parallel?: Language }>} Languages by their codes, such as `en` and `zh-TW` */

const ENGLISH = "en";

export class Words {
  /** @type {Languages} */
  #languages;
  #locale;

  /**
   * @param {Languages} languages
   * @param {() => string | undefined} locale returns ComfyUI's present language
   */
  constructor(languages, locale) {
    this.#languages = languages;
    this.#locale = locale;
  }

  /**
   * Return the page's texts, which are empty until `load` is done.
   *
   * @param {App} app
   */
  static of(app) {
    return new Words({}, () => app.extensionManager.setting.get("Comfy.Locale"));
  }

  /**
   * Load all languages from the server.
   *
   * @param {Api} api
   */
  async load(api) {
    const answer = await api.fetchApi("/i18n");
    if (answer.ok) this.#languages = await answer.json();
  }

  /** ComfyUI's present language. After a change, texts in the old language must be made anew. */
  get locale() {
    return this.#locale() ?? ENGLISH;
  }

  /**
   * Return a text, with values in place of `{name}`.
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
   * Translate an English name of the server's, such as a phase; return it unchanged if there is no translation.
   *
   * @param {string} english
   * @returns {string}
   */
  name(english) {
    return this.#first((language) => language.names?.[english]) ?? english;
  }

  /** The description of each template, by its name, in the order of the template browser. */
  get templates() {
    return this.#first((language) => language.templates) ?? {};
  }

  /**
   * Translate an English line that the server puts on a node; return undefined for a line that is not the pack's.
   *
   * @param {string} english
   * @returns {string | undefined}
   */
  line(english) {
    return this.#first((language) => translated(english, language.lines ?? {}, this.#types));
  }

  /**
   * Translate any other English text of the server's, such as the reason for a plan; return it unchanged if unknown.
   *
   * @param {string} english
   * @returns {string}
   */
  told(english) {
    return (
      this.#first(({ lines, sentences }) => translated(english, { ...lines, ...sentences }, this.#types)) ?? english
    );
  }

  /** The types of the values in the server's texts, which are the same in all languages. */
  get #types() {
    return this.#languages[ENGLISH]?.parallel?.values ?? {};
  }

  /**
   * Find a text in the first language that has it: zh-TW, zh, English.
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
