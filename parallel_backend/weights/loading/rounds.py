"""The schedule of reading: rounds in which every rank reads at most one chunk. All ranks compute it alike from all wants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise, zip_longest

CHUNK_BYTES = 16 * 2**20
"""Size of a chunk in bytes, so that the host memory used while loading stays small: three chunks at most."""


class Way(Enum):
    """The ways in which a rank gets bytes that another rank of its machine has read."""

    SENT = "sent from host to host"
    AGAIN = "read again"
    LINKED = "sent from device to device"


@dataclass(frozen=True)
class Chunk:
    """Bytes of a file that `reader` reads for `ranks`, itself among them."""

    file: int
    start: int
    stop: int
    ranks: tuple[int, ...]
    reader: int

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.stop - self.start

    def read_by(self, way: Way) -> tuple[int, ...]:
        """Return the ranks that read the chunk from the file: all that want it, or the reader alone."""
        return self.ranks if way is Way.AGAIN else (self.reader,)

    def bytes_between(self, reader: int, rank: int) -> int:
        """Return the number of bytes that rank `reader` reads for the other rank `rank`."""
        return self.nbytes if reader == self.reader != rank and rank in self.ranks else 0


Turn = list[Chunk]
"""The chunks of a round, one for each reader."""


Range = tuple[int, int, int]
"""A file's number in the checkpoint, the first byte, and the byte after the last."""


def rounds(wants: Sequence[Sequence[Range]], machines: Sequence[int]) -> list[Turn]:
    """Return the rounds of reading: which rank reads which chunk, with at most one chunk for each rank in a round.

    Args:
        wants: the byte ranges that each rank wants.
        machines: the number of each rank's machine.
    """
    chunks = _chunks(wants, machines)
    by_reader = [[chunk for chunk in chunks if chunk.reader == rank] for rank in range(len(wants))]
    return [[chunk for chunk in turn if chunk is not None] for turn in zip_longest(*by_reader)]


def shared_bytes(turn: Turn) -> int:
    """Return the bytes of a round that ranks other than the reader want. Bytes count once for each such rank."""
    return sum(chunk.nbytes * (len(chunk.ranks) - 1) for chunk in turn)


def _chunks(wants: Sequence[Sequence[Range]], machines: Sequence[int]) -> list[Chunk]:
    """Return the chunks in the files' order. Of the ranks that want a chunk, the one with the fewest bytes so far reads it."""
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
"""A file, the first byte and the byte after the last of a run that the same ranks want, and these ranks."""


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
    """Join neighbouring segments of the same ranks if they fit into a chunk, so that no value is ever torn apart."""
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
