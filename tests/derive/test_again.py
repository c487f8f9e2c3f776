"""A derivation that failed for lack of time, or for a reason that may pass, is tried again on a later request."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from parallel_backend.comfyui_folder import comfyui_version
from parallel_backend.host.deriving import COMMAND, Derivation
from tests.derive.requesting import NAME, prompt_of
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_tiny

COMFYUI = os.environ["COMFYUI_PATH"]

PATIENCE = 3600.0
"""Seconds to wait for a derivation on a machine that other tests share."""


def derivation(folder: Path, seconds: float, pause: float) -> Derivation:
    file = str(folder / f"{NAME}.safetensors")
    return Derivation("some class", NAME, file, COMFYUI, comfyui_version(COMFYUI), seconds, folder / "kept", pause)


def test_a_derivation_that_took_too_long_is_tried_again_after_a_pause(tmp_path: Path) -> None:
    """The message says when. Until then no derivation begins."""
    prompt = prompt_of(save_tiny(tmp_path, NAME), 7)
    tried = derivation(tmp_path, seconds=0.6, pause=1.5)
    tried.wait([prompt], lambda: False)
    assert tried.failed([prompt.kind]) == (
        "working out how to split it failed (it took longer than 1 s; queue again in 1 min for another try)"
    )
    time.sleep(1.6)
    assert tried.failed([prompt.kind]) == ""
    assert tried.begin([prompt])
    tried.stop()
    assert tried.failed([prompt.kind]) == ""
    assert tried.found([prompt.kind]) is None


def test_a_derivation_leaves_nothing_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of a prompt stays there, however ComfyUI or the child process ends."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    prompt = prompt_of(save_tiny(tmp_path, NAME), 7)
    tried = derivation(tmp_path, seconds=PATIENCE, pause=1.0)
    assert tried.begin([prompt])
    while not any(COMMAND in " ".join(child.cmdline()) for child in psutil.Process().children()):
        time.sleep(0.02)
    assert ours(temporary) == []
    tried.stop()
    assert ours(temporary) == []


def ours(temporary: Path) -> list[Path]:
    """Return the entries that are not torch's own cache of kernels."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


@thorough
def test_a_failed_derivation_succeeds_once_its_reason_is_gone(tmp_path: Path) -> None:
    """The reason is a file that could not be read."""
    prompt = prompt_of(save_tiny(tmp_path, NAME), 7)
    path = tmp_path / f"{NAME}.safetensors"
    path.rename(tmp_path / "away.safetensors")
    tried = derivation(tmp_path, seconds=PATIENCE, pause=1.0)
    tried.wait([prompt], lambda: False)
    assert f"{NAME}.safetensors does not exist" in tried.failed([prompt.kind])
    (tmp_path / "away.safetensors").rename(path)
    while tried.failed([prompt.kind]):
        time.sleep(0.2)
    tried.wait([prompt], lambda: False)
    found = tried.found([prompt.kind])
    assert found is not None
    assert tried.new_answers() == [found]
