"""One forward of the model, its tokens spread over the sequence ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..attention.kernels import choose_kernel
from ..attention.parallel import ParallelAttention
from ..layout import length
from ..mesh import Mesh
from ..models.family import Conditioning, Model


class ParallelForward:
    """Calls a model on every rank; each returns the whole output.

    Args:
        model: this rank's copy.
        mesh: this rank's communicators.
        attention: the plan's choice of kernel.
        mark: called after each block, so that a watcher sees that the rank gets on.
    """

    def __init__(self, model: Model, mesh: Mesh, attention: str, mark: Callable[[], None]) -> None:
        self._model = model
        self._mesh = mesh
        self._attention = attention
        self._mark = mark

    def __call__(self, latent: Tensor, timestep: Tensor, conditioning: Conditioning) -> Tensor:
        """The model's output, shaped like `latent` `[batch, channels, ...]` (both in the compute dtype).

        Args:
            timestep: `[batch]`, fp32.
            conditioning: in the compute dtype, batch sizes equal to the latent's.
        """
        model, sequence = self._model, self._mesh.sequence
        layout = model.layout(latent, conditioning, self._mesh.ring.size, self._mesh.ulysses.size)
        kernel = choose_kernel(self._attention, latent.device, latent.dtype, model.head_dim)
        attention = ParallelAttention(self._mesh, layout, kernel)
        state = model.embed(latent, timestep, conditioning, layout, sequence.rank)
        for block in model.blocks:
            qkv, carried = block.before(state)
            state.tokens = block.after(state, attention(*qkv), carried)
            self._mark()
        sizes = [length(layout.image(rank)) for rank in range(layout.ranks)]
        return model.assemble(sequence.gather(model.unembed(state), sizes), latent.shape)
