"""Ulysses' all-to-all: from a split over tokens to a split over heads and back (DeepSpeed-Ulysses, arXiv 2309.14509).

Tokens and heads may be split unevenly. Where heads of queries share heads of keys and values, a rank gets those that its own
share. The order of tokens inside a block does not matter to attention, because positions are applied to q and k beforehand.
What travels has tokens outermost, so that the pieces of all ranks behind each
other are the sequence, and the pieces for all ranks are the result: nothing is moved where heads are apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import HeadRuns, SequenceSplit, length

QKV = tuple[Tensor, Tensor, Tensor]


class HeadExchange:
    """The exchange for the tokens of one split, and for a chunk of every rank's heads.

    Args:
        axis: the ranks that share the heads.
        tokens: how many each of them holds.
        runs: the chunk, by rank; without heads of queries or keys where these stay where they are.
        behind: whether this rank computes meanwhile; else it waits at once.
    """

    def __init__(
        self, axis: Communicator, tokens: Sequence[int], split: SequenceSplit, runs: Sequence[HeadRuns], behind: bool
    ) -> None:
        self._axis = axis
        self._tokens = tokens
        self._runs = [(run.q, run.kv, run.kv) for run in runs]
        self._widths = [[length(run) for run in own] for own in self._runs]
        even = len(set(split.head_counts())) == 1 and sum(split.kv_counts()) * split.group == split.heads
        self._apart = even and all(length(run.q) and length(run.kv) for run in runs)
        self._behind = behind

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, opened: Callable[[Tensor], Tensor]) -> Callable[[], QKV]:
        """From `[batch, local tokens, all heads, row]` to `[batch, the ring rank's tokens, the chunk's, head_dim]`.

        What returns waits for it.

        Args:
            opened: makes `[…, head_dim]` of `[…, row]`.
        """
        axis = self._axis
        if axis.size == 1:
            (run, kv, _) = self._runs[0]
            return lambda: (q[:, :, run], k[:, :, kv], v[:, :, kv])
        batch, local, _, row_size = q.shape
        row, mine = batch * row_size, self._widths[axis.rank]
        send_sizes = [row * local * sum(theirs) for theirs in self._widths]
        send = q.new_empty(sum(send_sizes))
        if self._apart:
            views = send.view(axis.size, local, batch, sum(mine), row_size).split(mine, dim=3)
            for part, run, view in zip((q, k, v), self._runs[0], views, strict=True):
                view.copy_(part.unflatten(2, (axis.size, -1))[:, :, :, run].permute(2, 1, 0, 3, 4))
        else:
            for piece, runs, theirs in zip(send.split(send_sizes), self._runs, self._widths, strict=True):
                views = piece.view(local, batch, sum(theirs), row_size).split(theirs, dim=2)
                for part, run, view in zip((q, k, v), runs, views, strict=True):
                    view.copy_(part[:, :, run].transpose(0, 1))
        wait = self._begin(send, send_sizes, [row * n * sum(mine) for n in self._tokens])

        def arrived() -> QKV:
            every = opened(wait().view(sum(self._tokens), batch, sum(mine), row_size).transpose(0, 1))
            q, k, v = every.split(mine, dim=2)
            return q, k, v

        return arrived

    def to_tokens(self, out: Tensor) -> Callable[[], list[Tensor]]:
        """`[batch, the ring rank's tokens, the chunk's heads, row]` to `[batch, local tokens, …]` of each rank's heads.

        What returns waits for it.
        """
        axis = self._axis
        if axis.size == 1:
            return lambda: [out]
        batch, _, mine, row_size = out.shape
        row, local = batch * row_size, self._tokens[axis.rank]
        heads = [theirs for theirs, *_ in self._widths]
        sizes = [row * local * theirs for theirs in heads]
        wait = self._begin(out.transpose(0, 1).reshape(-1), [row * n * mine for n in self._tokens], sizes)

        def arrived() -> list[Tensor]:
            pieces = zip(wait().split(sizes), heads, strict=True)
            return [piece.view(local, batch, theirs, row_size).transpose(0, 1) for piece, theirs in pieces]

        return arrived

    def _begin(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Callable[[], Tensor]:
        if self._behind:
            return self._axis.begin_all_to_all(send, send_sizes, receive_sizes)
        received = self._axis.all_to_all(send, send_sizes, receive_sizes)
        return lambda: received


def joined(chunks: Sequence[Sequence[Tensor]]) -> Tensor:
    """All heads in their order, of what each chunk's `to_tokens` gave."""
    pieces = [piece for of_rank in zip(*chunks, strict=True) for piece in of_rank]
    return torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]
