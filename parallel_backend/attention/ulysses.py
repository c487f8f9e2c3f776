"""Ulysses' all-to-all: from tokens sharded over ranks to heads sharded over ranks, and back (arXiv 2309.14509).

Buffers have tokens outermost. So the received pieces, in rank order, form the whole sequence without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import HeadSlices, SequenceSplit, length
from .codec import EXACT, Codec

QKV = tuple[Tensor, Tensor, Tensor]

Decode = Callable[[Tensor], Tensor]

Output = TypeVar("Output")


class HeadExchange:
    """The all-to-alls for one chunk of every rank's heads.

    Args:
        ranks: the ranks that share the heads.
        tokens: the number of tokens on each of them.
        split: the numbers of heads.
        chunk: the heads of each rank in this chunk. If the query heads or the key heads are empty, they are not sent.
        overlap: True to start operations and wait for them later, False to wait at once.
    """

    def __init__(
        self,
        ranks: Communicator,
        tokens: Sequence[int],
        split: SequenceSplit,
        chunk: Sequence[HeadSlices],
        overlap: bool,
    ) -> None:
        self._ranks = ranks
        self._tokens = tokens
        self._slices = [(heads.q, heads.kv, heads.kv) for heads in chunk]
        self._counts = [[length(heads) for heads in slices] for slices in self._slices]
        even = len(set(split.head_counts())) == 1 and sum(split.kv_counts()) * split.group_size == split.heads
        self._even = even and all(length(heads.q) and length(heads.kv) for heads in chunk)
        self._overlap = overlap

    def start_to_heads(self, q: Tensor, k: Tensor, v: Tensor, decode: Decode) -> Callable[[], QKV]:
        """Start the all-to-all that gives each rank all tokens of its heads.

        Args:
            q: `[batch, local tokens, all heads, channels]`, encoded.
            k: as q, with all key heads.
            v: as k.
            decode: decodes `[…, channels]` to `[…, head_dim]`.

        Returns:
            A function that waits and returns q, k and v, `[batch, all ranks' tokens, chunk's heads, head_dim]`.
        """
        ranks = self._ranks
        if ranks.size == 1:
            (q_heads, kv_heads, _) = self._slices[0]
            return lambda: (q[:, :, q_heads], k[:, :, kv_heads], v[:, :, kv_heads])
        batch, local, _, channels = q.shape
        row, local_counts = batch * channels, self._counts[ranks.rank]
        send_sizes = [row * local * sum(counts) for counts in self._counts]
        send = q.new_empty(sum(send_sizes))
        if self._even:
            views = send.view(ranks.size, local, batch, sum(local_counts), channels).split(local_counts, dim=3)
            for operand, heads, view in zip((q, k, v), self._slices[0], views, strict=True):
                view.copy_(operand.unflatten(2, (ranks.size, -1))[:, :, :, heads].permute(2, 1, 0, 3, 4))
        else:
            for piece, slices, counts in zip(send.split(send_sizes), self._slices, self._counts, strict=True):
                views = piece.view(local, batch, sum(counts), channels).split(counts, dim=2)
                for operand, heads, view in zip((q, k, v), slices, views, strict=True):
                    view.copy_(operand[:, :, heads].transpose(0, 1))
        receive_sizes = [row * tokens * sum(local_counts) for tokens in self._tokens]
        wait_for_data = self._start(send, send_sizes, receive_sizes)

        def wait() -> QKV:
            received = wait_for_data().view(sum(self._tokens), batch, sum(local_counts), channels)
            q, k, v = decode(received.transpose(0, 1)).split(local_counts, dim=2)
            return q, k, v

        return wait

    def start_to_tokens(self, out: Tensor) -> Callable[[], list[Tensor]]:
        """Start the all-to-all that gives each rank all heads of its tokens.

        Args:
            out: `[batch, all ranks' tokens, this rank's heads of the chunk, channels]`.

        Returns:
            A function that waits and returns `[batch, local tokens, rank's heads of the chunk, channels]` for each rank.
        """
        ranks = self._ranks
        if ranks.size == 1:
            return lambda: [out]
        batch, _, local_heads, channels = out.shape
        row, local = batch * channels, self._tokens[ranks.rank]
        head_counts = [q_heads for q_heads, *_ in self._counts]
        send_sizes = [row * tokens * local_heads for tokens in self._tokens]
        receive_sizes = [row * local * heads for heads in head_counts]
        wait_for_data = self._start(out.transpose(0, 1).reshape(-1), send_sizes, receive_sizes)

        def wait() -> list[Tensor]:
            pieces = zip(wait_for_data().split(receive_sizes), head_counts, strict=True)
            return [piece.view(local, batch, heads, channels).transpose(0, 1) for piece, heads in pieces]

        return wait

    def _start(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Callable[[], Tensor]:
        if self._overlap:
            return self._ranks.start_all_to_all(send, send_sizes, receive_sizes)
        received = self._ranks.all_to_all(send, send_sizes, receive_sizes)
        return lambda: received


class UlyssesLayout:
    """The state that `ulysses_attention` needs for one split of tokens and heads.

    Args:
        ranks: the Ulysses ranks.
        tokens: the number of tokens on each of them.
        split: the numbers of heads.
        max_chunks: the largest number of chunks that exchange their heads separately. Every rank has heads in each chunk.
        codec: encodes operands and outputs, if there are several ranks.
        exchange_keys: exchange keys and values too; False if every rank has all of them.

    Attributes:
        heads: this rank's heads, by chunk.
        exchanges: the all-to-alls, by chunk.
    """

    def __init__(
        self,
        ranks: Communicator,
        tokens: Sequence[int],
        split: SequenceSplit,
        max_chunks: int = 1,
        codec: Codec = EXACT,
        exchange_keys: bool = True,
    ) -> None:
        chunks = split.head_chunks(max_chunks)
        self.codec = codec if ranks.size > 1 else EXACT
        self.heads = [chunk[ranks.rank] for chunk in chunks]
        if not exchange_keys:
            chunks = [without_keys(chunk) for chunk in chunks]
        self.exchanges = [HeadExchange(ranks, tokens, split, chunk, overlap=len(chunks) > 1) for chunk in chunks]


def without_keys(chunk: Sequence[HeadSlices]) -> list[HeadSlices]:
    """Return a chunk with the same query heads of each rank and no key heads."""
    return [HeadSlices(heads.q, slice(0, 0)) for heads in chunk]


def without_queries(chunk: Sequence[HeadSlices]) -> list[HeadSlices]:
    """Return a chunk with the same key heads of each rank and no query heads."""
    return [HeadSlices(slice(0, 0), heads.kv) for heads in chunk]


def encode_operands(codec: Codec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Decode]:
    """Return q, k and v encoded for sending, `[batch, tokens, heads, channels]`, and a function that decodes received data."""
    if codec is EXACT:
        return q, k, v, unchanged
    dtype, head_counts = q.dtype, [operand.shape[2] for operand in (q, k, v)]
    q, k, v = codec.encode(torch.cat((q, k, v), dim=2)).split(head_counts, dim=2)
    return q, k, v, lambda rows: codec.decode(rows, dtype)


def unchanged(x: Tensor) -> Tensor:
    """Return the tensor itself. This decodes tensors that are sent without encoding."""
    return x


def concatenate_heads(chunks: Sequence[Sequence[Tensor]]) -> Tensor:
    """Concatenate all heads in the model's order.

    Args:
        chunks: for each chunk and rank `[batch, tokens, rank's heads of the chunk, channels]`.

    Returns:
        `[batch, tokens, heads, channels]`.
    """
    pieces = [piece for rank_pieces in zip(*chunks, strict=True) for piece in rank_pieces]
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]


def repeat_kv_heads(
    attend: Callable[[Tensor, Tensor, Tensor], Output], group: int, heads: HeadSlices
) -> Callable[[Tensor, Tensor, Tensor], Output]:
    """Wrap an attention function that takes as many key heads as query heads, so that it accepts grouped queries.

    Key heads are repeated last, after the all-to-all, the ring and the cache, which handle each key head once.

    Args:
        attend: takes q, k and v `[batch, tokens, heads, head_dim]`.
        group: the number of query heads that share one key head.
        heads: the query heads and key heads that the returned function receives.

    Returns:
        A function of q, k and v that repeats the key heads and calls `attend`.
    """
    if group == 1:
        return attend
    skipped = heads.q.start % group  # query heads of the first group that the previous rank computes

    def attend_groups(q: Tensor, k: Tensor, v: Tensor) -> Output:
        k, v = (x.repeat_interleave(group, dim=2)[:, :, skipped : skipped + q.shape[2]] for x in (k, v))
        return attend(q, k, v)

    return attend_groups
