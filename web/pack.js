// @ts-check
/** The folder that ComfyUI has the pack in, by which it calls the pack. */
export const PACK = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2) ?? "");
