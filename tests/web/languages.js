// @ts-check
/** The pack's languages in the form in which ComfyUI's server provides them, read from their files. */

import { readFileSync } from "node:fs";
import { Words } from "../../web/words.js";

/** @type {(code: string) => typeof import("../../locales/en/main.json")} */
const read = (code) => JSON.parse(readFileSync(new URL(`../../locales/${code}/main.json`, import.meta.url), "utf8"));

export const LANGUAGES = { en: read("en"), zh: read("zh") };

export const ENGLISH = new Words(LANGUAGES, () => "en");
