"""Reads byte ranges of files into memory in bounded chunks. Ranks of one machine read bytes that they share only once.

All ranks know the wants of all ranks, so each computes the same schedule: rounds in which every rank reads at most one chunk.
Other ranks of its machine may want the chunk too. They get it from the reader's host memory or device, or read it after the
reader, when the system has it in its page cache. The first rounds show which way is fastest here. Between rounds all ranks
agree on whether the user has cancelled.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from ...comm.communicator import Communicator
from ...errors import Cancelled, Refused
from ...transfers import empty_pinned
from .rounds import CHUNK_BYTES, Chunk, Range, Turn, Way, rounds, shared_bytes

TRIALS = 2
"""Number of rounds for which each way of sharing is tried."""


@dataclass(frozen=True)
class WantedRange:
    """Bytes `start` to `stop` of a file, and the function that receives them.

    Attributes:
        file: the file's number in the checkpoint.
        put: called as `put(offset, data)` with a part of the bytes, from `offset` after `start` on. `data` is uint8 and must be
            copied at once.
    """

    file: int
    start: int
    stop: int
    put: Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Neighbours:
    """All ranks, and the machines that they are on.

    Attributes:
        everyone: all ranks, on CPU tensors.
        machines: the number of each rank's machine.
        links: the same ranks on their devices, or None if the devices do not reach each other without the host.
    """

    everyone: Communicator
    machines: tuple[int, ...]
    links: Communicator | None = None

    @property
    def ways(self) -> tuple[Way, ...]:
        """Return the available ways of sharing the bytes that a rank has read."""
        return (Way.SENT, Way.AGAIN) if self.links is None else tuple(Way)


@dataclass(frozen=True)
class Watch:
    """Callbacks that watch and cancel the reading of weights.

    Attributes:
        is_cancelled: returns True if the user has cancelled, the same on all ranks.
        progress: called with the bytes that have arrived and the bytes that will arrive, of all ranks together.
        read: called with the number of bytes of each chunk that this rank reads from disk.
    """

    is_cancelled: Callable[[], bool]
    progress: Callable[[int, int], None]
    read: Callable[[int], None]


def read_ranges(
    files: Sequence[Path], wants: Sequence[WantedRange], neighbours: Neighbours, watch: Watch, way: Way | None = None
) -> None:
    """Read the bytes that this rank wants. This is a collective of all ranks, each with its own wants of the same files.

    Args:
        way: the way in which ranks share bytes that one of them reads. None means the fastest.

    Raises:
        Refused: a file ends early or cannot be read.
        Cancelled: `watch.is_cancelled` returned True, on all ranks alike.
    """
    everyone, ways = neighbours.everyone, neighbours.ways
    turns = rounds(_wants_of_all(wants, everyone), neighbours.machines)
    sharing = [turn for turn in turns if shared_bytes(turn)]
    reading = _Reading(files, _ByFile(wants), neighbours, watch, sum(chunk.nbytes for turn in turns for chunk in turn))
    if way is None:
        trials = sharing[: TRIALS * len(ways)]
        turns = [turn for turn in turns if not any(turn is tried for tried in trials)]
        seconds = {
            tried: min((reading.seconds_a_byte(turn, tried) for turn in trials[first :: len(ways)]), default=math.inf)
            for first, tried in enumerate(ways)
        }
        way = min(ways, key=lambda tried: seconds[tried])
    reading.read(turns, way)


@dataclass
class _Reading:
    """The state of reading the bytes that all ranks want."""

    files: Sequence[Path]
    mine: _ByFile
    neighbours: Neighbours
    watch: Watch
    total: int
    done: int = 0

    def seconds_a_byte(self, turn: Turn, way: Way) -> float:
        """Read a round, and return its seconds per byte that other ranks than the reader want.

        The number is the same on all ranks: that of the slowest.
        """
        start, everyone = time.perf_counter(), self.neighbours.everyone
        self.read([turn], way)
        if self.neighbours.links is not None and self.neighbours.links.device.type == "cuda":
            torch.cuda.synchronize(self.neighbours.links.device)
        elapsed = torch.tensor([[[time.perf_counter() - start]]], dtype=torch.float64)
        return float(everyone.all_gather(elapsed, [1] * everyone.size).max()) / shared_bytes(turn)

    def read(self, turns: Sequence[Turn], way: Way) -> None:
        """Read rounds. Each rank reads its own chunk first. Raises Refused and Cancelled as `read_ranges` does."""
        rank = self.neighbours.everyone.rank
        orders = [sorted(turn, key=lambda chunk: chunk.reader != rank) for turn in turns]
        chunks = (chunk for order in orders for chunk in order if rank in chunk.read_by(way))
        with _ChunkReader(self.files, chunks) as reader:
            for order in orders:
                if self.watch.is_cancelled():
                    raise Cancelled
                if way is Way.LINKED and shared_bytes(order):
                    self._over_links(order, reader)
                else:
                    self._through_host(order, reader, way)
                self.done += sum(chunk.nbytes for chunk in order)
                self.watch.progress(self.done, self.total)

    def _through_host(self, order: Turn, reader: _ChunkReader, way: Way) -> None:
        """Read a round. Other ranks that want a chunk receive it from the reader's host memory, or read it again."""
        everyone = self.neighbours.everyone
        for chunk in order:
            if everyone.rank in chunk.read_by(way):
                data = self._next(chunk, reader)
                for rank in chunk.ranks:
                    if rank not in chunk.read_by(way):
                        everyone.send(data, rank, "loading")
                self.mine.put(chunk, data)
        for chunk in order:
            if everyone.rank in chunk.ranks and everyone.rank not in chunk.read_by(way):
                self.mine.put(chunk, everyone.receive((chunk.nbytes,), torch.uint8, chunk.reader))
        everyone.finish_sending()

    def _over_links(self, order: Turn, reader: _ChunkReader) -> None:
        """Read a round to the devices, and send other ranks their chunks from there. This is a collective of all ranks."""
        links = self.neighbours.links
        assert links is not None
        theirs = torch.empty(0, dtype=torch.uint8, device=links.device)
        for chunk in order:
            if chunk.reader == links.rank:
                data = self._next(chunk, reader).to(links.device)
                self.mine.put(chunk, data)
                theirs = data.repeat(len(chunk.ranks) - 1)
        leaving = [sum(chunk.bytes_between(links.rank, rank) for chunk in order) for rank in range(links.size)]
        coming = [sum(chunk.bytes_between(rank, links.rank) for chunk in order) for rank in range(links.size)]
        received = links.all_to_all(theirs, leaving, coming, "loading").split(coming)
        for chunk in order:
            if chunk.bytes_between(chunk.reader, links.rank):
                self.mine.put(chunk, received[chunk.reader])

    def _next(self, chunk: Chunk, reader: _ChunkReader) -> Tensor:
        """Return the bytes of a chunk that this rank reads. They are valid until the next call."""
        if chunk.reader == self.neighbours.everyone.rank:
            self.watch.read(chunk.nbytes)
        return reader.next()


class _ByFile:
    """A rank's wants, to be found by the bytes that have arrived. Chunks arrive nearly in the file's order."""

    def __init__(self, wants: Sequence[WantedRange]) -> None:
        self._wants: dict[int, list[WantedRange]] = defaultdict(list)
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


class _ChunkReader:
    """A reader of chunks of files in order. It reads each chunk while the previous one is in use. Two buffers take turns."""

    def __init__(self, files: Sequence[Path], chunks: Iterator[Chunk]) -> None:
        self._files = files
        self._open: dict[int, int] = {}
        self._chunks = chunks
        buffer = empty_pinned if torch.cuda.is_initialized() else torch.empty  # pinned: copies to a GPU at full speed
        self._buffers = cycle([buffer((CHUNK_BYTES,), dtype=torch.uint8) for _ in range(2)])
        self._thread = ThreadPoolExecutor(1, "parallel-reading")
        self._coming: Future[Tensor] | None = None

    def __enter__(self) -> _ChunkReader:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        for descriptor in self._open.values():
            os.close(descriptor)

    def next(self) -> Tensor:
        """Return the bytes of the next chunk, which are valid until the next call. Raises Refused."""
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


def _wants_of_all(wants: Sequence[WantedRange], everyone: Communicator) -> list[list[Range]]:
    """Return every rank's wants as (file, start, stop). This is a collective."""
    ours = torch.tensor([(w.file, w.start, w.stop) for w in wants], dtype=torch.int64).view(1, -1, 3)
    counts = everyone.all_gather(torch.tensor([[[ours.shape[1]]]]), [1] * everyone.size).flatten().tolist()
    theirs = everyone.all_gather(ours, counts)[0].split(counts)
    return [[(int(f), int(a), int(b)) for f, a, b in rank.tolist()] for rank in theirs]
