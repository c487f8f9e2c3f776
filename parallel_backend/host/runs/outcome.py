"""The outcome of a run, for the user who asked for it: as a record, and in a few lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...attention.kernels import describe
from ...plan.choose import PlanChoice
from ..planning.events import CostEvent, PlanEvent


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a run of one node.

    Attributes:
        why: the reason for the plan, by predicted times; empty if the plan was not chosen by them, and on the CPU.
        seconds: duration of the run, without `starting`.
        steps, seconds_a_step: 0 if there are no steps.
        peak: bytes at the peak, by device.
        waiting: part of all ranks' time in which they waited for other ranks.
        sent: bytes that the ranks sent.
        gain: factor by which the plan is faster than one device. None if one device cannot hold the job, if the plan has only
            one, or if a prediction would be for the CPU.
        gain_is: "measured" or "predicted"; empty if there is no gain.
        starting: seconds in which workers were started.
        compiling: seconds, within `seconds`, in which the slowest worker compiled blocks.
        alone: seconds a step of the run on one device that a measured gain compares with; 0 if there is none.
        alone_at: the end of that run in seconds since 1970.
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
    alone: float = 0.0
    alone_at: float = 0.0


@dataclass(frozen=True)
class RunTimes:
    """The times of a run.

    Attributes:
        seconds: duration of the run, without `starting`.
        starting: seconds in which workers were started.
        steps: 0 if there are none.
        seconds_a_step: seconds of a step once the run is going; 0 if there are no steps.
        alone: seconds a step of the same job's last run on one device; 0 if there is none.
        alone_at: the end of that run in seconds since 1970.
    """

    seconds: float
    starting: float = 0.0
    steps: int = 0
    seconds_a_step: float = 0.0
    alone: float = 0.0
    alone_at: float = 0.0


def outcome(
    ran: Sequence[CostEvent],
    planned: PlanEvent | None,
    times: RunTimes,
    warnings: Sequence[str] = (),
) -> Outcome:
    """Return the outcome of a run.

    Args:
        ran: the costs of the run's requests, at least one.
        planned: the choice of its plan, if the plan was chosen automatically.
        warnings: further warnings for the user.
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
    choice = planned.choice if planned is not None and plan.on_gpus else None
    gain, gain_is = None, ""
    compares = plan.world_size > 1 and times.alone > 0
    if compares:
        gain, gain_is = times.alone / times.seconds_a_step, "measured"
    elif plan.world_size > 1 and planned and choice and choice.single.breakdown.fits_into(planned.memory):
        gain, gain_is = predicted_gain(choice), "predicted"
    return Outcome(
        plan=describe(plan),
        why=choice.why if choice else "",
        seconds=times.seconds,
        steps=times.steps,
        seconds_a_step=times.seconds_a_step,
        peak=peak,
        waiting=sum(report.waiting for report in reports) / busy if busy else 0.0,
        sent=sum(sum(report.sent.values()) for report in reports),
        gain=gain,
        gain_is=gain_is,
        warnings=[*(_slower_than_one(choice) if choice else ()), *warnings],
        starting=times.starting,
        compiling=max(report.compiling for report in reports),
        alone=times.alone if compares else 0.0,
        alone_at=times.alone_at if compares else 0.0,
    )


def predicted_gain(choice: PlanChoice) -> float:
    """Return the factor by which the chosen plan should be faster than one device."""
    (chosen,) = (entry for entry in choice.ranking if entry.plan == choice.plan)
    return choice.single.seconds / chosen.seconds


def in_words(result: Outcome) -> str:
    """Return a few sentences for the node, each on a line."""
    pace = f", {result.seconds_a_step:.2f} s a step" if result.seconds_a_step else ""
    costs = [f"Peak {amount(max(result.peak.values()))} a device"]
    if result.sent:
        costs += [f"{100 * result.waiting:.0f} % of the time waiting", f"{amount(result.sent)} sent"]
    lines = [f"{result.seconds:.1f} s{pace} on {result.plan}.", f"{', '.join(costs)}."]
    if result.alone:
        paces = f"{result.seconds_a_step:.3g} s a step in this run, {result.alone:.3g} s on one device in the run of"
        lines.insert(1, f"{result.gain:.2f}x as fast as one device: {paces} {moment(result.alone_at)}.")
    elif result.gain is not None:
        lines.insert(1, f"{result.gain:.2f}x as fast as one device ({result.gain_is}).")
    if result.starting >= 1:
        lines.append(f"Starting the workers took {result.starting:.0f} s more, once.")
    if result.compiling >= 1:
        lines.append(f"Compiling the blocks took {result.compiling:.0f} s of the run, once.")
    return "\n".join([*lines, *(f"⚠ {warning}" for warning in result.warnings)])


def amount(count: float) -> str:
    """Return bytes in words with three digits, such as `6.13 GB`, as the tab writes them (web/panel/units.js)."""
    units = iter(("B", "kB", "MB", "GB", "TB"))
    unit = next(units)
    while count >= 999.5 and unit != "TB":
        count, unit = count / 1000, next(units)
    digits = 0 if unit == "B" or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"


def moment(seconds: float) -> str:
    """Return a time in seconds since 1970 as this machine's clock shows it: `14:03`, after the date if that is not today's."""
    then = time.localtime(seconds)
    return time.strftime("%H:%M" if then[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", then)


def part_of(done: float, total: float) -> str:
    """Return a part of some bytes in words, such as `6.1 of 23.8 GB`."""
    size, unit = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


def _slower_than_one(choice: PlanChoice) -> list[str]:
    if not choice.better_alone:
        return []
    device = choice.single.plan.devices[0].removeprefix("cuda:")
    return [f"One device alone would be faster for this job: choose devices {device} in Parallel Plan."]
