"""One stage of a model of ComfyUI's in a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...conditioning import (
    ATTENTION_GUIDANCE,
    ATTENTION_OVERRIDE,
    BLOCK_ATTENTION,
    OPTIONS,
    POSE_CACHE,
    SHAPES,
    SIGMAS,
    SKIPPED_BLOCKS,
    TEXT_PREPARATION,
    arguments,
    picture_shape,
)
from ...declaration import Declaration
from ...diffusion import Value
from ...plan import ResolvedPlan
from ..family import Conditioning, Execution, Stage
from ..inputs import Inputs
from ..region import Region
from ..sequence_parallel.blocks import ParallelModel, blocks_of, control_blocks
from ..sequence_parallel.picture import Picture, as_patch_size
from ..sequence_parallel.placement import Placement
from ..sequence_parallel.run import ParallelForward
from ..sequence_parallel.stream import Stream
from .features.block_attention import BlockAttention
from .features.compile import COMPILED
from .features.networks import NetworkCall, patches_of
from .features.node_functions import REPLACED, guided, override_in, replacements
from .features.pose_cache import OPTION, PoseCaches
from .features.text import PreparedTexts
from .latents import reference_tokens
from .model_run import ModelRun
from .timestep_numbers import TimestepNumbers

PROMPTS = "uuids"
"""ComfyUI's name among these options of what tells a call's prompts apart."""

PICTURE_ENDS = 2
"""Dimensions of a latent before those of the picture."""


class ComfyModel:
    """ComfyUI's diffusion model, its blocks spread; ComfyUI's own code around it.

    Args:
        base: ComfyUI's BaseModel on the meta device.
        stage: the units of blocks that this rank holds.

    Attributes:
        features: the width of a token.
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
        self._spread = ParallelModel(self.module, declaration, stage, COMPILED)
        self.block_modules: Sequence[nn.Module] = self._spread.blocks
        self.unknown: Sequence[str] = self._spread.unknown

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """The latent's part of each patch. A video packed with its sound is one patch."""
        if count == 1:
            return (Region(PICTURE_ENDS, slice(0, latent_shape[PICTURE_ENDS])),)
        return self.picture(latent_shape, {}, {}).regions(count)

    def picture(self, latent_shape: Sequence[int], conditioning: Conditioning, values: Mapping[str, Value]) -> Picture:
        """The tokens of a latent, and of one that the model lays beside it."""
        shape = picture_shape(latent_shape, values)
        picture = Picture(shape, as_patch_size(self._patch_size, len(shape) - PICTURE_ENDS))
        return picture.with_concatenated(conditioning.get(self._concatenated_name))

    def forward_on(self, execution: Execution) -> ComfyForward:
        """The forward of this stage under a plan."""
        return ComfyForward(self, self._spread, execution)

    def run_on(self, device: torch.device) -> ModelRun:
        """Tell ComfyUI's BaseModel that a run begins on this rank's device."""
        return ModelRun(self._base, self._spread.entered, device)

    def options_under(self, plan: ResolvedPlan) -> Mapping[str, object]:
        """Return the transformer options that take the place of a request's under a plan."""
        return self._pipefusion_options if plan.uses_pipefusion else {}

    def compute(
        self,
        latent: Tensor,
        inputs: Inputs,
        options: Mapping[str, Any],
        texts: PreparedTexts,
        picture_tokens: Placement | None,
        poses: PoseCaches,
        block_attention: BlockAttention,
        networks: Sequence[NetworkCall],
        fixed_options: Mapping[str, object],
    ) -> Tensor:
        """What ComfyUI's BaseModel does around its diffusion model, whose output this is.

        Args:
            latent: as the model is to see it, in the compute dtype.
            texts: what the model has made of texts beforehand.
            picture_tokens: where those of the residuals are, if there are any.
            poses: what the run has kept of them.
            handed: what the run's nodes put in blocks' place.
            networks: those that run beside the blocks.
            fixed_options: transformer options that take the place of the request's.
        """
        import comfy.utils

        kwargs = arguments(inputs.conditioning, inputs.values)
        concat, context = kwargs.pop("concat", None), kwargs.pop("context", None)
        more = kwargs.pop(OPTIONS, {})
        if SKIPPED_BLOCKS in more:
            more[REPLACED] = replacements(more.pop(SKIPPED_BLOCKS))
        if POSE_CACHE in more:
            more[OPTION] = poses.of_this_rank(more.pop(POSE_CACHE), self._spread.now.call)
        overridden = more.pop(ATTENTION_OVERRIDE, None) is not None
        replacing = more.pop(BLOCK_ATTENTION, None)
        if replacing is not None:
            more[REPLACED] = block_attention.replacements(replacing, self._spread.of_some_heads)
            more[PROMPTS] = [inputs.key]
        if self._asks_sigmas or networks or overridden or replacing is not None:
            more |= _sigmas(inputs, more)
        patches = patches_of(networks, self._spread.now.call)
        if ATTENTION_GUIDANCE in more:
            patches |= guided(more.pop(ATTENTION_GUIDANCE), self._spread.now)
        if patches:
            more["patches"] = patches
        text_preparation = kwargs.pop(TEXT_PREPARATION, None)
        if context is not None:  # a copy, as ComfyUI gives: SD 3's context processor writes into it
            context = (
                texts.prepared(inputs.key, self.module, context, text_preparation)
                if text_preparation
                else context.clone()
            )
        if picture_tokens is not None:
            kwargs["control"] = self._control_of(inputs.residuals, picture_tokens)
        timestep = kwargs.pop("timestep", inputs.timestep)
        if not inputs.processed:
            timestep = self._base.process_timestep(timestep, x=latent, **kwargs)
        x: Any = latent if concat is None else torch.cat([latent, concat], dim=1)
        if SHAPES in kwargs:
            x = comfy.utils.unpack_latents(x, kwargs.pop(SHAPES))
        with self._numbers.in_use():
            all_options = {**options, **more, **fixed_options}
            out = self._spread.entrance(x, timestep, context=context, transformer_options=all_options, **kwargs)
        return out if isinstance(out, Tensor) else comfy.utils.pack_latents(out)[0]

    def _control_of(self, residuals: Mapping[int, Tensor], placement: Placement) -> dict[str, list[Stream | None]]:
        """As a ControlNet gives it; nothing for blocks of other stages."""
        call = self._spread.now.call
        streams = {block: Stream(local, placement, 1, call) for block, local in residuals.items()}
        return {kind: [streams.get(block) for block in blocks] for kind, blocks in self._control.items()}


def _sigmas(inputs: Inputs, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """As ComfyUI has them among its options: from the run, or as numbers with the call, or of no run."""
    sigmas = inputs.sigmas or (options.get(name, [float(number)]) for number, name in enumerate(SIGMAS))
    return {name: torch.as_tensor(value, dtype=torch.float32) for name, value in zip(SIGMAS, sigmas, strict=True)}


class ComfyForward(ParallelForward):
    """Runs a ComfyModel's stage.

    Attributes:
        networks: those that run beside the model's blocks.
    """

    def __init__(self, model: ComfyModel, blocks: ParallelModel, execution: Execution) -> None:
        super().__init__(blocks, execution, blocks.compiled_by(execution.compiler))
        self.networks: Sequence[NetworkCall] = ()
        self._model = model
        self._run = model.run_on(execution.mesh.sequence.device)
        self._fixed_options = model.options_under(execution.plan)
        self._texts = PreparedTexts()
        self._poses = PoseCaches()
        self._block_attention = BlockAttention()

    def picture_tokens(
        self, latent_shape: Sequence[int], conditioning: Conditioning, values: Mapping[str, Value]
    ) -> Placement:
        """Where the tokens of the picture are that a ControlNet's output is added to."""
        picture = self._model.picture(latent_shape, conditioning, values)
        return self.tokens_of(picture, reference_tokens(conditioning, picture.patch_size))

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others."""
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
                x,
                inputs,
                options,
                self._texts,
                controlled,
                self._poses,
                self._block_attention,
                self.networks,
                self._fixed_options,
            ),
        )
