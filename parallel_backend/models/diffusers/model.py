"""One pipeline stage of a diffusers model in a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ...declaration import Declaration
from ...weights.layers.cast import use_cast_layers
from ..family import Execution, Stage
from ..inputs import Inputs, Region
from ..sequence_parallel.blocks import ParallelModel
from ..sequence_parallel.picture import Picture, as_patch_size
from ..sequence_parallel.run import ParallelForward
from .attention import ENTRY, answer_attention

Call = Callable[[ParallelModel, Tensor, Inputs], Tensor]
"""A function that runs a model's forward. Latent and output are `[batch, channels, ...]`, in ComfyUI's order of dimensions."""


class DiffusersModel:
    """diffusers' own module with its blocks parallelised over ranks.

    Args:
        module: the module, on the meta device.
        stage: the blocks that this rank holds.
        call: runs the module's forward with the code around it.

    Attributes:
        features: the number of features of a token.
    """

    def __init__(self, module: nn.Module, declaration: Declaration, stage: Stage, call: Call) -> None:
        use_cast_layers(module)
        heads, head_dim = declaration.attention_heads(module)
        self.features = heads * head_dim
        self.module = module.eval().requires_grad_(False)
        self._patch_size = declaration.patch_size(module)
        self._call = call
        self._parallel = ParallelModel(module, declaration, stage, ENTRY)
        self.block_modules: Sequence[nn.Module] = self._parallel.blocks
        self.unknown: Sequence[str] = self._parallel.unknown
        answer_attention(module, lambda: self._parallel.now.attentions)

    def patches(self, latent_shape: Sequence[int], count: int) -> tuple[Region, ...]:
        """Return each patch's region of the latent."""
        return self.picture(latent_shape).regions(count)

    def picture(self, latent_shape: Sequence[int]) -> Picture:
        """Return the tokens of a latent."""
        return Picture(tuple(latent_shape), as_patch_size(self._patch_size, len(latent_shape) - 2))

    def forward_on(self, execution: Execution) -> DiffusersForward:
        """Return the forward of this stage under a plan."""
        return DiffusersForward(self, self._parallel, execution)

    def compute(self, latent: Tensor, inputs: Inputs) -> Tensor:
        """Return the model's output for a latent in the compute dtype."""
        return self._call(self._parallel, latent, inputs)


class DiffusersForward(ParallelForward):
    """The forward of a DiffusersModel's stage."""

    def __init__(self, model: DiffusersModel, blocks: ParallelModel, execution: Execution) -> None:
        super().__init__(blocks, execution, blocks.compiled_by(execution.compiler))
        self._model = model

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """Run this stage. Return the output for the whole latent or for the patch, or None if the stage is not the last."""
        picture = self._model.picture(inputs.shape)
        return self.run(inputs, picture, latent, patch, lambda x, _: self._model.compute(x, inputs))
