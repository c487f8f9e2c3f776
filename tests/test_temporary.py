"""Temporary files and folders of killed processes are removed, and other files stay."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel_backend.models.comfyui.proof.ranks import run_in_turn
from parallel_backend.temporary import PREFIX, OwnedFolder, sweep

OWNER = """
import sys, time
from parallel_backend.temporary import OwnedFolder
folder = OwnedFolder(sys.argv[1])
(folder.path / "socket").touch()
(folder.path / "link").symlink_to(sys.argv[2])
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_killed_owners_folder_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-c", OWNER, str(temporary), str(elsewhere)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner, OwnedFolder(str(temporary)) as ours:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        sweep(str(temporary))
        assert (theirs / "socket").exists() and ours.exists()
        owner.kill()
        owner.wait()
        sweep(str(temporary))
        assert not theirs.exists() and ours.exists()
    assert not ours.exists()
    assert (elsewhere / "file").exists()


def test_files_and_folders_of_others_stay(tmp_path: Path) -> None:
    """Files, links, folders of other names, and folders that others may read stay."""
    other, link, file, open_to_all = (tmp_path / name for name in ("tmp1234", f"{PREFIX}a", f"{PREFIX}b", f"{PREFIX}c"))
    other.mkdir(mode=0o700)
    link.symlink_to(other)
    file.touch()
    open_to_all.mkdir(mode=0o755)
    sweep(str(tmp_path))
    sweep(str(tmp_path / "missing"))
    assert {*tmp_path.iterdir()} == {other, link, file, open_to_all}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_ranks_leave_no_file(tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof of a class, and a derivation, fork such ranks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = multiprocessing.get_context("fork").SimpleQueue()

    def parent() -> None:
        os.setsid()
        run_in_turn([(2, work)])

    def work(rank: int) -> bytes:
        started.put(rank)
        time.sleep(600)
        return b""

    process = multiprocessing.get_context("fork").Process(target=parent)
    process.start()
    assert process.pid is not None and {started.get(), started.get()} == {0, 1}
    os.killpg(process.pid, number)
    process.join()
    assert [*tmp_path.rglob("*")] == []


def test_each_run_of_ranks_meets_in_a_file_of_its_own() -> None:
    def work(rank: int) -> bytes:
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        return b"%d" % int(total)

    assert run_in_turn([(2, work), (3, work)]) == [[b"3", b"3"], [b"6", b"6", b"6"]]
