"""What a run came to, for the one who asked for it: as a record, and in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...attention.kernels import describe
from ...plan.choose import PlanChoice
from ..planning.events import CostEvent, PlanEvent


class Outcome(msgspec.Struct, frozen=True):
    """A run of one node.

    `steps` and `seconds_a_step` are 0 where there are no steps, `peak` has the bytes at the peak by device, `waiting` is the
    share of all ranks' time in which they waited for others, `sent` the bytes they sent. `gain` is how many times as fast as
    one device the plan is, None where one device cannot hold the job or the plan has but one; `gain_is` says whether it is
    "measured" or "predicted", and nothing where there is none. `starting` are the seconds in which workers were started, which
    `seconds` leaves out, `compiling` those of its own in which the slowest worker compiled blocks.
    """

    plan: str
    why: str
    seconds: float
    steps: int
    seconds_a_step: float
    peak: dict[str, int]
    waiting: float
    sent: int
    gain: float | None
    gain_is: str
    warnings: list[str]
    starting: float = 0.0
    compiling: float = 0.0


@dataclass(frozen=True)
class RunTimes:
    """The seconds that a run took without `starting` workers, and those of a step once it was going; no steps are 0."""

    seconds: float
    starting: float = 0.0
    steps: int = 0
    seconds_a_step: float = 0.0


def outcome(
    ran: Sequence[CostEvent],
    planned: PlanEvent | None,
    times: RunTimes,
    alone: float | None = None,
    warnings: Sequence[str] = (),
) -> Outcome:
    """Return the outcome of a run.

    Args:
        ran: its requests, at least one.
        planned: how its plan was chosen, if it was.
        alone: measured seconds a step of the same job on one device, if they are known.
        warnings: what the user should know besides.
    """
    plan = ran[-1].plan
    reports = [report for event in ran for report in event.reports]
    peaks: dict[tuple[str, int], int] = {}
    for report in reports:
        device_rank = plan.devices[report.rank], report.rank
        peaks[device_rank] = max(peaks.get(device_rank, 0), report.peak)
    peak: dict[str, int] = dict.fromkeys(plan.devices, 0)
    for (device, _), count in peaks.items():
        peak[device] += count
    busy = sum(report.seconds for report in reports)
    gain, gain_is = None, ""
    if plan.world_size > 1 and alone is not None:
        gain, gain_is = alone / times.seconds_a_step, "measured"
    elif plan.world_size > 1 and planned is not None and planned.choice.single.breakdown.fits_into(planned.memory):
        gain, gain_is = predicted_gain(planned.choice), "predicted"
    return Outcome(
        plan=describe(plan),
        why=planned.choice.why if planned else "",
        seconds=times.seconds,
        steps=times.steps,
        seconds_a_step=times.seconds_a_step,
        peak=peak,
        waiting=sum(report.waiting for report in reports) / busy if busy else 0.0,
        sent=sum(sum(report.sent.values()) for report in reports),
        gain=gain,
        gain_is=gain_is,
        warnings=[*(_slower_than_one(planned.choice) if planned else ()), *warnings],
        starting=times.starting,
        compiling=max(report.compiling for report in reports),
    )


def predicted_gain(choice: PlanChoice) -> float:
    """How many times as fast as one device the chosen plan should be."""
    (chosen,) = (entry for entry in choice.ranking if entry.plan == choice.plan)
    return choice.single.seconds / chosen.seconds


def in_words(result: Outcome) -> str:
    """A few sentences for the node, one a line."""
    pace = f", {result.seconds_a_step:.2f} s a step" if result.seconds_a_step else ""
    costs = [f"Peak {amount(max(result.peak.values()))} a device"]
    if result.sent:
        costs += [f"{100 * result.waiting:.0f} % of the time waiting", f"{amount(result.sent)} sent"]
    lines = [f"{result.seconds:.1f} s{pace} on {result.plan}.", f"{', '.join(costs)}."]
    if result.gain is not None:
        lines.insert(1, f"{result.gain:.2f}x as fast as one device ({result.gain_is}).")
    if result.starting >= 1:
        lines.append(f"{result.starting:.0f} s starting workers, once.")
    if result.compiling >= 1:
        lines.append(f"{result.compiling:.0f} s of it compiling blocks, once.")
    return "\n".join([*lines, *(f"⚠ {warning}" for warning in result.warnings)])


def amount(count: float) -> str:
    """Bytes in words with three digits, such as `6.13 GB`: as the tab has them (web/panel/units.js)."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def part_of(done: float, total: float) -> str:
    """Bytes of bytes in words, such as `6.1 of 23.8 GB`."""
    size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


def _slower_than_one(choice: PlanChoice) -> list[str]:
    if not choice.better_alone:
        return []
    device = choice.single.plan.devices[0].removeprefix("cuda:")
    return [f"One device alone would be faster for this job: choose devices {device} in Parallel Plan."]
