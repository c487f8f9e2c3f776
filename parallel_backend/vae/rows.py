"""The rows of a picture on each rank, and the exchange of rows between ranks.

A picture (or every frame of a clip) is cut into contiguous runs of rows, one for each rank, by the rows of its latent. Inside
an autoencoder a run may be empty. Nothing is padded: rows outside the picture are the zeros that a convolution itself would
see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import cut, length

NOTHING = slice(0, 0)

LEAST_POSITIONS = 2
"""Latent positions that each rank must get if a picture is to be cut.

With fewer positions, views cannot tell dimensions of size 1 apart, and statistics over single values only enlarge rounding
errors.
"""


@dataclass(frozen=True)
class Slab:
    """One rank's rows of a picture.

    Attributes:
        values: `[batch, channels, ..., rows, width]`.
        runs: all ranks' rows, in rank order.
        axis: the ranks that share the picture.
    """

    values: Tensor
    runs: tuple[slice, ...]
    axis: Communicator

    @property
    def rows(self) -> int:
        """Return the number of rows on this rank."""
        return int(self.values.shape[-2])

    @property
    def height(self) -> int:
        """Return the number of rows of the whole picture."""
        return int(self.runs[-1].stop)

    def with_values(self, values: Tensor) -> Slab:
        """Return a slab with other values of the same rows."""
        return replace(self, values=values)

    def enlarged(self, values: Tensor) -> Slab:
        """Return a slab with values of the same part of a picture that has twice the rows."""
        return replace(self, values=values, runs=tuple(slice(2 * run.start, 2 * run.stop) for run in self.runs))

    def fetch(self, want: Sequence[slice]) -> Tensor:
        """Return the rows that this rank wants, from the ranks that hold them. This is a collective.

        Args:
            want: the rows that each rank wants, within the picture.
        """
        out = self.values.new_empty(*self.values.shape[:-2], length(want[self.axis.rank]), self.values.shape[-1])
        self._collect(want, out)
        return out

    def padded(self, want: Sequence[slice], earlier: int = 0) -> Tensor:
        """Return the rows that this rank wants, with zeros for rows outside the picture. This is a collective.

        Args:
            want: the rows that each rank wants, also outside the picture.
            earlier: number of frames to reserve before the first one. Their values are not set.
        """
        own_rows = want[self.axis.rank]
        inside = [slice(max(run.start, 0), min(run.stop, self.height)) for run in want]
        shape = list(self.values.shape)
        shape[-2] = length(own_rows)
        if earlier:
            shape[2] += earlier
        out = self.values.new_empty(shape)
        frames = out[:, :, earlier:] if earlier else out
        top, count = inside[self.axis.rank].start - own_rows.start, length(inside[self.axis.rank])
        frames[..., :top, :] = 0
        frames[..., top + count :, :] = 0
        self._collect(inside, frames[..., top : top + count, :])
        return out

    def with_neighbours(self, reach: int, earlier: int = 0) -> Tensor:
        """Return the local rows and `reach` rows on either side, `[..., rows + 2 * reach, width]`, as `padded` does."""
        return self.padded(self._wide(reach), earlier)

    def edges(self, reach: int) -> tuple[Tensor, Tensor]:
        """Return the `reach` rows above the local rows and those below, with zeros outside the picture.

        The local rows are not copied. This is a collective, which sends what `with_neighbours` sends.
        """
        mine, size = self.runs[self.axis.rank], list(self.values.shape)
        size[-2] = reach
        above, below = self.values.new_zeros(size), self.values.new_zeros(size)
        inside = [slice(max(run.start, 0), min(run.stop, self.height)) for run in self._wide(reach)]
        for run, piece in self._received(inside):
            if run.stop <= mine.start:
                above[..., _relative(run, slice(mine.start - reach, mine.start)), :] = piece
            else:
                below[..., _relative(run, slice(mine.stop, mine.stop + reach)), :] = piece
        return above, below

    def _wide(self, reach: int) -> list[slice]:
        return [slice(run.start - reach, run.stop + reach) if length(run) else NOTHING for run in self.runs]

    def _collect(self, want: Sequence[slice], out: Tensor) -> None:
        """Write the rows that this rank wants into `out`. This is a collective."""
        mine, own_rows = self.runs[self.axis.rank], want[self.axis.rank]
        overlap = _overlap(mine, own_rows)
        out[..., _relative(overlap, own_rows), :] = self.values[..., _relative(overlap, mine), :]
        for run, piece in self._received(want):
            out[..., _relative(run, own_rows), :] = piece

    def _received(self, want: Sequence[slice]) -> Iterator[tuple[slice, Tensor]]:
        """Yield the wanted rows that other ranks hold, with their row numbers. This is a collective."""
        if self.axis.size == 1:
            return
        me = self.axis.rank
        mine, own_rows = self.runs[me], want[me]
        before, after = self.values.shape[:-2], self.values.shape[-1]
        row = before.numel() * after
        leaving = [_overlap(mine, run) if rank != me else NOTHING for rank, run in enumerate(want)]
        coming = [_overlap(run, own_rows) if rank != me else NOTHING for rank, run in enumerate(self.runs)]
        send = torch.cat([self.values[..., _relative(run, mine), :].reshape(-1) for run in leaving])
        sizes = [row * length(run) for run in coming]
        received = self.axis.all_to_all(send, [row * length(run) for run in leaving], sizes)
        for run, piece in zip(coming, received.split(sizes), strict=True):
            if length(run):
                yield run, piece.view(*before, length(run), after)

    def whole(self) -> Tensor:
        """Return the whole picture on the first rank, `[..., height, width]`, and no rows on the others.

        This is a collective. A picture that is not cut is whole on every rank.
        """
        return self.fetch([slice(0, self.height), *[NOTHING] * (self.axis.size - 1)])


def slab_of(picture: Tensor, axis: Communicator, scale: int = 1) -> Slab:
    """Return this rank's rows of a picture that every rank holds whole.

    A picture that is too small to be cut stays whole. Every rank then computes all of it, as one rank alone does.

    Args:
        picture: `[batch, channels, ..., height, width]`.
        axis: all ranks.
        scale: rows of the picture for each row of its latent. The cut follows the latent's rows, and the last run takes the
            remainder.
    """
    height, width = picture.shape[-2:]
    if height // scale // axis.size * (width // scale) < LEAST_POSITIONS:
        return Slab(picture, (slice(0, height),), axis.single_rank())
    runs = [slice(scale * run.start, scale * run.stop) for run in cut(height // scale, axis.size)]
    runs[-1] = slice(runs[-1].start, height)
    return Slab(picture[..., runs[axis.rank], :], tuple(runs), axis)


def _overlap(a: slice, b: slice) -> slice:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, stop) if start < stop else NOTHING


def _relative(run: slice, base: slice) -> slice:
    """Return a run of the picture's rows, counted from the start of another run. An empty run stays empty."""
    return slice(run.start - base.start, run.stop - base.start) if length(run) else NOTHING
