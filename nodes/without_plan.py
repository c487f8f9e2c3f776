"""What a loader does without a Parallel Plan: the devices and the preset that the user set under Parallel in ComfyUI's settings.

The page fills these inputs in when a graph is queued or exported, so that a prompt says by itself what it runs on, and another
setting makes another MODEL of the same loader. They are not shown on the node.
"""

from __future__ import annotations

import torch
from comfy_api.latest import io

from ..parallel_backend.errors import PlanRefused
from ..parallel_backend.host import Backend
from ..parallel_backend.plan import ParallelPlan
from ..parallel_backend.plan.devices import named_devices
from ..parallel_backend.plan.plan import AUTOMATIC, SMALLEST, with_preset

PRESETS = (AUTOMATIC, SMALLEST)
"""The presets whose picture is the one that a single GPU draws."""

UNSEEN = {"hidden": True}

DEVICES = ParallelPlan().devices


def devices_input() -> io.String.Input:
    """Which devices work; it comes behind all that is shown."""
    return io.String.Input(
        "devices",
        optional=True,
        default=DEVICES,
        socketless=True,
        extra_dict=UNSEEN,
        tooltip="Which devices work where no plan is connected; the page writes here what Settings > Parallel says.",
    )


def preset_input() -> io.Combo.Input:
    """What is chosen for them; it comes last."""
    return io.Combo.Input(
        "preset",
        options=list(PRESETS),
        optional=True,
        default=AUTOMATIC,
        socketless=True,
        extra_dict=UNSEEN,
        tooltip="What is chosen where no plan is connected; the page writes here what Settings > Parallel says.",
    )


def plan_of(backend: Backend, plan: ParallelPlan | None, devices: str, preset: str = AUTOMATIC) -> ParallelPlan:
    """The plan that is connected, or the one of the settings.

    Raises:
        Refused: the settings name devices that are not there.
    """
    if plan is not None:
        return plan
    requested_plan = with_preset(preset, ParallelPlan(devices=devices))
    try:
        named_devices(backend.placed_on_devices(requested_plan).devices, torch.cuda.device_count())
    except PlanRefused as refusal:
        raise PlanRefused(f"{refusal} There is no Parallel Plan: devices are those of Settings > Parallel.") from None
    return requested_plan
