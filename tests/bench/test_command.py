"""The command: what it refuses, and a whole benchmark through real ComfyUIs, to its end and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from parallel_backend.bench.__main__ import main
from parallel_backend.bench.record import STOCK, Record, decoded
from tests.selection import thorough

REPO = Path(__file__).parents[2]
COMFYUI = os.environ["COMFYUI_PATH"]
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--comfyui", os.devnull), "/dev/null is not ComfyUI's folder: name it with --comfyui."),
        (("--comfyui", COMFYUI, "--out", "/no such folder"), "/no such folder is no folder"),
        (("--comfyui", COMFYUI, "--graph", "/none.json"), "/none.json holds no graph"),
        (("--comfyui", COMFYUI, "--devices", "9"), "asks for GPU 9"),
        (("--comfyui", COMFYUI, "--devices", "tcp://10.0.0.1:29600"), "are other machines' devices"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # which would outlive this test
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m parallel_backend.bench: ") and said in line


def begin(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command on the small picture."""
    command = [sys.executable, "-m", "parallel_backend.bench", "--comfyui", COMFYUI, "--out", str(out), *arguments]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def record_in(out: Path) -> Record:
    (file,) = out.glob("*.json")
    return decoded(file.read_bytes())


@thorough
def test_stock_and_ours_draw_the_same_latent(tmp_path: Path) -> None:
    with begin(tmp_path, "--steps", "4") as command:
        said, _ = command.communicate(timeout=800)
    assert command.returncode == 0, said
    found = record_in(tmp_path)
    assert [side.name for side in found.sides] == [STOCK, "cpu:1", "cpu:2"]
    assert not any(side.failed for side in found.sides), said
    assert all(side.error is not None and side.error <= TOLERANCE for side in found.sides[1:])
    assert found.sides[0].error is None
    for side in found.sides:
        assert side.step > 0 and side.peak["cpu"] > 1 << 28
        assert side.first is not None and side.then is not None and side.then.denoise > 0
    assert [side.sent > 0 for side in found.sides] == [False, False, True]
    assert found.links is not None and found.links.ranks == 2
    assert f"Kept in {tmp_path}" in said and "| 2026" not in said.partition("\n")[0]


@thorough
def test_what_was_done_before_an_interrupt_is_kept_and_nothing_is_left(tmp_path: Path) -> None:
    with begin(tmp_path, "--steps", "4", "--devices", "cpu:1", "cpu:2") as command:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        below = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGTERM)
        said, _ = command.communicate(timeout=120)
    assert command.returncode == 130, said
    assert [side.name for side in record_in(tmp_path).sides] == [STOCK]
    assert "interrupted: what was done before is kept." in said
    assert not psutil.wait_procs(below, timeout=30)[1]
