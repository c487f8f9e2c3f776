"""Forked ranks of this process that join a gloo group, run functions and send back their results."""

from __future__ import annotations

import datetime
import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist

from ....temporary import memory_file, path_of

TIMEOUT = 60.0
"""Seconds for a run, and for each wait of a rank for another rank."""

PATIENCE = 2.0
"""Seconds for the other ranks to fail after the first failure."""

ENDED = "its process ended"

Work = Callable[[int], bytes]
"""The function that a rank runs. Its result is bytes, so that nothing is unpickled."""


class RankFailed(RuntimeError):
    """A rank's function raised an exception, or its process ended; the message lists the failure of each such rank.

    Attributes:
        line: the error in one line, preferably of a rank that did not fail only because another rank did.
    """

    def __init__(self, line: str, output: Sequence[str]) -> None:
        super().__init__("\n".join(output))
        self.line = line


class _RankResult(msgspec.Struct, frozen=True):
    """The results of a rank, or its error in one line and with its traceback."""

    results: list[bytes]
    error: str = ""
    output: str = ""


@dataclass(frozen=True)
class _Fork:
    """A forked rank: its process id, and the read end of the pipe for its result."""

    process: int
    pipe: int


def run_in_turn(
    runs: Sequence[tuple[int, Work]], timeout: float = TIMEOUT, *, joined: bool = True
) -> list[list[bytes]]:
    """Run `function(rank)` on every rank of a new gloo group, for each pair of a world size and a function.

    The ranks are forked once for all runs. A fork copies the page tables of this process, which takes longer than the forward
    of a small model. New processes would need seconds for their imports.

    Args:
        runs: pairs of a world size and a function.
        timeout: seconds for each run.
        joined: True to make the group before the function runs, False to let the function make a group.

    Returns:
        The results of each run, in rank order.

    Raises:
        RankFailed: a rank has no result.
    """
    world_size = max(size for size, _ in runs)
    with ExitStack() as stack:
        files = [stack.enter_context(memory_file("rendezvous")) for _ in runs if joined]
        forks: list[_Fork] = []
        try:
            for rank in range(world_size):
                forks.append(_forked(rank, runs, files, timeout))
            answers = _answers(forks, timeout * len(runs))
        finally:
            for fork in forks:
                os.kill(fork.process, signal.SIGKILL)
                os.waitpid(fork.process, 0)
                os.close(fork.pipe)
    failed = [f"rank {rank}: {answer.output or answer.error}" for rank, answer in answers.items() if answer.error]
    if failed:
        raise RankFailed(min((each.error for each in answers.values() if each.error), key=_follows_another), failed)
    return [[answers[rank].results[run] for rank in range(size)] for run, (size, _) in enumerate(runs)]


def in_a_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")


def _follows_another(error: str) -> bool:
    """Return True if a rank failed because another rank was lost."""
    return "onnection" in error or ENDED in error


def _answers(forks: Sequence[_Fork], seconds: float) -> Mapping[int, _RankResult]:
    """Return the result of each rank, once all ranks have sent theirs or the time is over."""
    waiting = {fork.pipe: rank for rank, fork in enumerate(forks)}
    read = {pipe: bytearray() for pipe in waiting}
    answers = {rank: _RankResult([], f"it did not end within {seconds:.0f} s") for rank in waiting.values()}
    end = time.monotonic() + seconds
    while waiting and (ready := select.select([*waiting], [], [], max(0.0, end - time.monotonic()))[0]):
        for pipe in ready:
            more = os.read(pipe, 1 << 20)
            read[pipe] += more
            if more:
                continue
            rank = waiting.pop(pipe)
            answers[rank] = _decoded(bytes(read[pipe]))
            if answers[rank].error:
                end = min(end, time.monotonic() + PATIENCE)
    return answers


def _decoded(output: bytes) -> _RankResult:
    try:
        return msgspec.msgpack.decode(output, type=_RankResult)
    except msgspec.MsgspecError:
        return _RankResult([], ENDED)


def _forked(rank: int, runs: Sequence[tuple[int, Work]], files: Sequence[int], timeout: float) -> _Fork:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        os.close(write)
        return _Fork(process, read)
    try:
        gc.freeze()  # the collector would visit, and so copy, all objects of the process that has forked this rank
        with os.fdopen(write, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(_answer(rank, runs, files, timeout)))
        sys.stdout.flush()
    finally:
        os._exit(0)


def _answer(rank: int, runs: Sequence[tuple[int, Work]], files: Sequence[int], timeout: float) -> _RankResult:
    torch.set_num_threads(1)
    results: list[bytes] = []
    try:
        for number, (world_size, function) in enumerate(runs):
            results.append(b"")
            if rank >= world_size:
                continue
            if dist.is_initialized():
                dist.destroy_process_group()
            if files:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{path_of(files[number])}",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=timeout),
                )
            results[-1] = function(rank)
            dist.barrier()
    except BaseException as error:
        return _RankResult([], in_a_line(error), f"run {len(results)} of {len(runs)}: {traceback.format_exc()}")
    return _RankResult(results)
