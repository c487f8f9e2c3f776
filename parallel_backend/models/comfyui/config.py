"""The configuration of a file's model as ComfyUI detects it, for plans, input checks and building."""

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
"""Classes whose latents are a cube of voxels, or a list of voxels with a third dimension of size 1."""


@dataclass(frozen=True)
class ComfyConfig:
    """A model as ComfyUI detects it.

    Attributes:
        kind: the name of its class in comfy.supported_models.
        described: an instance of that class.
        declaration: the token positions of its forward; None for a model that runs unsharded.
        base_model: ComfyUI's BaseModel on the meta device. It provides sizes and memory estimates and never runs.
        tensors: the file's tensors, on the meta device.
        entries: the entries of the tensors whose values the class may read.
        part: the model's own tensors in the file.
        quantisation: the file's tensor `comfy_quant` of each quantised layer.
        shape: the model's size and limits, for plans.
        keys: the key map of the parameters that ranks hold.
        names: the key map in which each weight that adapters change is a single tensor.
        exact: the parameters that ComfyUI's class keeps in fp32, whichever dtype is chosen.
        latent_channels: the number of channels of the latent to sample.
        patch_size: the latent values of one token in (frames,) height and width; ones without a declaration.
        sigmas: True if the model reads the sigmas of the call and of the run.
        concat_channels: the number of channels that ComfyUI's class concatenates to the latent.
        text_widths: the widths that text may have.
        pooled_width: the smallest width of pooled text.
        sound: the shape of the sound that comes with a video; see Declaration.
        control: the blocks after which each of a ControlNet's lists is added.
        methods: the supported layouts of reference latents; empty if all are supported.
        two_of_each: True for a model with only two blocks of each kind, for timing.
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
        """Return the number of a latent's dimensions after batch and channels."""
        return len(self.patch_size)

    def base(self, dtype: torch.dtype) -> Any:
        """Make another of ComfyUI's BaseModel on the meta device, with weights of a dtype."""
        return make_model(self.described, self.tensors, dtype, self.entries)
