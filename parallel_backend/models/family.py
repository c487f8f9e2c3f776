"""The interface of a model family, which reads model files and builds models that run on several ranks."""

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
"""The tensors that a model gets besides the latent, `[batch, ...]`, by ComfyUI's names (`context`, `y`, `guidance`).

`concat` is a latent; the model concatenates its channels to those of the noisy latent.
"""


@dataclass(frozen=True)
class Stage:
    """The contiguous range of blocks that one pipeline stage holds.

    Attributes:
        start: the index of the first block.
        stop: the index after the last block.
        blocks: the number of blocks of the model.
    """

    start: int
    stop: int
    blocks: int

    @property
    def first(self) -> bool:
        """Return True if this stage embeds latent and text."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Return True if this stage computes the output."""
        return self.stop == self.blocks


@dataclass(frozen=True)
class Execution:
    """The communicators, the plan and the callbacks that a forward runs with on one rank.

    Attributes:
        mesh: the rank's communicators.
        plan: the plan for which the communicators were opened.
        access: makes the weights of this rank's blocks usable while they run.
        on_progress: called after each unit of blocks, so that an observer sees the rank make progress.
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
        """Return the bytes of the keys and values that are cached."""

    def uncompiled(self) -> tuple[str, ...]:
        """Return a sentence for each kind of block that could not be compiled, with the reason."""

    def compiling(self) -> float:
        """Return the seconds spent on compiling blocks since the last call of this method."""

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """Run this stage. Return the output for the whole latent or for the patch, or None if the stage is not the last.

        Args:
            latent: the whole latent in the compute dtype on the first and the last stage; None on the stages between.
            patch: the number of the patch to compute with cached keys and values. None: compute the whole latent, exactly.
        """


class StageModel(Protocol):
    """One stage of a loaded model on one rank.

    Attributes:
        module: the model, of which only this stage's parameters exist.
        block_modules: the blocks of this stage.
        features: the number of features of a token.
        unknown: names of arguments that the source of a block of any stage passes to attention and that only ComfyUI's own
            kernels support.
    """

    module: nn.Module
    block_modules: Sequence[nn.Module]
    features: int
    unknown: Sequence[str]

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """Return the region of the latent of each of `count` patches."""

    def forward_on(self, execution: Execution) -> ModelForward:
        """Return the forward of this stage under a plan."""


class Family(Protocol):
    """A kind of model: the form of its files, and how it is built.

    Attributes:
        conditioning_names: the conditioning that its models read; a prompt with any other is refused. None: the model's own
            class in ComfyUI decides.
        called_methods: the methods of ComfyUI's model class that the workers call, so that a class may override them.
        imports: Python modules that its models need and whose import takes seconds.
    """

    conditioning_names: frozenset[str] | None
    called_methods: frozenset[str]
    imports: tuple[str, ...]

    def inspect(self, checkpoint: Checkpoint) -> tuple[Checkpoint, Any]:
        """Return the model's tensors in a file, under the names of its key map, and the model's configuration.

        Raises:
            Refused: the file holds no model of this family, or lacks tensors.
        """

    def shape(self, config: Any) -> ModelShape:
        """Return the model's size and limits, for the choice of a plan."""

    def token_rows(self, config: Any, latent_shape: Sequence[int]) -> int:
        """Return the largest number of patches that a latent of this shape can be cut into."""

    def image_tokens(self, config: Any, latent_shape: Sequence[int]) -> int:
        """Return the number of latent tokens of one batch item."""

    def two_of_each(self, config: Any) -> tuple[Any, tuple[int, ...]]:
        """Return the configuration of a model with two blocks of each kind, and the real model's number of blocks per kind."""

    def check(self, config: Any, latent: Tensor, conditioning: Conditioning, values: Mapping[str, Value]) -> None:
        """Check that the model can take these inputs. `values` are the entries of the conditioning that are not tensors.

        Raises:
            Refused: the model cannot take them; the message has the numbers.
        """

    def couples_rows(self, config: Any, conditioning: Conditioning) -> str:
        """Return the inputs that make the rows of a batch influence one another, in words; empty if none does."""

    def keys(self, config: Any) -> KeyMap:
        """Return the key map: for each parameter, the tensor and rows of the file that it is made of."""

    def comfyui_keys(self, config: Any) -> KeyMap:
        """Return the key map in the names of ComfyUI's model, which adapters use; the file may have other names."""

    def item_bytes(
        self, config: Any, latent_shape: Sequence[int], conditioning: Conditioning, dtype: torch.dtype
    ) -> float:
        """Return the model's own estimate of a forward's memory for one batch item, in bytes; 0 if the plan predicts it."""

    def context_tokens(self, config: Any, conditioning: Conditioning) -> int:
        """Return the number of tokens of one batch item that are not the latent's: text and references."""

    def exact(self, config: Any) -> frozenset[str]:
        """Return the names of the parameters that stay fp32, whichever dtype is chosen for the weights."""

    def control_blocks(self, config: Any) -> Mapping[str, range]:
        """Return the blocks after which the tensors of each of ComfyUI's lists of ControlNet output are added.

        The mapping is empty if the model supports no ControlNet.
        """

    def build(self, config: Any, stage: Stage) -> StageModel:
        """Return one stage of the model on the meta device. Parameters of other stages do not exist in it."""
