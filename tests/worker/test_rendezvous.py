"""A worker's way to the host and to the other ranks."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from parallel_backend.worker.process.environment import Environment, LaunchedWorker
from parallel_backend.worker.process.rendezvous import connect_to_host
from tests.support.ranks import run_ranks


def test_a_worker_whose_folder_is_gone_fails_at_once(tmp_path: Path) -> None:
    """A host that gives up a start, or another worker of a dead host, may remove the folder before this worker needs it."""

    def worker(rank: int) -> bool:
        reading, _ = os.pipe()
        launched = LaunchedWorker(str(tmp_path / "store"), str(tmp_path / "socket"), 1, reading, str(tmp_path))
        with socket.socket(socket.AF_UNIX) as host:
            host.bind(launched.socket)
            host.listen()
            rendezvous = connect_to_host(Environment(rank, 2, torch.device("cpu"), launched, (), "", None))
            shutil.rmtree(tmp_path)
            with pytest.raises(FileNotFoundError, match=launched.rendezvous):
                rendezvous.store()
        return True

    assert run_ranks(1, worker, timeout=10) == [True]
