"""Ranks on the CPU, forked from this process, which join a gloo group."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Work = Callable[[], Any]
"""What a rank does; the result is one that JSON can say."""


def run_in_turn(works: Sequence[tuple[int, Work]], limit: float) -> list[list[Any] | str]:
    """For each number of ranks and what they do, their results, or why there are none; the ranks are forked for each anew.

    Args:
        limit: seconds for one of them.
    """
    return [_run(ranks, work, limit) for ranks, work in works]


def _run(ranks: int, work: Work, limit: float) -> list[Any] | str:
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    end = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as directory:
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_rank, args=(rank, ranks, work, Path(directory), limit, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = [_answer(pipe, end) for pipe in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
    failed = [error for _, error in answers if error]
    return min(failed, key=_late) if failed else [result for result, _ in answers]


def _late(error: str) -> bool:
    """Whether a failure may be that of a rank which waited for one that failed."""
    return "onnection" in error or "imed out" in error or "no answer" in error


def _answer(pipe: Connection, end: float) -> tuple[Any, str]:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        return None, "no answer in time"
    try:
        return json.loads(pipe.recv_bytes())
    except EOFError:
        return None, "its process ended"


def _rank(rank: int, ranks: int, work: Work, directory: Path, limit: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory / 'rendezvous'}",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=limit),
        )
        answer: tuple[Any, str] = (work(), "")
        dist.barrier()
    except BaseException as error:
        answer = (None, f"{type(error).__name__}: {error}".partition("\n")[0])
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()
