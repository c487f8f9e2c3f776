"""Who reads what: rounds in which every rank reads one chunk at most, found alike by all from what all ranks want."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, zip_longest

CHUNK_BYTES = 16 * 2**20
"""Bytes read at a time, so that the host memory used while loading stays small: three chunks at most."""


class Way(Enum):
    """How a rank gets what another one of its machine has read."""

    SENT = "sent from host to host"
    AGAIN = "read again"
    LINKED = "sent from device to device"


@dataclass(frozen=True)
class Chunk:
    """Bytes that `reader` reads for `ranks`, itself among them."""

    file: int
    start: int
    stop: int
    ranks: tuple[int, ...]
    reader: int

    @property
    def nbytes(self) -> int:
        """How many bytes they are."""
        return self.stop - self.start

    def read_by(self, way: Way) -> tuple[int, ...]:
        """The ranks that read it from the file: all that want it, or the reader alone."""
        return self.ranks if way is Way.AGAIN else (self.reader,)

    def bytes_between(self, reader: int, rank: int) -> int:
        """Of what one rank reads for another."""
        return self.nbytes if reader == self.reader != rank and rank in self.ranks else 0


Turn = list[Chunk]
"""The chunks of a round, one a reader."""


Range = tuple[int, int, int]
"""Of a file, by its number in the checkpoint: the first byte, and the one after the last."""


def rounds(wants: Sequence[Sequence[Range]], machines: Sequence[int]) -> list[Turn]:
    """What is read by whom, from every rank's wants and machine: one chunk a rank and round."""
    chunks = _chunks(wants, machines)
    by_reader = [[chunk for chunk in chunks if chunk.reader == rank] for rank in range(len(wants))]
    return [[chunk for chunk in turn if chunk is not None] for turn in zip_longest(*by_reader)]


def shared_bytes(turn: Turn) -> int:
    """Bytes of a round that others than their reader want, each as often as it is wanted."""
    return sum(chunk.nbytes * (len(chunk.ranks) - 1) for chunk in turn)


def _chunks(wants: Sequence[Sequence[Range]], machines: Sequence[int]) -> list[Chunk]:
    """What is read by whom, in the files' order; of the ranks that want a chunk the one with the least to do reads it."""
    load: Counter[int] = Counter()
    chunks = []
    for file, start, stop, ranks in _joined(_segments(wants)):
        for machine in dict.fromkeys(machines[rank] for rank in ranks):
            here = tuple(rank for rank in ranks if machines[rank] == machine)
            for begin in range(start, stop, CHUNK_BYTES):
                reader = min(here, key=lambda rank: (load[rank], rank))
                end = min(stop, begin + CHUNK_BYTES)
                load[reader] += end - begin
                chunks.append(Chunk(file, begin, end, here, reader))
    return chunks


Segment = tuple[int, int, int, tuple[int, ...]]
"""A file, a run of its bytes that the same ranks want from end to end, and these ranks."""


def _segments(wants: Sequence[Sequence[Range]]) -> Iterator[Segment]:
    changes: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for rank, ranges in enumerate(wants):
        for file, start, stop in ranges:
            changes[file, start].append((rank, 1))
            changes[file, stop].append((rank, -1))
    wanting: Counter[int] = Counter()
    for (file, start), (_, stop) in pairwise([*sorted(changes), (-1, 0)]):
        for rank, change in changes[file, start]:
            wanting[rank] += change
        ranks = tuple(sorted(rank for rank, count in wanting.items() if count))
        if ranks:
            yield file, start, stop, ranks


def _joined(segments: Iterator[Segment]) -> Iterator[Segment]:
    """Neighbouring segments of the same ranks as one, where that fits into a chunk; so no value is ever torn apart."""
    pending: Segment | None = None
    for segment in segments:
        if pending is not None:
            joins = (pending[0], pending[2], pending[3]) == (segment[0], segment[1], segment[3])
            if joins and segment[2] - pending[1] <= CHUNK_BYTES:
                pending = (*pending[:2], *segment[2:])
                continue
            yield pending
        pending = segment
    if pending is not None:
        yield pending
