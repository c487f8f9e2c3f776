// @ts-check

/** A replacement of ComfyUI's class of badges. */
export class OneBadge {
  /** @param {{ text: string }} options */
  constructor({ text }) {
    this.text = text;
  }
}
