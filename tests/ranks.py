"""Real ranks for tests: forked processes that join a gloo group, run a function and return its result."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 60


def run_ranks(
    world_size: int, function: Callable[[int], Any], timeout: float = TIMEOUT, *, joined: bool = True
) -> list[Any]:
    """`function(rank)` on every rank of a new gloo group, or of one that it makes; the results in rank order.

    Forking needs no import, so eight ranks are up in well under a second.

    Args:
        joined: whether the ranks are a group when the function is called.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(
                target=_rank, args=(rank, world_size, Path(directory) if joined else None, function, theirs)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = [_receive(pipe, rank, timeout) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    failures = [error for _, error in results if error]
    assert not failures, "\n".join(failures)
    return [result for result, _ in results]


def _receive(pipe: Connection, rank: int, timeout: float) -> tuple[Any, str]:
    if not pipe.poll(timeout):
        return None, f"rank {rank} did not answer within {timeout} s"
    try:
        return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True)  # type: ignore[no-any-return]
    except EOFError:
        return None, f"rank {rank} died"


def _rank(rank: int, world_size: int, directory: Path | None, function: Callable[[int], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        if directory is not None:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{directory / 'rendezvous'}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=TIMEOUT),
            )
        answer = (function(rank), "")
        dist.barrier()
    except BaseException:
        answer = (None, f"rank {rank}: {traceback.format_exc()}")
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
