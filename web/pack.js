// @ts-check
/** The name of the pack's folder in ComfyUI, which is ComfyUI's name of the pack. */
export const PACK = decodeURIComponent(new URL(".", import.meta.url).pathname.split("/").at(-2) ?? "");
