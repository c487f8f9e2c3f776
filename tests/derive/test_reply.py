"""The reply of the process that derives for a graph, from a file and the graph's own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.derive.call_kind import kind_of
from parallel_backend.derive.prompt import PromptExample
from parallel_backend.derive.reply import answer
from parallel_backend.derive.request import DeriveReply, request_bytes
from tests.derive.requesting import LIMIT, NAME, SECONDS, prompt_of
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_tiny


def answered(folder: Path, file: Path, *prompts: PromptExample, known: DeriveReply | None = None) -> DeriveReply:
    declarations = [known.declaration] if known is not None and known.declaration is not None else []
    asked = folder / "request_bytes"
    asked.write_bytes(request_bytes(str(file), prompts, declarations, LIMIT, SECONDS))
    return answer(asked)


@thorough
def test_a_graphs_own_call_is_derived_and_a_known_declaration_tried_for_another_kind(tmp_path: Path) -> None:
    file = save_tiny(tmp_path, NAME)
    first = answered(tmp_path, file, prompt_of(file, 7), prompt_of(file, 4))
    assert first.failure == ""
    assert first.declaration is not None
    assert not first.declaration.whole_picture
    assert not first.kinds[0].difference(prompt_of(file, 12).kind)
    again = answered(tmp_path, file, prompt_of(file, 9), known=first)
    assert again.declaration == first.declaration
    assert first.compiled and again.compiled
    assert again.seconds < first.seconds


@thorough
def test_a_kind_of_call_that_cannot_be_made_small_is_named(tmp_path: Path) -> None:
    file = save_tiny(tmp_path, NAME)
    prompt = prompt_of(file, 7)
    strange = PromptExample(prompt.entries, prompt.latent, kind_of(torch.zeros(1, 16, 1, 8, 10), _conditioning(prompt)))
    found = answered(tmp_path, file, strange)
    assert found.declaration is None
    assert found.lasting
    assert found.failure.startswith("no test call has x in the conditioning")


def _conditioning(prompt: PromptExample) -> Any:
    from parallel_backend.conditioning import Conditioning

    return Conditioning({"context": prompt.entries["cross_attn"]})


@pytest.mark.parametrize("size", [1e3])
def test_a_failure_for_size_is_not_lasting(tmp_path: Path, size: float) -> None:
    file = save_tiny(tmp_path, NAME)
    asked = tmp_path / "request_bytes"
    asked.write_bytes(request_bytes(str(file), [prompt_of(file, 7)], [], size, SECONDS))
    found = answer(asked)
    assert "is too large to derive" in found.failure
    assert not found.lasting
