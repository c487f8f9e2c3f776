"""What a model family provides: reading its files, and its model spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..diffusion import Value
from ..mesh import Mesh
from ..plan import ModelShape, ResolvedPlan
from ..weights.files.checkpoint import Checkpoint
from ..weights.files.keymap import KeyMap
from .inputs import Inputs, Region

if TYPE_CHECKING:
    from ..weights.stores.store import BlockAccess

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
class Execution:
    """What a forward runs with on one rank.

    Attributes:
        mesh: the rank's communicators.
        plan: what they were opened for.
        access: how the rank makes the weights of its blocks usable.
        on_progress: called after each block, so that a watcher sees that the rank gets on.
        compiler: the backend of torch.compile for the blocks; empty for none.
    """

    mesh: Mesh
    plan: ResolvedPlan
    access: BlockAccess
    on_progress: Callable[[], None]
    compiler: str = ""


class ModelForward(Protocol):
    """A model's forward under a plan."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept."""

    def uncompiled(self) -> tuple[str, ...]:
        """Why kinds of blocks that were to be compiled were not, a sentence each."""

    def compiling(self) -> float:
        """Seconds that compiling blocks has taken since this was asked for last."""

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others.

        Args:
            latent: the whole latent in the compute dtype, on the first and the last stage.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.
        """


class StageModel(Protocol):
    """One stage of a loaded model on one rank; `block_modules` are its blocks, `features` the width of a token.

    `unknown` names what any stage's blocks give attention, by their source, that only ComfyUI's own kernels know.
    """

    module: nn.Module
    block_modules: Sequence[nn.Module]
    features: int
    unknown: Sequence[str]

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """The latent's part of each of `count` patches."""

    def forward_on(self, execution: Execution) -> ModelForward:
        """The forward of this stage under a plan."""


class Family(Protocol):
    """A kind of model: the form of its files, and how it is built.

    Attributes:
        conditioning_names: the conditioning that its models read; a prompt with any other is refused. None: a model of ComfyUI's
            reads whatever its own class reads.
        called_methods: the methods of ComfyUI's model class that the workers call, so that a class may override them.
        imports: the modules that its models are made of and whose import takes seconds.
    """

    conditioning_names: frozenset[str] | None
    called_methods: frozenset[str]
    imports: tuple[str, ...]

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

    def couples_rows(self, config: Any, conditioning: Conditioning) -> str:
        """Return the inputs that make the rows of a batch influence one another, in words; empty if none does."""

    def keys(self, config: Any) -> KeyMap:
        """Which rows of the file make each parameter."""

    def comfyui_keys(self, config: Any) -> KeyMap:
        """The key map in the names of ComfyUI's model whatever the file's are: adapters come in them."""

    def item_bytes(
        self, config: Any, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """Memory of one batch item of a forward in bytes, where the model estimates it itself; 0 where plans predict it."""

    def context_tokens(self, config: Any, conditioning: Conditioning) -> int:
        """Tokens of one batch item that are not the picture's: text and references."""

    def exact(self, config: Any) -> frozenset[str]:
        """The parameters that are fp32 whatever type is chosen for the weights."""

    def control_blocks(self, config: Any) -> Mapping[str, range]:
        """After which blocks the tensors of each of ComfyUI's lists of ControlNet output are added; empty for none."""

    def build(self, config: Any, stage: Stage) -> StageModel:
        """One stage of the model on the meta device; parameters of other stages do not exist."""
