"""The derivation for a graph, from a file and the graph's own prompts: its process's reply, and another try of a failed one."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from parallel_backend.comfyui_folder import comfyui_version
from parallel_backend.conditioning import Conditioning
from parallel_backend.derive.call_kind import kind_of
from parallel_backend.derive.calls import ByClass, Sizes
from parallel_backend.derive.prompt import PromptExample
from parallel_backend.derive.reply import answer
from parallel_backend.derive.request import DeriveReply, request_bytes
from parallel_backend.derive.small import small_of
from parallel_backend.host.deriving import COMMAND, Derivation
from parallel_backend.models.comfyui.importing import import_comfyui
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw

COMFYUI = os.environ["COMFYUI_PATH"]
NAME = "causal_wan"
LIMIT = 4e9

PATIENCE = 3600.0
"""Seconds to wait for a derivation on a machine that other tests share."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the file of a class without a declaration."""
    return save_tiny(tmp_path, NAME)


def prompt_of(file: Path, tokens: int) -> PromptExample:
    """Return a prompt's call as ComfyUI makes it for the file's class, in the tests' own size."""
    import_comfyui()
    shape = TINY[NAME].latent
    given: Mapping[str, Any] = {"cross_attn": draw(1, tokens, TINY[NAME].text, seed=tokens)}
    base = ByClass(small_of(file, LIMIT).base)
    sizes = Sizes(tuple(shape[1:]), tokens)
    return PromptExample(given, (1, *shape), kind_of(base.latent(sizes), base.conditioning(sizes, given)))


def answered(
    file: Path, *prompts: PromptExample, known: DeriveReply | None = None, limit: float = LIMIT
) -> DeriveReply:
    declarations = [known.declaration] if known is not None and known.declaration is not None else []
    asked = file.with_name("request_bytes")
    asked.write_bytes(request_bytes(str(file), prompts, declarations, limit, seconds=120.0))
    return answer(asked)


@thorough
def test_a_graphs_own_call_is_derived_and_a_known_declaration_tried_for_another_kind(file: Path) -> None:
    first = answered(file, prompt_of(file, 7), prompt_of(file, 4))
    assert first.failure == ""
    assert first.declaration is not None
    assert not first.declaration.whole_picture
    assert not first.kinds[0].difference(prompt_of(file, 12).kind)
    again = answered(file, prompt_of(file, 9), known=first)
    assert again.declaration == first.declaration
    assert first.compiled and again.compiled
    assert again.seconds < first.seconds


@thorough
def test_a_kind_of_call_that_cannot_be_made_small_is_named(file: Path) -> None:
    prompt = prompt_of(file, 7)
    other = kind_of(torch.zeros(1, 16, 1, 8, 10), Conditioning({"context": prompt.entries["cross_attn"]}))
    found = answered(file, PromptExample(prompt.entries, prompt.latent, other))
    assert found.declaration is None
    assert found.lasting
    assert found.failure.startswith("no test call has x in the conditioning")


def test_a_failure_for_size_is_not_lasting(file: Path) -> None:
    found = answered(file, prompt_of(file, 7), limit=1e3)
    assert "is too large to derive" in found.failure
    assert not found.lasting


def derivation(file: Path, seconds: float, pause: float) -> Derivation:
    kept = file.with_name("kept")
    return Derivation("some class", NAME, str(file), COMFYUI, comfyui_version(COMFYUI), seconds, kept, pause)


def test_a_derivation_that_took_too_long_is_tried_again_after_a_pause(file: Path) -> None:
    """The message says when. Until then no derivation begins."""
    prompt = prompt_of(file, 7)
    tried = derivation(file, seconds=0.6, pause=1.5)
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


def test_a_derivation_leaves_nothing_in_the_temporary_folder(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the folder holds no part of a prompt, however ComfyUI or the child process ends."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    prompt = prompt_of(file, 7)
    tried = derivation(file, seconds=PATIENCE, pause=1.0)
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
def test_a_failed_derivation_succeeds_once_its_reason_is_gone(file: Path) -> None:
    """The reason is a file that could not be read."""
    prompt = prompt_of(file, 7)
    away = file.rename(file.with_name("away.safetensors"))
    tried = derivation(file, seconds=PATIENCE, pause=1.0)
    tried.wait([prompt], lambda: False)
    assert f"{NAME}.safetensors does not exist" in tried.failed([prompt.kind])
    away.rename(file)
    while tried.failed([prompt.kind]):
        time.sleep(0.2)
    tried.wait([prompt], lambda: False)
    found = tried.found([prompt.kind])
    assert found is not None
    assert tried.new_answers() == [found]
