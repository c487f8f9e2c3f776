"""The check that GPUs are free to be measured, and their peaks, from answers in the form of the driver's tool."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel_backend.bench.cards import check_free, commit, driver
from parallel_backend.bench.graphs import NotMeasured
from parallel_backend.bench.peaks import watched_gpus, watched_memory
from parallel_backend.gpus import MEBIBYTE, Gpu, GpuProcess, ask_holders
from tests.support.ranks import run_ranks

FIRST, SECOND = "GPU-8d3f2c5e-6f0b-2f7b-63c1-1f2f1b0b7c11", "GPU-1b9c1f60-0f55-9a7c-2d5e-0c5b5a1f2e22"
ANSWER = f"""\
{FIRST}, 4242, /usr/bin/python3, 18110
{SECOND}, 17, game, with a comma, 312
{SECOND}, 18, /usr/bin/desktop, [N/A]
No devices were found
"""
SIZE = 24_000_000_000


def gpu(uuid: str, free: int | None) -> Gpu:
    return Gpu("RTX 4090", SIZE, free, (8, 9), 128, False, uuid=uuid)


def answering(tmp_path: Path, text: str) -> tuple[str, ...]:
    """Return a command that prints the text."""
    (tmp_path / "answer").write_text(text)
    return ("cat", str(tmp_path / "answer"))


def test_a_process_that_holds_a_gigabyte_is_named(tmp_path: Path) -> None:
    holders = ask_holders(answering(tmp_path, ANSWER))
    assert holders == (
        GpuProcess(FIRST, 4242, "/usr/bin/python3", 18110 * MEBIBYTE),
        GpuProcess(SECOND, 17, "game,with a comma", 312 * MEBIBYTE),
        GpuProcess(SECOND, 18, "/usr/bin/desktop", None),
    )
    assert ask_holders((str(tmp_path / "no such tool"),)) == ()
    gpus = gpu(FIRST, SIZE - 18110 * MEBIBYTE), gpu(SECOND, SIZE - 400 * MEBIBYTE)
    with pytest.raises(NotMeasured, match=r"^Process 4242 \(/usr/bin/python3\) holds 19.0 GB of GPU 0 \(RTX 4090\)"):
        check_free(gpus, [0, 1], holders)
    check_free(gpus, [1], holders)


def test_own_processes_may_hold_any_memory_and_unknown_ones_less_than_a_gigabyte() -> None:
    mine, other = (GpuProcess(FIRST, process, "python3", 9_000_000_000) for process in (1, 2))
    with pytest.raises(
        NotMeasured, match=r"^2.00 GB of GPU 0 \(RTX 4090\) are in use by a process that the driver does not"
    ):
        check_free([gpu(FIRST, SIZE - 2_000_000_000)], [0], [])
    check_free([gpu(FIRST, SIZE - 900_000_000)], [0], [])
    check_free([gpu(FIRST, None)], [0], [])
    for holders in ([mine], []):
        check_free([gpu(FIRST, SIZE - 9_500_000_000)], [0], holders, own=[1])
    full = [gpu(FIRST, SIZE - 18_500_000_000)]
    with pytest.raises(NotMeasured, match=r"^Process 2 \(python3\) holds 9.00 GB"):
        check_free(full, [0], [mine, other], own=[1])
    with pytest.raises(NotMeasured, match="in use by a process that the driver does not name"):
        check_free(full, [0], [mine], own=[1])


def test_a_gpus_peak_excludes_the_memory_in_use_before(tmp_path: Path) -> None:
    used = "".join(f"{FIRST}, {count}\n{SECOND}, 5\nother, 9000\n" for count in (300, 9000, 700))
    with watched_gpus({FIRST: "cuda:0", SECOND: "cuda:1"}, answering(tmp_path, used)) as peaks:
        deadline = time.monotonic() + 60
        while len(peaks.growth) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert peaks.growth == {"cuda:0": 8700 * MEBIBYTE, "cuda:1": 0}


def test_the_peak_includes_the_host_memory_of_a_child() -> None:
    """The watched process is another one, because this one may have more children, which end while it is watched."""
    size = 200 << 20
    code = f"import time; held = bytearray({size}); held[::4096] = b'1' * len(held[::4096]); print(); time.sleep(600)"

    def growth(_: int) -> int:
        with watched_memory() as peaks, subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            deadline = time.monotonic() + 60
            while peaks.growth["cpu"] < size and time.monotonic() < deadline:
                time.sleep(0.05)
            child.kill()
        return peaks.growth["cpu"]

    (grown,) = run_ranks(1, growth)
    assert size <= grown < 2 * size


def test_the_versions_of_driver_and_pack_are_read(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025\nGCC version:  gcc 13.2.0\n"
    (tmp_path / "version").write_text(text)
    assert driver(tmp_path / "version") == "570.86.15"
    assert driver(tmp_path / "none") == ""
    assert commit(tmp_path).startswith("code ")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    clean = commit(tmp_path)
    assert clean and not clean.endswith("+")
    (tmp_path / "version").write_text("changed")
    assert commit(tmp_path) == f"{clean}+"
