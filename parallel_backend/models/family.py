"""What a model family provides: reading its files, its modules, and its blocks split around attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from ..layout import TokenLayout
from ..plan import ModelLimits
from ..weights.checkpoint import Checkpoint
from ..weights.keymap import KeyMap

Conditioning = Mapping[str, Tensor]
"""What the model is told besides the latent, by ComfyUI's names (`context`, `y`, `guidance`)."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which weights to hold: enough for a worker to load them, and equal exactly when they are the same weights."""

    family: str
    path: str
    modified: int
    size: int
    dtype: str


@dataclass
class Activations:
    """One rank's part of the sequence between two blocks.

    `tokens` is `[batch, local text + local image, features]`, text first; `text` counts the local text tokens; `vec`
    `[batch, features]` is the modulation input; `rope` holds cosine and sine for the local tokens.
    """

    tokens: Tensor
    text: int
    vec: Tensor
    rope: tuple[Tensor, Tensor]


Qkv = tuple[Tensor, Tensor, Tensor]


class Block(Protocol):
    """One transformer block as two functions around attention; neither communicates, so both can be compiled."""

    def before(self, state: Activations) -> tuple[Qkv, Any]:
        """q, k, v `[batch, local tokens, heads, head_dim]`, positions applied, and what `after` needs."""

    def after(self, state: Activations, attention: Tensor, carried: Any) -> Tensor:
        """The block's output tokens, given the attention of the local tokens `[batch, local tokens, heads, head_dim]`."""


class Model(Protocol):
    """A loaded model on one rank."""

    module: nn.Module
    blocks: Sequence[Block]
    heads: int
    head_dim: int

    def layout(self, latent: Tensor, conditioning: Conditioning, ring: int, ulysses: int) -> TokenLayout:
        """The cut of this latent's and text's tokens over the sequence ranks."""

    def embed(
        self, latent: Tensor, timestep: Tensor, conditioning: Conditioning, layout: TokenLayout, rank: int
    ) -> Activations:
        """The activations of one sequence rank's tokens.

        Args:
            latent: `[batch, channels, ...]` in the compute dtype, whole.
            timestep: `[batch]`, fp32.
            conditioning: in the compute dtype.
        """

    def unembed(self, state: Activations) -> Tensor:
        """The model's output for the local image tokens, `[batch, local image tokens, channels]`."""

    def assemble(self, tokens: Tensor, latent_shape: torch.Size) -> Tensor:
        """All image tokens `[batch, image tokens, channels]` as a latent of the given shape."""


class Family(Protocol):
    """A kind of model: how its files look and how it is built."""

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Any]:
        """The model's own tensors in a file, under the names its key map uses, and the model's configuration.

        Raises:
            Refused: the file holds no model of this family, or lacks tensors.
        """

    def limits(self, config: Any) -> ModelLimits:
        """What a plan for this model may be."""

    def check(self, config: Any, latent: Tensor, conditioning: Conditioning) -> None:
        """Refuse inputs whose sizes the model cannot take.

        Raises:
            Refused: with the numbers.
        """

    def keys(self, config: Any) -> KeyMap:
        """Which rows of the file make each parameter."""

    def build(self, config: Any) -> Model:
        """The model on the meta device."""
