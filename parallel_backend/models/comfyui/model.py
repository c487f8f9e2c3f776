"""A ComfyUI model in a worker: one pipeline stage whose blocks are parallelised over ranks, or the whole model, unsharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...conditioning import (
    ALONE,
    BRANCHES,
    CONSTANTS,
    OPTIONS,
    SHAPES,
    SIGMAS,
    TEXT_PREPARATION,
    TOGETHER,
    arguments,
    picture_shape,
)
from ...declaration import Declaration
from ...diffusion import Value
from ...plan import ResolvedPlan
from ...snapshot import StateLeak
from ..family import Conditioning, Execution, Stage
from ..inputs import Inputs, Region
from ..sequence_parallel.blocks import ParallelModel, blocks_of, control_blocks
from ..sequence_parallel.picture import Picture, as_patch_size
from ..sequence_parallel.placement import Placement
from ..sequence_parallel.run import ParallelForward
from ..sequence_parallel.stream import Stream
from .features.compile import COMPILED
from .features.feature import RankFeatureCall, add_patches, apply
from .features.feature_list import FEATURES
from .features.networks import NetworkCall, patches_of
from .features.node_functions import override_in
from .features.text import PreparedTexts
from .model_run import ModelRun, end_run
from .plan_shape import reference_tokens
from .rows import CONTROL
from .timestep_numbers import TimestepNumbers

PICTURE_ENDS = 2
"""The number of a latent's dimensions before frames, height and width."""

AROUND = ("context", "control", "transformer_options")
"""The keywords of a model's forward that ComfyUI's process_timestep does not get."""

NOT_COMPILED = "this model is not compiled: each GPU runs it unsharded, and only parallelised blocks are compiled."


class ComfyModel:
    """ComfyUI's diffusion model with its blocks parallelised over ranks, and ComfyUI's own code around it.

    Args:
        base: ComfyUI's BaseModel on the meta device.
        declaration: the token positions of the model.
        stage: the units of blocks that this rank holds.

    Attributes:
        features: the number of features of a token.
    """

    def __init__(self, base: Any, declaration: Declaration, stage: Stage) -> None:
        self.module: nn.Module = base.diffusion_model
        heads, head_dim = declaration.attention_heads(self.module)
        self.features = heads * head_dim
        self._control = control_blocks(blocks_of(self.module, declaration), declaration)
        self._base = base
        self._asks_sigmas = declaration.sigmas(self.module)
        self._patch_size = declaration.patch_size(self.module)
        self._concatenated_name = declaration.concatenated_latent
        self._pipefusion_options = declaration.pipefusion_options
        self._numbers = TimestepNumbers(self.module)
        self._blocks = ParallelModel(self.module, declaration, stage, COMPILED)
        self.block_modules: Sequence[nn.Module] = self._blocks.blocks
        self.unknown: Sequence[str] = self._blocks.unknown

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """Return each patch's region of the latent. A video packed with its sound is one patch."""
        if count == 1:
            return (Region(PICTURE_ENDS, slice(0, latent_shape[PICTURE_ENDS])),)
        return self.picture(latent_shape, {}, {}).regions(count)

    def picture(self, latent_shape: Sequence[int], conditioning: Conditioning, values: Mapping[str, Value]) -> Picture:
        """Return the tokens of a latent, and of the latent that the model concatenates to it in width, if there is one."""
        shape = picture_shape(latent_shape, values)
        picture = Picture(shape, as_patch_size(self._patch_size, len(shape) - PICTURE_ENDS))
        return picture.with_concatenated(conditioning.get(self._concatenated_name))

    def forward_on(self, execution: Execution) -> ComfyForward:
        """Return the forward of this stage under a plan."""
        return ComfyForward(self, self._blocks, execution)

    def run_on(self, device: torch.device) -> ModelRun:
        """Tell ComfyUI's BaseModel that a run begins on this rank's device."""
        return ModelRun(self._base, self._blocks.entered, device)

    def options_under(self, plan: ResolvedPlan) -> Mapping[str, object]:
        """Return the transformer options that replace a request's under a plan."""
        return self._pipefusion_options if plan.uses_pipefusion else {}

    def compute(
        self,
        latent: Tensor,
        inputs: Inputs,
        options: Mapping[str, Any],
        picture_tokens: Placement | None,
        networks: Sequence[NetworkCall],
        fixed_options: Mapping[str, object],
        run_state: MutableMapping[type, Any],
    ) -> Tensor:
        """Compute the model's output on this rank, with ComfyUI's code around the model.

        Args:
            latent: the model's input, in the compute dtype.
            options: the transformer options of the forward.
            picture_tokens: the placement of the latent tokens that the residuals are added to; None without residuals.
            networks: the networks that run next to the blocks.
            fixed_options: transformer options that replace the request's.
            run_state: the objects that features keep from call to call of the run, by their classes.
        """
        kwargs = arguments(inputs.conditioning, inputs.values)
        context, more = kwargs.pop("context", None), kwargs.pop(OPTIONS, {})
        forward = self._blocks.now
        call = RankFeatureCall(inputs, latent.device, run_state, forward, self._blocks.of_some_heads)
        add_patches(more, patches_of(networks, forward.call))
        if apply(FEATURES, more, call) or self._asks_sigmas or networks:
            more |= _sigmas(inputs, more)
        text_preparation = kwargs.pop(TEXT_PREPARATION, None)
        if context is not None:  # a copy, as in ComfyUI: SD 3's context processor writes into it
            context = (
                call.of_run(PreparedTexts).prepared(inputs.key, self.module, context, text_preparation)
                if text_preparation
                else context.clone()
            )
        control = None if picture_tokens is None else self._control_of(inputs.residuals, picture_tokens)
        kwargs |= {"context": context, "control": control, "transformer_options": {**options, **more, **fixed_options}}
        with self._numbers.in_use():
            return _call(self._base, self._blocks.entrance, latent, inputs, kwargs)

    def _control_of(self, residuals: Mapping[int, Tensor], placement: Placement) -> dict[str, list[Stream | None]]:
        """Return the residuals in the form of a ControlNet's output, with None for blocks of other stages."""
        call = self._blocks.now.call
        streams = {block: Stream(local, placement, 1, call) for block, local in residuals.items()}
        return {kind: [streams.get(block) for block in blocks] for kind, blocks in self._control.items()}


class UnshardedModel:
    """ComfyUI's diffusion model, unsharded and the same on every rank, and ComfyUI's own code around it.

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
        """Return the whole latent as the only patch."""
        assert count == 1, "plans refuse patches"
        return (Region(PICTURE_ENDS, slice(0, latent_shape[PICTURE_ENDS])),)

    def forward_on(self, execution: Execution) -> UnshardedForward:
        """Return the model's forward, which is the same on every rank."""
        return UnshardedForward(self, execution)

    def run_on(self, device: torch.device) -> ModelRun:
        """Tell ComfyUI's BaseModel that a run begins, after removing the attributes that the last run left on modules."""
        end_run(self._base)
        self.state_leak.restore()
        return ModelRun(self._base, self.module, device)

    def compute(self, latent: Tensor, inputs: Inputs, run_state: MutableMapping[type, Any]) -> Tensor:
        """Compute the model's output, with ComfyUI's code around the model.

        Args:
            latent: the model's input, in the compute dtype.
            run_state: the objects that features keep from call to call of the run, by their classes.
        """
        kwargs = arguments(inputs.conditioning, inputs.values)
        kwargs |= kwargs.pop(CONSTANTS, {})
        kwargs = {name: value for name, value in kwargs.items() if name not in (TOGETHER, ALONE)}
        context, options = kwargs.pop("context", None), kwargs.pop(OPTIONS, {})
        options |= _sigmas(inputs, options)
        options.setdefault(BRANCHES, list(inputs.branches) or [0])  # an example has one branch
        apply(FEATURES, options, RankFeatureCall(inputs, latent.device, run_state))
        text = None if context is None else context.clone()  # a copy, as in ComfyUI: a model may write into it
        kwargs |= {"context": text, "control": kwargs.pop(CONTROL, None), "transformer_options": options}
        return _call(self._base, self.module, latent, inputs, kwargs)


def _call(base: Any, forward: Callable[..., Any], latent: Tensor, inputs: Inputs, kwargs: dict[str, Any]) -> Tensor:
    """Call a diffusion model as ComfyUI's BaseModel does.

    Args:
        base: the BaseModel, which converts the timestep.
        latent: the model's input, in the compute dtype.
        kwargs: the keywords of the forward. Besides, `concat` has the channels to concatenate to the latent, `timestep` may
            replace that of `inputs`, and there may be the shapes of packed latents.
    """
    import comfy.utils

    concat, timestep = kwargs.pop("concat", None), kwargs.pop("timestep", inputs.timestep)
    if not inputs.processed:
        conditioning = {name: value for name, value in kwargs.items() if name not in AROUND}
        timestep = base.process_timestep(timestep, x=latent, **conditioning)
    x: Any = latent if concat is None else torch.cat([latent, concat], dim=1)
    if SHAPES in kwargs:
        x = comfy.utils.unpack_latents(x, kwargs.pop(SHAPES))
    out = forward(x, timestep, **kwargs)
    return out if isinstance(out, Tensor) else comfy.utils.pack_latents(out)[0]


def _sigmas(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the sigmas as ComfyUI's transformer options have them.

    They come from the run, or as numbers with the call. A call outside of a run has the placeholders 0 and 1.
    """
    sigmas = inputs.sigmas or (options.get(name, [float(number)]) for number, name in enumerate(SIGMAS))
    return {name: torch.as_tensor(value, dtype=torch.float32) for name, value in zip(SIGMAS, sigmas, strict=True)}


class ComfyForward(ParallelForward):
    """The forward of a ComfyModel's stage.

    Attributes:
        networks: the networks that run next to the model's blocks.
    """

    def __init__(self, model: ComfyModel, blocks: ParallelModel, execution: Execution) -> None:
        super().__init__(blocks, execution, blocks.compiled_by(execution.compiler))
        self.networks: Sequence[NetworkCall] = ()
        self._model = model
        self._run = model.run_on(execution.mesh.sequence.device)
        self._fixed_options = model.options_under(execution.plan)
        self._run_state: dict[type, Any] = {}

    def picture_tokens(
        self, latent_shape: Sequence[int], conditioning: Conditioning, values: Mapping[str, Value]
    ) -> Placement:
        """Return the placement of the latent tokens that a ControlNet's output is added to."""
        picture = self._model.picture(latent_shape, conditioning, values)
        return self.tokens_of(picture, reference_tokens(conditioning, picture.patch_size))

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """Run this stage. Return the output for the whole latent or for the patch, or None if the stage is not the last."""
        self.override = override_in(inputs.values)
        controlled = None
        if inputs.residuals:
            controlled = self.picture_tokens(inputs.shape, inputs.conditioning, inputs.values)
        return self.run(
            inputs,
            self._model.picture(inputs.shape, inputs.conditioning, inputs.values),
            latent,
            patch,
            lambda x, options: self._model.compute(
                x, inputs, options, controlled, self.networks, self._fixed_options, self._run_state
            ),
        )


class UnshardedForward:
    """The forward of an UnshardedModel. State that a run leaves on the modules is removed before the next run."""

    cache_bytes = 0

    def __init__(self, model: UnshardedModel, execution: Execution) -> None:
        self._model = model
        self._on_progress = execution.on_progress
        self._compiles = bool(execution.compiler)
        self._first = True
        self._run_state: dict[type, Any] = {}
        self._run = model.run_on(execution.mesh.sequence.device)

    def uncompiled(self) -> tuple[str, ...]:
        """Return a sentence that the model is not compiled, if the plan compiles."""
        return (NOT_COMPILED,) if self._compiles else ()

    def compiling(self) -> float:
        """Return 0, because an unsharded model is not compiled."""
        return 0.0

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """Return the output for the whole latent."""
        assert latent is not None and patch is None, "there is one stage and one patch"
        before = self._model.state_leak.state() if self._first else None
        out = self._model.compute(latent, inputs, self._run_state)
        if before is not None:
            self._model.state_leak.find(before)
        self._first = False
        self._on_progress()
        return out
