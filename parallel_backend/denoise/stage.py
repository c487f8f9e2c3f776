"""One pipeline stage's part of a forward, for the whole sequence or for one patch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

from ..attention.cache import KVCache
from ..attention.kernels import choose_kernel, flash_fault
from ..attention.parallel import Attention, PatchAttention, WholeAttention
from ..layout import TokenLayout, length
from ..mesh import Mesh
from ..models.family import Activations, Conditioning, Model
from ..models.inputs import Inputs
from ..plan import ResolvedPlan
from ..weights.holding import Holding


class StageForward:
    """Runs this rank's blocks: takes tokens from the stage before (or embeds them) and passes them on (or unembeds them).

    Args:
        holding: how this rank holds the weights of its blocks.
        mark: called after each block, so that a watcher sees that the rank gets on.
    """

    def __init__(
        self, model: Model, mesh: Mesh, plan: ResolvedPlan, holding: Holding, mark: Callable[[], None]
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._plan = plan
        self._holding = holding
        self._mark = mark
        self._caches: dict[Hashable, KVCache] = {}

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values kept."""
        return sum(cache.nbytes for cache in self._caches.values())

    def __call__(self, inputs: Inputs, latent: Tensor | None, patch: int | None) -> Tensor | None:
        """On the last stage the output for the whole latent, or for the patch; None on the others.

        Args:
            latent: the whole latent in the compute dtype, on the first stage.
            patch: the number of the patch to compute from the cache, or None for everything, exactly.
        """
        patches = self._model.patches(inputs.shape, self._plan.patches)
        whole = self.layout(inputs.shape, inputs.conditioning)
        layout = whole if patch is None else whole.only(patch)
        state = self._begin(inputs, layout, latent)
        attention = self._attention(inputs, whole, patch)
        for index, block in enumerate(self._model.blocks):
            with self._holding.block(index):
                qkv, kept = block.before(state)
                state.tokens = block.after(state, attention(index, *qkv), kept)
            self._mark()
        if not self._mesh.last:
            self._mesh.pipefusion.send(state.tokens, self._mesh.pipefusion.rank + 1)
            return None
        sizes = [layout.image_tokens(rank) for rank in range(layout.ranks)]
        tokens = layout.in_order(self._mesh.sequence.gather(self._model.unembed(state), sizes))
        region = patches[patch] if patch is not None else self._model.patches(inputs.shape, 1)[0]
        return self._model.assemble(tokens, inputs.shape, region)

    def layout(self, latent_shape: Sequence[int], conditioning: Conditioning) -> TokenLayout:
        """Which rank holds which tokens of a whole sequence."""
        runs = tuple(patch.tokens for patch in self._model.patches(latent_shape, self._plan.patches))
        text = self._model.text_tokens(conditioning)
        return TokenLayout(text, runs, self._model.heads, self._plan.ring, self._plan.ulysses)

    def _begin(self, inputs: Inputs, layout: TokenLayout, latent: Tensor | None) -> Activations:
        model, mesh, rank = self._model, self._mesh, self._mesh.sequence.rank
        if mesh.first:
            assert latent is not None
            tokens = model.embed(latent, inputs.conditioning, layout, rank)
        else:
            shape = (inputs.shape[0], layout.tokens(rank), model.features)
            tokens = mesh.pipefusion.receive(shape, inputs.dtype, mesh.pipefusion.rank - 1)
        assert inputs.timestep is not None
        return Activations(
            tokens=tokens,
            text=length(layout.text(rank)),
            vec=model.modulation(inputs.timestep, inputs.conditioning, inputs.dtype),
            rope=model.positions(inputs.shape, layout, rank, inputs.device, inputs.conditioning),
        )

    def _attention(self, inputs: Inputs, whole: TokenLayout, patch: int | None) -> Attention:
        device = inputs.device
        kernel = choose_kernel(self._plan.attention, device, inputs.dtype, self._model.head_dim, flash_fault(device))
        if patch is not None:
            return PatchAttention(self._mesh, whole.only(patch), patch, kernel.attend, self._caches[inputs.key])
        cache = None
        if len(whole.patches) > 1:
            cache = self._caches[inputs.key] = KVCache.of(whole, self._mesh.ring.rank)
        return WholeAttention(self._mesh, whole, kernel.attend, cache)
