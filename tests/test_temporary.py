"""Temporary files and folders of killed processes are removed, and other files stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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

RANKS = """
import os, time
from parallel_backend.models.comfyui.proof.ranks import run_in_turn

def work(rank):
    os.write(1, b"%d\\n" % rank)  # at once, as both write to one pipe
    time.sleep(600)

run_in_turn([(2, work)])
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
def test_killed_ranks_leave_no_file(tmp_path: Path, number: signal.Signals) -> None:
    """The proof of a class, and a derivation, fork such ranks."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", RANKS], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"0\n", "1\n"}
        os.killpg(process.pid, number)
    assert [*tmp_path.rglob("*")] == []


def test_each_run_of_ranks_meets_in_a_file_of_its_own() -> None:
    def work(rank: int) -> bytes:
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        return b"%d" % int(total)

    assert run_in_turn([(2, work), (3, work)]) == [[b"3", b"3"], [b"6", b"6", b"6"]]
