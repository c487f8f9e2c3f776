"""What a model family provides: reading its files, its modules, and its blocks split around attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..diffusion import Value
from ..layout import TokenLayout
from ..plan import ModelShape
from ..weights.checkpoint import Checkpoint
from ..weights.keymap import KeyMap
from .region import Region

Conditioning = Mapping[str, Tensor]
"""What the model is told besides the latent, by ComfyUI's names (`context`, `y`, `guidance`), each `[batch, ...]`.

`concat` is a latent whose channels the model takes beside the noisy one's.
"""


@dataclass(frozen=True)
class Stage:
    """The run of blocks that one pipeline stage holds: `start` to `stop` of `blocks`."""

    start: int
    stop: int
    blocks: int

    @property
    def first(self) -> bool:
        """Whether it embeds latent and text."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether it makes the output."""
        return self.stop == self.blocks


@dataclass(frozen=True)
class Patch(Region):
    """A run of image tokens and the part of the latent that they stand for."""

    tokens: slice


@dataclass
class Activations:
    """One rank's part of the sequence between two blocks.

    `tokens` is `[batch, local text + local image, features]`, in this order; `text` counts the local text tokens; `vec` is
    what `Model.modulation` made; `rope` turns the pairs of features of the local tokens, `[local tokens, head_dim / 2]`
    (complex64), if the model has such positions.
    """

    tokens: Tensor
    text: int
    vec: Any
    rope: Tensor | None

    @property
    def image(self) -> Tensor:
        """The local image tokens (a view)."""
        return self.tokens[:, self.text :]


Qkv = tuple[Tensor, Tensor, Tensor]


class Block(Protocol):
    """One transformer block as two functions around attention; neither communicates, so both can be compiled."""

    def before(self, state: Activations) -> tuple[Qkv, Any]:
        """q, k, v `[batch, local tokens, heads, head_dim]`, positions applied, and what `after` needs."""

    def after(self, state: Activations, attention: Tensor, kept: Any) -> Tensor:
        """The block's output tokens, given the attention of the local tokens `[batch, local tokens, heads, head_dim]`."""


class Model(Protocol):
    """One stage of a loaded model on one rank. `features` is the width of the tokens between blocks."""

    module: nn.Module
    blocks: Sequence[Block]
    block_modules: Sequence[nn.Module]
    heads: int
    head_dim: int
    features: int

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Patch, ...]:
        """The picture's image tokens as `count` patches."""

    def text_tokens(self, conditioning: Conditioning) -> int:
        """How many text tokens are in the sequence; none if text is only attended to."""

    def embed(self, latent: Tensor, conditioning: Conditioning, layout: TokenLayout, rank: int) -> Tensor:
        """First stage: the tokens of one sequence rank in the layout's order, `[batch, local tokens, features]`.

        Args:
            latent: `[batch, channels, ...]` in the compute dtype, whole.
            conditioning: in the compute dtype.
        """

    def modulation(self, timestep: Tensor, conditioning: Conditioning, dtype: torch.dtype) -> Any:
        """Every stage: what all blocks are told of this call, from `timestep` `[batch]` in fp32.

        A vector `[batch, features]`, or whatever the family's blocks take; it is the same on all ranks.
        """

    def positions(
        self,
        latent_shape: Sequence[int],
        layout: TokenLayout,
        rank: int,
        device: torch.device,
        conditioning: Conditioning,
    ) -> Tensor | None:
        """Every stage: the rotary positions of one sequence rank's tokens, `Activations.rope`; None without such."""

    def unembed(self, state: Activations) -> Tensor:
        """Last stage: the model's output for the local image tokens, `[batch, local image tokens, channels]`."""

    def assemble(self, tokens: Tensor, latent_shape: Sequence[int], patch: Patch) -> Tensor:
        """The image tokens of a patch `[batch, tokens, channels]` as that part of a latent."""


class Family(Protocol):
    """A kind of model: how its files look and how it is built.

    `takes` names the conditioning that its models are told of; what else a prompt holds must be refused, not dropped. None:
    whatever ComfyUI's own class is told of.
    """

    takes: frozenset[str] | None

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Any]:
        """The model's own tensors in a file, under the names its key map uses, and the model's configuration.

        Raises:
            Refused: the file holds no model of this family, or lacks tensors.
        """

    def shape(self, config: Any) -> ModelShape:
        """Its size and limits, for the choice of a plan."""

    def token_rows(self, config: Any, latent_shape: Sequence[int]) -> int:
        """Into how many patches a picture can be cut at most."""

    def image_tokens(self, config: Any, latent_shape: Sequence[int]) -> int:
        """Image tokens of one batch item."""

    def two_of_each(self, config: Any) -> tuple[Any, tuple[int, ...]]:
        """The configuration of a model with two blocks of each kind, in order, and how many the real one has of each."""

    def check(self, config: Any, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]) -> None:
        """Refuse inputs that the model cannot take; `values` are what the conditioning holds besides tensors.

        Raises:
            Refused: with the numbers.
        """

    def keys(self, config: Any) -> KeyMap:
        """Which rows of the file make each parameter."""

    def comfyui_keys(self, config: Any) -> KeyMap:
        """The key map in the names of ComfyUI's model whatever the file's are: adapters come in them."""

    def beside_tokens(self, config: Any, conditioning: Conditioning) -> int:
        """Tokens of one batch item that are not the picture's: text and references."""

    def exact(self, config: Any) -> frozenset[str]:
        """The parameters that are fp32 whatever type is chosen for the weights."""

    def control_blocks(self, config: Any) -> Mapping[str, range]:
        """After which blocks the tensors of each of ComfyUI's lists of ControlNet output are added; empty for none."""

    def build(self, config: Any, stage: Stage) -> Any:
        """One stage of the model on the meta device; parameters of other stages do not exist."""
