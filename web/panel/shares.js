// @ts-check
/** Shares of a rank's time in each bin of a run's timeline, for drawing and for a table. */

/** @import { RankTimeline, Timeline } from "./state" */

/** Phases that compute the model. Earlier phases are preparation. */
const COMPUTING = new Set(["sampling", "running the model once", "decoding", "encoding"]);

export const KINDS = /** @type {const} */ (["preparing", "computing", "sending", "waiting"]);

/** @typedef {typeof KINDS[number]} Kind */
/** @typedef {Record<Kind, number>} Shares seconds, or parts of a bin */

/**
 * Return the seconds after which the first rank begins to compute; 0 if no preparation came before.
 *
 * @param {Timeline} timeline
 * @returns {number}
 */
export function prepared(timeline) {
  return Math.min(...timeline.ranks.map(({ phases }) => phases.find(([name]) => COMPUTING.has(name))?.[1] ?? 0));
}

/**
 * Return a rank's shares of each bin. They add up to 1 until the rank was done.
 *
 * @param {RankTimeline} rank
 * @param {Timeline} timeline
 * @returns {Shares[]}
 */
export function shares(rank, { width, bins }) {
  return Array.from({ length: bins }, (_, bin) => {
    const waiting = (rank.waiting[bin] ?? 0) / 1000;
    const sending = (rank.sending[bin] ?? 0) / 1000;
    const there = Math.max(0, Math.min(1, rank.seconds / width - bin));
    const busy = Math.max(0, there - waiting - sending);
    const computes = COMPUTING.has(phaseAt(rank, (bin + 0.5) * width));
    return { preparing: computes ? 0 : busy, computing: computes ? busy : 0, sending, waiting };
  });
}

/**
 * Return the seconds of each kind from a moment on.
 *
 * @param {RankTimeline} rank
 * @param {Timeline} timeline
 * @param {number} from seconds
 * @returns {Shares}
 */
export function totals(rank, timeline, from) {
  const sums = { preparing: 0, computing: 0, sending: 0, waiting: 0 };
  shares(rank, timeline)
    .slice(Math.floor(from / timeline.width))
    .forEach((bin) => {
      for (const kind of KINDS) sums[kind] += bin[kind] * timeline.width;
    });
  return sums;
}

/**
 * Return the phase that a rank was in at a moment.
 *
 * @param {RankTimeline} rank
 * @param {number} at seconds
 * @returns {string}
 */
export function phaseAt(rank, at) {
  return rank.phases.findLast(([, begun]) => begun <= at)?.[0] ?? "";
}
