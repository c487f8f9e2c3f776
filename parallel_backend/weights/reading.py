"""Reading byte ranges of files into memory, in bounded chunks; ranks of one machine read what they share only once.

All ranks know what all ranks want, and so each finds the same schedule: rounds in which every rank reads one chunk at
most. Those ranks of its machine that want it too get it from that rank, or read it after it, when the system has it in its page
cache: whichever is faster here, as the first rounds show. Between rounds all agree on whether the user has cancelled.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, pairwise, zip_longest
from pathlib import Path

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..errors import Cancelled, Refused

CHUNK_BYTES = 16 * 2**20
"""Bytes read at a time, so that the host memory used while loading stays small: three chunks at most."""

TRIALS = 2
"""Rounds that each way of sharing is tried for."""


@dataclass(frozen=True)
class Want:
    """Bytes `start` to `stop` of a file (its number in the checkpoint) and what becomes of them.

    `put(offset, data)` takes a part of them, `data` (uint8, to be copied at once) from `offset` after `start`.
    """

    file: int
    start: int
    stop: int
    put: Callable[[int, Tensor], None]


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
        """Its length."""
        return self.stop - self.start

    def read_by(self, again: bool) -> tuple[int, ...]:
        """The ranks that read it from the file: all that want it, or the reader alone."""
        return self.ranks if again else (self.reader,)


Turn = list[Chunk]
"""The chunks of a round, one a reader."""


@dataclass(frozen=True)
class Neighbours:
    """All ranks, on CPU tensors, and the number of the machine that each is on."""

    everyone: Communicator
    machines: tuple[int, ...]


@dataclass(frozen=True)
class Watch:
    """Who looks on while weights are read.

    `is_cancelled` says, the same on all ranks, whether the user has cancelled; `progress` is told the bytes that are there and
    those there will be, of all ranks together; `read` the bytes that this rank has read from disk.
    """

    is_cancelled: Callable[[], bool]
    progress: Callable[[int, int], None]
    read: Callable[[int], None]


def read_wanted(
    files: Sequence[Path], wants: Sequence[Want], neighbours: Neighbours, watch: Watch, again: bool | None = None
) -> None:
    """Read what this rank wants. A collective of all ranks, each with its own wants of the same files.

    Args:
        again: whether ranks read again what a rank of their machine has read, or get it sent; None: what is faster.

    Raises:
        Refused: a file ends early or cannot be read.
        Cancelled: `watch.is_cancelled` said so, on all ranks alike.
    """
    everyone = neighbours.everyone
    turns = list(_rounds(_chunks(_wants_of_all(wants, everyone), neighbours.machines), everyone.size))
    sharing = [turn for turn in turns if _shared(turn)]
    reading = _Reading(files, _ByFile(wants), everyone, watch, sum(chunk.nbytes for turn in turns for chunk in turn))
    if again is None:
        trials = sharing[: 2 * TRIALS]
        turns = [turn for turn in turns if not any(turn is tried for tried in trials)]
        sent, read_again = ([reading.seconds_a_byte(turn, way) for turn in trials[way::2]] for way in (False, True))
        again = min(read_again, default=0.0) < min(sent, default=0.0)
    reading.read(turns, again)


@dataclass
class _Reading:
    """What has been read so far of what all ranks want."""

    files: Sequence[Path]
    mine: _ByFile
    everyone: Communicator
    watch: Watch
    total: int
    done: int = 0

    def seconds_a_byte(self, turn: Turn, again: bool) -> float:
        """What a round took, the same on all ranks: of the slowest, by the bytes that others than the reader want."""
        start = time.perf_counter()
        self.read([turn], again)
        taken = torch.tensor([[[time.perf_counter() - start]]], dtype=torch.float64)
        return float(self.everyone.gather(taken, [1] * self.everyone.size).max()) / _shared(turn)

    def read(self, turns: Sequence[Turn], again: bool) -> None:
        """Read rounds. A chunk's other ranks get it sent, or read it `again`, each its own chunk first."""
        rank = self.everyone.rank
        orders = [sorted(turn, key=lambda chunk: chunk.reader != rank) for turn in turns]
        chunks = (chunk for order in orders for chunk in order if rank in chunk.read_by(again))
        with _Reader(self.files, chunks) as reader:
            for order in orders:
                if self.watch.is_cancelled():
                    raise Cancelled
                for chunk in order:
                    if rank in chunk.read_by(again):
                        self._put_and_send(chunk, reader.next(), again)
                for chunk in order:
                    if rank in chunk.ranks and rank not in chunk.read_by(again):
                        received = self.everyone.receive((chunk.nbytes,), torch.uint8, chunk.reader)
                        self.mine.put(chunk, received)
                self.everyone.finish_sending()
                self.done += sum(chunk.nbytes for chunk in order)
                self.watch.progress(self.done, self.total)

    def _put_and_send(self, chunk: Chunk, data: Tensor, again: bool) -> None:
        if chunk.reader == self.everyone.rank:
            self.watch.read(chunk.nbytes)
        for rank in chunk.ranks:
            if rank not in chunk.read_by(again):
                self.everyone.send(data, rank, "loading")
        self.mine.put(chunk, data)


def _shared(turn: Turn) -> int:
    """Bytes of a round that others than their reader want, each as often as it is wanted."""
    return sum(chunk.nbytes * (len(chunk.ranks) - 1) for chunk in turn)


class _ByFile:
    """A rank's wants, to be found by the bytes that have come; chunks come nearly in the file's order."""

    def __init__(self, wants: Sequence[Want]) -> None:
        self._wants: dict[int, list[Want]] = defaultdict(list)
        self._left = {id(want): want.stop - want.start for want in wants}
        for want in sorted(wants, key=lambda want: want.start):
            self._wants[want.file].append(want)

    def put(self, chunk: Chunk, data: Tensor) -> None:
        """Give each want its part of a chunk."""
        for want in self._wants[chunk.file]:
            if want.start >= chunk.stop:
                break
            begin, end = max(want.start, chunk.start), min(want.stop, chunk.stop)
            if begin < end:
                want.put(begin - want.start, data[begin - chunk.start : end - chunk.start])
                self._left[id(want)] -= end - begin
        self._wants[chunk.file] = [want for want in self._wants[chunk.file] if self._left[id(want)]]


class _Reader:
    """Reads chunks of files in order, each while the one before is being used; two buffers take turns."""

    def __init__(self, files: Sequence[Path], chunks: Iterator[Chunk]) -> None:
        self._files = files
        self._open: dict[int, int] = {}
        self._chunks = chunks
        pinned = torch.cuda.is_initialized()  # for a copy to a GPU at full speed
        self._buffers = cycle([torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)])
        self._thread = ThreadPoolExecutor(1, "parallel-reading")
        self._coming: Future[Tensor] | None = None

    def __enter__(self) -> _Reader:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for descriptor in self._open.values():
            os.close(descriptor)

    def next(self) -> Tensor:
        """The bytes of the next chunk, until it is called again. Raises Refused."""
        assert self._coming is not None
        data = self._coming.result()
        self._begin()
        return data

    def _begin(self) -> None:
        chunk = next(self._chunks, None)
        if chunk is not None:
            self._coming = self._thread.submit(self._read, chunk.file, chunk.start, next(self._buffers)[: chunk.nbytes])

    def _read(self, file: int, start: int, into: Tensor) -> Tensor:
        """Fill a buffer. Raises Refused."""
        name, done, nbytes = self._files[file].name, 0, into.numel()
        view = memoryview(into.numpy().data)
        try:
            if file not in self._open:
                self._open[file] = os.open(self._files[file], os.O_RDONLY | os.O_CLOEXEC)
            while done < nbytes:
                count = os.preadv(self._open[file], [view[done:]], start + done)
                if count == 0:
                    raise Refused(
                        f"{name} ended at byte {start + done} while it was being read: wait until it is complete, or "
                        "download it again."
                    )
                done += count
        except OSError as error:
            raise Refused(
                f"{name} cannot be read at byte {start + done} ({error.strerror}): check the disk, or download it again."
            ) from error
        return into


def _wants_of_all(wants: Sequence[Want], everyone: Communicator) -> list[list[tuple[int, int, int]]]:
    """Every rank's (file, start, stop). A collective."""
    ours = torch.tensor([(w.file, w.start, w.stop) for w in wants], dtype=torch.int64).view(1, -1, 3)
    counts = everyone.gather(torch.tensor([[[ours.shape[1]]]]), [1] * everyone.size).flatten().tolist()
    theirs = everyone.gather(ours, counts)[0].split(counts)
    return [[(int(f), int(a), int(b)) for f, a, b in rank.tolist()] for rank in theirs]


def _chunks(wants: Sequence[Sequence[tuple[int, int, int]]], machines: Sequence[int]) -> list[Chunk]:
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


def _segments(wants: Sequence[Sequence[tuple[int, int, int]]]) -> Iterator[Segment]:
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
    held: Segment | None = None
    for segment in segments:
        if held is not None:
            joins = (held[0], held[2], held[3]) == (segment[0], segment[1], segment[3])
            if joins and segment[2] - held[1] <= CHUNK_BYTES:
                held = (*held[:2], *segment[2:])
                continue
            yield held
        held = segment
    if held is not None:
        yield held


def _rounds(chunks: Sequence[Chunk], ranks: int) -> Iterator[Turn]:
    by_reader = [[chunk for chunk in chunks if chunk.reader == rank] for rank in range(ranks)]
    for turn in zip_longest(*by_reader):
        yield [chunk for chunk in turn if chunk is not None]
