"""Between a rank's tokens of a stream and all tokens of some heads, for attention that goes by where tokens are."""

from __future__ import annotations

from torch import Tensor

from ...attention.function_attention import OrderedHeadExchange
from .attentions import with_idle, without_idle
from .forward import RankForward
from .placement import Placement, order_of


def all_tokens(now: RankForward, placement: Placement, heads: int) -> OrderedHeadExchange:
    """The exchange of a stream's tokens for some of so many heads."""
    layout, ranks = now.call.layout, now.mesh.sequence

    def make() -> OrderedHeadExchange:
        return OrderedHeadExchange(ranks, placement.counts, order_of([placement]), heads, layout.shares)

    return layout.once(("all tokens", heads, placement), make)


def here(x: Tensor, placement: Placement, now: RankForward) -> Tensor:
    """`[batch, tokens, heads, head_dim]` of this rank, less the token that stands in for none."""
    count = placement.counts[now.call.rank]
    return without_idle(x.transpose(1, 2), [max(1, count)], [count]).transpose(1, 2)


def back_here(x: Tensor, placement: Placement, now: RankForward) -> Tensor:
    """The reverse of `here`."""
    count = placement.counts[now.call.rank]
    return with_idle(x, [max(1, count)], [count])
