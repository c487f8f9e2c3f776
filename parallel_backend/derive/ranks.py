"""Ranks on the CPU, forked from this process, which join a gloo group."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .calls import in_a_line

PATIENCE = 2.0
"""Seconds for the others to fail, once a rank has."""

ENDED = "its process ended"

Work = Callable[[], Any]
"""What a rank does; the result is one that JSON can say."""


def run_ranks(ranks: int, work: Work, limit: float) -> list[Any] | str:
    """What each of so many ranks gives, in their order, or why there is nothing.

    Args:
        limit: seconds until they are ended.
    """
    fork = multiprocessing.get_context("fork")
    answers: dict[int, tuple[Any, str]] = {}
    with tempfile.TemporaryDirectory() as directory:
        pipes: dict[Any, int] = {}
        processes = []
        for rank in range(ranks):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_rank, args=(rank, ranks, work, Path(directory), limit, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        end = time.monotonic() + limit
        while pipes and (ready := wait(list(pipes), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                answers[pipes.pop(pipe)] = answer = _answer(pipe)
                if answer[1]:
                    end = min(end, time.monotonic() + PATIENCE)
        for process in processes:
            process.kill()
            process.join()
    failed = [error for _, error in answers.values() if error]
    if failed:
        return min(failed, key=_follows_another)
    return [answers[rank][0] for rank in range(ranks)] if len(answers) == ranks else f"no end within {limit:.0f} s"


def _follows_another(error: str) -> bool:
    """Whether a failure is that of a rank which lost another one."""
    return "onnection" in error or ENDED in error


def _answer(pipe: Any) -> tuple[Any, str]:
    try:
        result, error = json.loads(pipe.recv_bytes())
    except EOFError:
        return None, ENDED
    return result, error


def _rank(rank: int, ranks: int, work: Work, directory: Path, limit: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # where a declaration is wrong, gloo may end the process with a page of words
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
        answer = (None, in_a_line(error))
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()
