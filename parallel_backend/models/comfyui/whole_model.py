"""A model of ComfyUI's that a rank runs whole, with ComfyUI's own code around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...conditioning import (
    ALONE,
    ATTENTION_GUIDANCE,
    ATTENTION_OVERRIDE,
    CONSTANTS,
    FREE_U,
    OPTIONS,
    POSE_CACHE,
    SHAPES,
    SIDES,
    SIGMAS,
    SKIPPED_BLOCKS,
    TOGETHER,
    arguments,
)
from ...snapshot import StateLeak
from ..family import Execution
from ..inputs import Inputs
from ..region import Region
from ..sequence_parallel.compiled import OVERRIDE
from .features.attention_guidance import guided_whole
from .features.attention_override import override_in
from .features.free_u import free_u_patches
from .features.pose_cache import OPTION, PoseCaches
from .features.skipped_blocks import REPLACED, replacements
from .model_run import ModelRun, end_run
from .rows import CONTROL

NOT_COMPILED = "this model is not compiled: it runs whole, and blocks alone are compiled."


class WholeModel:
    """ComfyUI's diffusion model as it is.

    Args:
        base: ComfyUI's BaseModel on the meta device.
    """

    def __init__(self, base: Any) -> None:
        self.module: nn.Module = base.diffusion_model
        self.block_modules: Sequence[nn.Module] = ()
        self.features = 0
        self.unknown: Sequence[str] = ()
        self.state_leak = StateLeak(self.module)
        self._base = base

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """The whole latent, as the only patch."""
        assert count == 1, "plans refuse patches"
        return (Region(2, slice(0, latent_shape[2])),)

    def forward_on(self, execution: Execution) -> WholeForward:
        """Its forward, which is the same on every rank."""
        return WholeForward(self, execution)

    def run_on(self, device: torch.device) -> ModelRun:
        """Tell ComfyUI's BaseModel that a run begins, after removing the attributes that the last run left on modules."""
        end_run(self._base)
        self.state_leak.restore()
        return ModelRun(self._base, self.module, device)

    def compute(self, latent: Tensor, inputs: Inputs, poses: PoseCaches | None = None) -> Tensor:
        """What ComfyUI's BaseModel does around its diffusion model, whose output this is; `poses` are kept from call to call."""
        import comfy.utils

        kwargs = arguments(inputs.conditioning, inputs.values)
        kwargs |= kwargs.pop(CONSTANTS, {})
        kwargs = {name: value for name, value in kwargs.items() if name not in (TOGETHER, ALONE)}
        concat, context = kwargs.pop("concat", None), kwargs.pop("context", None)
        options: dict[str, Any] = kwargs.pop(OPTIONS, {})
        options.pop(ATTENTION_OVERRIDE, None)
        if override := override_in(inputs.values):
            options[OVERRIDE] = override(slice(None), 0)
        sigmas = inputs.sigmas or (options.get(name, [float(number)]) for number, name in enumerate(SIGMAS))
        options |= {name: torch.as_tensor(each, dtype=torch.float32) for name, each in zip(SIGMAS, sigmas, strict=True)}
        options.setdefault(SIDES, list(inputs.branches) or [0])  # an example is of one side
        timestep, control = kwargs.pop("timestep", inputs.timestep), kwargs.pop(CONTROL, None)
        if SKIPPED_BLOCKS in options:
            options[REPLACED] = replacements(options.pop(SKIPPED_BLOCKS))
        if POSE_CACHE in options:
            options[OPTION] = (poses or PoseCaches()).whole(options.pop(POSE_CACHE), latent.device)
        patches = free_u_patches(options.pop(FREE_U)) if FREE_U in options else {}
        if ATTENTION_GUIDANCE in options:
            patches |= guided_whole(options.pop(ATTENTION_GUIDANCE))
        if patches:
            options["patches"] = patches
        if not inputs.processed:
            timestep = self._base.process_timestep(timestep, x=latent, **kwargs)
        x: Any = latent if concat is None else torch.cat([latent, concat], dim=1)
        if SHAPES in kwargs:
            x = comfy.utils.unpack_latents(x, kwargs.pop(SHAPES))
        text = None if context is None else context.clone()  # as ComfyUI gives it: a model may write into it
        out = self.module(x, timestep, context=text, control=control, transformer_options=options, **kwargs)
        return out if isinstance(out, Tensor) else comfy.utils.pack_latents(out)[0]


class WholeForward:
    """A WholeModel's forward, the same on every rank; it finds nothing on the modules that the request before has left there."""

    cache_bytes = 0

    def __init__(self, model: WholeModel, execution: Execution) -> None:
        self._model = model
        self._on_progress = execution.on_progress
        self._compiles = bool(execution.compiler)
        self._first = True
        self._poses = PoseCaches()
        self._run = model.run_on(execution.mesh.sequence.device)

    def uncompiled(self) -> tuple[str, ...]:
        """That nothing was, if it was asked for."""
        return (NOT_COMPILED,) if self._compiles else ()

    def compiling(self) -> float:
        """No time."""
        return 0.0

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """The output for the whole latent."""
        assert latent is not None and patch is None, "there is one stage and one patch"
        before = self._model.state_leak.state() if self._first else None
        out = self._model.compute(latent, inputs, self._poses)
        if before is not None:
            self._model.state_leak.find(before)
        self._first = False
        self._on_progress()
        return out
