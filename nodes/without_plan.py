"""The inputs of a loader without a Parallel Plan: devices and preset, as set under Parallel in ComfyUI's settings.

The page fills in these inputs when a graph is queued or exported, so that a prompt says by itself which devices it uses. After
a change of the settings the same loader makes another MODEL. The node does not show these inputs.
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
"""Presets that give the same picture as a single GPU."""

UNSEEN = {"hidden": True}

DEVICES = ParallelPlan().devices


def devices_input() -> io.String.Input:
    """Return the input for the devices. The loaders put it after all visible inputs."""
    return io.String.Input(
        "devices",
        optional=True,
        default=DEVICES,
        socketless=True,
        extra_dict=UNSEEN,
        tooltip="The devices to use if no plan is connected. The page fills them in from Settings > Parallel.",
    )


def preset_input() -> io.Combo.Input:
    """Return the input for the preset. The loaders put it last."""
    return io.Combo.Input(
        "preset",
        options=list(PRESETS),
        optional=True,
        default=AUTOMATIC,
        socketless=True,
        extra_dict=UNSEEN,
        tooltip="The preset to use if no plan is connected. The page fills it in from Settings > Parallel.",
    )


def plan_of(backend: Backend, plan: ParallelPlan | None, devices: str, preset: str = AUTOMATIC) -> ParallelPlan:
    """Return the connected plan, or else the plan of the settings.

    Raises:
        Refused: the settings name devices that do not exist.
    """
    if plan is not None:
        return plan
    requested_plan = with_preset(preset, ParallelPlan(devices=devices))
    try:
        named_devices(backend.placed_on_devices(requested_plan).devices, torch.cuda.device_count())
    except PlanRefused as refusal:
        raise PlanRefused(f"{refusal} There is no Parallel Plan: devices are those of Settings > Parallel.") from None
    return requested_plan
