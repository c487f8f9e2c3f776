"""An attention override: a function among ComfyUI's options that replaces attention, here on several Ulysses ranks.

The function may depend on token positions (causal, windowed, block-sparse attention). So the function gets all tokens of some
heads, in the model's order, without idle tokens and masked text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...attention.codec import EXACT, FP8, SCALE_BYTES, Codec
from ...declaration import (
    Attention,
    DistributedAttention,
    HeadParallelAttention,
    PrefixedAttention,
    ReplicatedKeys,
    ReplicatedQueries,
)
from ...errors import Refused
from ...mesh import Mesh
from ...plan import ResolvedPlan
from .attentions import BlockCall, Kernel, Operands, shared_heads, without_prefix
from .call_layout import CallLayout
from .head_parallel import EveryToken
from .placement import Placement

Function = Callable[..., Tensor]
"""An override as ComfyUI calls it: with the kernel that it replaces, q, k, v, the number of heads, and further arguments."""

OfHeads = Callable[[slice, int], Function]
"""A callable that maps (range of heads, number of all heads) to the function for these heads.

Lists in the function with an entry for each head are cut to these heads.
"""


class FunctionOverride:
    """An attention that computes all of a model's calls during one forward by a function.

    Args:
        function: returns the function for a range of heads.
        plan: a plan without Ring and patches. It sets the chunks of heads and the exchange's codec.
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
        """Compute one call of attention by the function, with the arguments and result of `Attentions.__call__`.

        Raises:
            Refused: the function cannot compute this attention on several ranks.
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
        keywords.pop("enable_gqa", None)  # heads of keys and values are repeated before the function is called

        def of_heads(run: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = self._function(run, heads)(
                kernel, q, k, v, q.shape[1], mask=mask, skip_reshape=True, skip_output_reshape=True, **keywords
            )
            return out.transpose(1, 2)

        q, k, v = (x.transpose(1, 2) for x in (operands.q, operands.k, operands.v))
        expected = sum(max(1, placement.counts[self._call.rank]) for placement in queries)
        if prefix is None and q.shape[1] != expected:
            raise Refused(
                f"the model's {block.name} attends with {q.shape[1]} queries and this pack expects {expected}: update "
                "the pack, or use Load Diffusion Model."
            )
        codec = EXACT if q.shape[3] % SCALE_BYTES else self._codec
        replicated = isinstance(attention, ReplicatedKeys)
        every = EveryToken(
            self._call, self._mesh.ulysses, queries, q.shape[2], k.shape[2], replicated, self._chunks, codec
        )
        out = every.attend(of_heads, q, k, v, prefix)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def of_heads(self, run: slice, heads: int) -> Function:
        """Return the function for some of `heads` heads and all tokens."""
        return self._function(run, heads)

    def _queries(self, block: BlockCall, attention: Attention, mask: Tensor | None) -> list[Placement]:
        """Return the placements of an attention's queries; none if the rank computes the attention without other ranks."""
        if isinstance(attention, DistributedAttention):
            if attention.biased and mask is not None:
                raise _refused(block, "adds a bias to its attention")
            return [block.placements[name] for name in attention.streams]
        if isinstance(attention, PrefixedAttention):
            if mask is not None:
                raise _refused(block, "has a different mask for each query")
            return [block.placements[attention.stream]]
        assert not isinstance(attention, HeadParallelAttention), "its module is in its place"
        if self._mesh.sequence.size == 1:
            return []
        if any(isinstance(each, ReplicatedQueries) for each in block.attentions):
            raise _refused(block, "merges attention of several workers")
        name = attention.queries if isinstance(attention, ReplicatedQueries) else attention.source
        queries = [block.placements[name]] if name in block.placements else [*block.placements.values()]
        divided = [placement for placement in queries if not placement.everywhere]
        if len(divided) > 1:
            raise _refused(block, "has several streams of tokens")
        if divided and mask is not None and mask.ndim > 2 and max(mask.shape[1:-1]) > 1:
            raise _refused(block, "has a different mask for each query")
        return divided

    def _here(self, placement: Placement) -> bool:
        """Return True if this rank has tokens of a stream. A rank without tokens has an idle token."""
        return placement.counts[self._call.rank] > 0


def _refused(block: BlockCall, what: str) -> Refused:
    return Refused(
        f"the model's {block.name} {what}, which an attention override cannot compute on several devices: choose one "
        "device in Parallel Plan, or remove the node that adds the override."
    )
