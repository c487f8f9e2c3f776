"""A function of ComfyUI's in attention's place, as nodes put it among the options: over ranks under Ulysses.

It may look at where tokens are (causal, windowed, block-sparse attention): it is given all of them, in the model's order, and
some of the heads. Idle tokens and masked text are not among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...attention.codec import EXACT, FP8, SCALE_BYTES, Codec
from ...attention.function_attention import FunctionAttention
from ...declaration import (
    Attention,
    DistributedAttention,
    HeadParallelAttention,
    PrefixedAttention,
    ReplicatedKeys,
    ReplicatedQueries,
)
from ...errors import Refused
from ...layout import SequenceSplit
from ...mesh import Mesh
from ...plan import ResolvedPlan
from .attentions import BlockCall, Kernel, Operands, shared_heads, with_idle, without_idle, without_prefix
from .call_layout import CallLayout
from .placement import Placement, order_of

Function = Callable[..., Tensor]
"""As ComfyUI calls it: given the kernel that it stands in for, q, k, v, the number of heads, and what else attention is told."""

OfHeads = Callable[[slice, int], Function]
"""The function for a run of heads, of so many: what it holds for each head is cut to these."""


class FunctionOverride:
    """Answers a model's calls of attention during one forward by a function.

    Args:
        function: for some heads.
        plan: without Ring and patches; says in how many chunks heads are exchanged, and in which type.
    """

    def __init__(self, function: OfHeads, call: CallLayout, mesh: Mesh, plan: ResolvedPlan) -> None:
        assert plan.ring == plan.patches == 1, "the host refuses it"
        self._function = function
        self._call = call
        self._mesh = mesh
        self._chunks = plan.head_chunks
        self._codec: Codec = FP8 if plan.exchange == "fp8" else EXACT

    def __call__(
        self,
        block: BlockCall | None,
        attention: Attention,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None,
        attn_precision: Any,
        skip_reshape: bool,
        skip_output_reshape: bool,
        **extra_arguments: Any,
    ) -> Tensor:
        """What `Attentions` gives, by the function.

        Raises:
            Refused: a model's attention that it cannot answer on several ranks.
        """
        keywords = {"attn_precision": attn_precision, **extra_arguments}
        queries = [] if block is None else self._queries(block, attention, mask)
        if not queries or (self._mesh.sequence.size == 1 and all(map(self._here, queries))):
            return self._function(slice(0, heads), heads)(
                kernel, q, k, v, heads, mask=None if isinstance(attention, DistributedAttention) else mask,
                skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, **keywords,
            )  # fmt: skip
        assert block is not None
        if not skip_reshape:
            q, k, v = (x.reshape(*x.shape[:2], heads, x.shape[2:].numel() // heads).transpose(1, 2) for x in (q, k, v))
        operands, prefix = Operands(q, k, v), None
        if isinstance(attention, PrefixedAttention):
            operands, prefix, placement = without_prefix(self._call, block, attention, operands)
            queries = [placement]
        if isinstance(attention, DistributedAttention):
            operands = shared_heads(self._call.layout, block, attention.kv_heads or heads, operands)
            mask = None
        keywords = {"transformer_options": block.options, **keywords}
        keywords.pop("enable_gqa", None)  # heads of keys and values are repeated before it is called

        def of_heads(run: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = self._function(run, heads)(
                kernel, q, k, v, q.shape[1], mask=mask, skip_reshape=True, skip_output_reshape=True, **keywords
            )
            return out.transpose(1, 2)

        out = self._exchanged(block, queries, isinstance(attention, ReplicatedKeys), of_heads, operands, prefix)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def of_heads(self, run: slice, heads: int) -> Function:
        """The function, for some of so many heads and all tokens."""
        return self._function(run, heads)

    def _queries(self, block: BlockCall, attention: Attention, mask: Tensor | None) -> list[Placement]:
        """Where the queries of an attention are; nothing where every rank has them all, or the answer does not depend on it."""
        if isinstance(attention, DistributedAttention):
            if attention.biased and mask is not None:
                raise _refused(block, "weighs its attention")
            return [block.placements[name] for name in attention.streams]
        if isinstance(attention, PrefixedAttention):
            if mask is not None:
                raise _refused(block, "masks queries one by one")
            return [block.placements[attention.stream]]
        assert not isinstance(attention, HeadParallelAttention), "its module is in its place"
        if self._mesh.sequence.size == 1:
            return []
        if any(isinstance(each, ReplicatedQueries) for each in block.attentions):
            raise _refused(block, "merges attention of several ranks")
        name = attention.queries if isinstance(attention, ReplicatedQueries) else attention.source
        queries = [block.placements[name]] if name in block.placements else [*block.placements.values()]
        spread = [placement for placement in queries if not placement.everywhere]
        if len(spread) > 1:
            raise _refused(block, "has several streams of tokens")
        if spread and mask is not None and mask.ndim > 2 and max(mask.shape[1:-1]) > 1:
            raise _refused(block, "masks queries one by one")
        return spread

    def _here(self, placement: Placement) -> bool:
        """Whether this rank has tokens of a stream; else an idle one stands for them."""
        return placement.counts[self._call.rank] > 0

    def _exchanged(
        self,
        block: BlockCall,
        placements: list[Placement],
        keys_here: bool,
        function: Callable[[slice, Tensor, Tensor, Tensor], Tensor],
        operands: Operands,
        prefix: Tensor | None,
    ) -> Tensor:
        """`[batch, local tokens, heads, head_dim]`."""
        counts = [placement.counts[self._call.rank] for placement in placements]
        padded_counts = [max(1, count) for count in counts] if prefix is None else [operands.q.shape[2]]
        if operands.q.shape[2] != sum(padded_counts):
            raise Refused(
                f"the model's {block.name} attends with {operands.q.shape[2]} queries where this pack knows of "
                f"{sum(padded_counts)}: update the pack, or use Load Diffusion Model."
            )
        q, k, v = operands.q, operands.k, operands.v
        q = without_idle(q, padded_counts, counts).transpose(1, 2)
        k, v = (x if keys_here else without_idle(x, padded_counts, counts) for x in (k, v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        codec = EXACT if q.shape[3] % SCALE_BYTES else self._codec

        def make() -> FunctionAttention:
            tokens = tuple(map(sum, zip(*(placement.counts for placement in placements), strict=True)))
            shares = self._call.layout.shares
            split = SequenceSplit(tokens, q.shape[2], 1, self._mesh.ulysses.size, shares, k.shape[2])
            return FunctionAttention(self._mesh, split, order_of(placements), keys_here, self._chunks, codec)

        key = "function", self._chunks, codec, keys_here, q.shape[2], k.shape[2], *placements
        return with_idle(self._call.layout.once(key, make)(function, q, k, v, prefix), padded_counts, counts)


def _refused(block: BlockCall, what: str) -> Refused:
    return Refused(
        f"the model's {block.name} {what}, and an attention override cannot answer that on several devices: choose one in "
        "Parallel Plan, or remove the node that adds the override."
    )
