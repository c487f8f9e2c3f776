"""The expected speed and memory of a job, before any worker runs.

The prediction uses earlier measurements of this machine, or the known speeds of its cards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...plan import ResolvedPlan, feasible
from ...plan.choose import best, streamed
from ...plan.predict.cards import card_of
from ...plan.predict.known_machines import profile
from ...plan.predict.measure import Machine, kept, machine_key, measured_profile
from ...plan.predict.profiles import Profile
from ..planning.devices import DeviceMemory
from ..planning.planner import GIGABYTE, PlanRequest
from .outcome import amount, predicted_gain


@dataclass(frozen=True)
class Expected:
    """The devices that will work, their gain over one device, and the bytes that each needs.

    Attributes:
        gain: the least and the greatest factor by which the plan may be faster than one device. None if nothing is known to
            predict it by, if one device cannot hold the job, or on the CPU.
        memory: bytes that each device needs.
    """

    devices: tuple[str, ...]
    gain: tuple[float, float] | None
    memory: float

    def or_else(self, alternative: Expected) -> Expected:
        """Combine the expectations of two jobs, either of which may run: the range of both gains, and the larger memory."""
        gains = (*(self.gain or ()), *(alternative.gain or ()))
        gain = (min(gains), max(gains)) if self.gain and alternative.gain else None
        return Expected(self.devices, gain, max(self.memory, alternative.memory))


def expect(
    question: PlanRequest, devices: Sequence[DeviceMemory], measured: Callable[[ResolvedPlan], Machine | None]
) -> Expected:
    """Predict the devices, the gain and the memory of a run.

    Args:
        devices: this machine's devices, with the memory that is free now.
        measured: returns the earlier measurements of a plan's devices, or None if there are none.

    Raises:
        Refused: no plan can work with the memory that is free now.
    """
    requested_plan, shape, job = question.requested_plan, question.shape, question.job
    candidates = feasible(requested_plan, question.gpus, shape.limits, question.workload)
    used = candidates[0].devices
    if shape.unsharded:  # only a measurement tells the time of a forward
        return Expected(used, None, job.weight_element * shape.parameters)
    here = {memory_of_device.device: memory_of_device for memory_of_device in devices}
    memory = tuple((here[device].free or here[device].total) / used.count(device) for device in used)
    if requested_plan.memory_limit:
        allowed = (requested_plan.memory_limit * GIGABYTE / used.count(device) for device in used)
        memory = tuple(map(min, memory, allowed))
    known = _profile(measured(candidates[0]), used, here[used[0]].name, memory)
    approximate = requested_plan.pipefusion != 1 or requested_plan.patches > 1
    machine = known or replace(profile("4090"), free=memory)
    choice = best(candidates, shape, job, machine, approximate=approximate, fallback=streamed(candidates))
    (chosen,) = (entry for entry in choice.ranking if entry.plan == choice.plan)
    alone = choice.single.breakdown.fits_into(memory)
    shown = known is not None and choice.plan.on_gpus
    gain = (predicted_gain(choice),) * 2 if shown and alone and choice.plan.world_size > 1 else None
    return Expected(choice.plan.devices, gain, chosen.breakdown.memory)


def in_words(expected: Expected, *, brief: bool = False) -> str:
    """Return the expectation in a line that fits on the loader. A brief line has no memory if it has a gain."""
    count, kind = len(expected.devices), "GPU" if expected.devices[0].startswith("cuda") else "worker"
    need = amount(expected.memory)
    if brief and expected.gain:
        return f"{count} {kind}s: {_times(*expected.gain)}"
    gain = f"{_times(*expected.gain)}, " if expected.gain else ""
    return f"{count} {kind}s: {gain}{need} each" if count > 1 else f"1 {kind}: {need}"


def _times(least: float, most: float) -> str:
    low, high = f"{least:.1f}x", f"{most:.1f}x"
    return f"about {high}" if low == high else f"{low} to {high}"


def measured_before(plan: ResolvedPlan) -> Machine | None:
    """Return the measurements of a plan's devices that were kept when they were first needed, or None."""
    return kept(machine_key(plan.devices, plan.attention), Machine)


def _profile(machine: Machine | None, devices: Sequence[str], name: str, memory: tuple[float, ...]) -> Profile | None:
    on_gpus = devices[0].startswith("cuda")
    if machine is not None:
        return measured_profile(machine, memory, on_gpus)
    card = card_of(name) if on_gpus else None
    return None if card is None else replace(profile(card), free=memory)
