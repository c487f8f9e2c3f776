"""Ranks of this process's own: forked processes that join a gloo group, run a function and return its result."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 60


class RankFailed(RuntimeError):
    """A rank's function raised, or its process ended; of each such rank, what it raised."""


def run_ranks(
    world_size: int, function: Callable[[int], Any], timeout: float = TIMEOUT, *, joined: bool = True
) -> list[Any]:
    """`function(rank)` on every rank of a new gloo group, or of one that it makes; the results in rank order.

    Forking needs no import, so eight ranks are up in well under a second.

    Args:
        joined: whether the ranks are a group when the function is called.
    """
    (results,) = run_in_turn([(world_size, function)], timeout, joined=joined)
    return results


def run_in_turn(
    runs: Sequence[tuple[int, Callable[[int], Any]]], timeout: float = TIMEOUT, *, joined: bool = True
) -> list[list[Any]]:
    """What `run_ranks` does for each world size and function, on ranks that are forked once for all of them.

    Forking copies the page tables of this process, which takes longer than a small model's forward.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(max(world_size for world_size, _ in runs)):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_rank, args=(rank, runs, Path(directory) if joined else None, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_receive(pipe, rank, timeout * len(runs)) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failures = [error for _, error in answers if error]
    if failures:
        raise RankFailed("\n".join(failures))
    return [[results[run] for results, _ in answers[:world_size]] for run, (world_size, _) in enumerate(runs)]


def _receive(pipe: Connection, rank: int, timeout: float) -> tuple[Any, str]:
    if not pipe.poll(timeout):
        return None, f"rank {rank} did not answer within {timeout} s"
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True)  # type: ignore[no-any-return]
    except EOFError:
        return None, f"rank {rank} died"


def _rank(
    rank: int, runs: Sequence[tuple[int, Callable[[int], Any]]], directory: Path | None, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    results: list[Any] = []
    try:
        for number, (world_size, function) in enumerate(runs):
            results.append(None)
            if rank >= world_size:
                continue
            if dist.is_initialized():
                dist.destroy_process_group()
            if directory is not None:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{directory / f'rendezvous-{number}'}",
                    rank=rank,
                    world_size=world_size,
                    timeout=datetime.timedelta(seconds=TIMEOUT),
                )
            results[-1] = function(rank)
            dist.barrier()
        answer: tuple[list[Any] | None, str] = (results, "")
    except BaseException:
        answer = (None, f"rank {rank}, run {len(results)} of {len(runs)}: {traceback.format_exc()}")
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
