"""ComfyConfig: a file's model as ComfyUI detects it, with what plans, checks and building need to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...declaration import Declaration
from ...plan import ModelShape
from ...weights.files.checkpoint import Checkpoint, TensorEntry
from ...weights.files.keymap import KeyMap
from .meta_model import make_model

SEQUENCES = frozenset({"TripoSplat"})
"""Classes whose latents are `[batch, tokens, channels]`."""

VOXELS = frozenset({"Trellis2"})
"""Classes whose latents are a cube of voxels, or the list of some, whose third dimension is of size 1."""


@dataclass(frozen=True)
class ComfyConfig:
    """A model as ComfyUI detects it.

    Attributes:
        kind: the name of its class in comfy.supported_models.
        described: an instance of that class.
        declaration: how its forward is split over ranks; None for a model that runs unsharded.
        base_model: ComfyUI's BaseModel on the meta device: read for sizes and memory, never run.
        tensors: the file's, on the meta device.
        entries: where those of the tensors lie whose values its class may read.
        part: the model's own tensors in the file.
        quantisation: of each quantised layer the file's tensor `comfy_quant`.
        shape: what plans go by.
        keys: of what ranks hold.
        names: of the whole weights that adapters change.
        exact: the parameters that ComfyUI's class makes fp32 whatever type is chosen.
        latent_channels: those of the latent to sample.
        patch_size: latent values that are one token, (frames,) height and width; ones without a declaration.
        sigmas: whether it reads the sigmas of the call and of the run.
        concat_channels: those that ComfyUI's class concatenates to the latent.
        text_widths: the widths that text may have.
        pooled_width: the least width of pooled text.
        sound: the shape of the sound beside a video; see Declaration.
        control: after which blocks each of a ControlNet's lists is added.
        methods: the ways to lay out references that it supports; all if empty.
        two_of_each: drops all blocks but two of each kind, for timing.
    """

    kind: str
    described: Any
    declaration: Declaration | None
    base_model: Any
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    part: Checkpoint
    quantisation: Mapping[str, Tensor]
    shape: ModelShape
    keys: KeyMap
    names: KeyMap
    exact: frozenset[str]
    latent_channels: int
    patch_size: tuple[int, ...]
    sigmas: bool = True
    concat_channels: int = 0
    text_widths: tuple[int, ...] = ()
    pooled_width: int = 0
    sound: tuple[int | None, ...] = ()
    control: Mapping[str, range] = field(default_factory=dict)
    methods: Sequence[str] = ()
    two_of_each: bool = False

    @property
    def latent_dims(self) -> int:
        """Dimensions of a latent behind its batch and its channels."""
        return len(self.patch_size)

    def base(self, dtype: torch.dtype) -> Any:
        """Make ComfyUI's BaseModel once more on the meta device, its weights of a type."""
        return make_model(self.described, self.tensors, dtype, self.entries)
