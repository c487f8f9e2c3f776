"""Costs of blocks, measured on small models, against counts by hand; and the latents that become tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.declaration import Declaration
from parallel_backend.derive.calls import Subject
from parallel_backend.derive.derive import Derived
from parallel_backend.derive.deriving import candidates
from parallel_backend.derive.groups import members_of
from parallel_backend.derive.measuring import cost_of, references_of, with_costs
from parallel_backend.derive.proof import DeclarationProof
from parallel_backend.derive.small import Small, small_of, subjects_of
from parallel_backend.derive.tracing import ModuleCall
from parallel_backend.models.comfyui.comfy_family import ComfyFamily
from parallel_backend.models.comfyui.importing import import_comfyui
from parallel_backend.models.comfyui.plan_shape import plan_shape, reference_tokens
from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.sequence_parallel.blocks import blocks_of
from parallel_backend.plan.predict.kernel_counts import of_a_block
from parallel_backend.weights.files.checkpoint import read_header
from tests.derive.subjects import SUBJECTS
from tests.derive.toys import WIDTH, toy, toy_with_a_scene
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_tiny, save_unread
from tests.support.tiny.models import draw


@functools.cache
@torch.inference_mode()
def candidate(path: Path) -> tuple[Small, Subject, Derived]:
    """Return a file's small model with a call, and its first candidate, which counts as proved."""
    import_comfyui()
    small = small_of(path, 8e9)
    subject = next(subjects_of(small))
    return small, subject, Derived(next(candidates(subject)), DeclarationProof({}, {}))


@functools.cache
@torch.inference_mode()
def costs(path: Path) -> tuple[Small, Declaration]:
    small, subject, found = candidate(path)
    return small, with_costs(small, [subject], found).declaration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for files, so that each is measured once."""
    return tmp_path_factory.mktemp("files")


def test_a_blocks_cost_equals_the_count_by_hand() -> None:
    """All weights of two layers multiply each token. At its peak a block holds the tokens, q, k, v, attention's output, and a
    reordered copy of that output.
    """
    model, tokens = toy().model, 11
    block = model.get_submodule("blocks.0")
    cost = cost_of(ModuleCall("blocks.0", block, {"x": torch.ones(1, tokens, WIDTH)}, {}, None))
    assert cost.products == tokens * 4 * WIDTH**2
    assert cost.resident_bytes == tokens * 6 * WIDTH * 4


# test_layers_of_the_text_do_not_count measures blocks with cross-attention, as Wan's are.
@pytest.mark.parametrize("name", ["longcat", *(pytest.param(name, marks=thorough) for name in ("wan", "wide_qwen"))])
def test_a_blocks_operations_are_within_a_tenth_of_the_dry_runs(name: str, folder: Path) -> None:
    """Devices launch some kernels more."""
    save = save_unread if name.startswith("wide") else save_tiny
    small, found = costs(save(folder, name))
    for group in found.groups:
        block = next(small.base.diffusion_model.get_submodule(group.path).children())
        counted = of_a_block(type(block).__name__)
        assert abs(group.kernels - counted) <= counted / 10


def test_measured_costs_agree_with_the_formulas_of_the_written_declaration(folder: Path) -> None:
    """The formulas hold for blocks whose every layer works on the tokens of the sequence."""
    small, found = costs(save_tiny(folder, "longcat"))
    model = small.base.diffusion_model
    ours, its = (
        plan_shape(small.kind, model, each, blocks_of(model, each), 16, 2) for each in (found, DECLARATIONS[small.kind])
    )
    assert ours.token_weights == pytest.approx(its.token_weights, rel=1e-3)
    assert ours.copies == pytest.approx(its.copies, rel=0.35)


def test_layers_of_the_text_do_not_count(folder: Path) -> None:
    """The query and output layers of cross-attention multiply the picture's tokens; the others multiply only the text."""
    path = save_tiny(folder, "causal_wan")
    small, found = costs(path)
    block: Any = small.base.diffusion_model.get_submodule("blocks.0")
    [group] = found.groups
    weights = sum(parameter.numel() for parameter in block.parameters())
    counted = 6 * block.self_attn.q.weight.numel() + 2 * block.ffn[0].weight.numel()
    assert group.active_weights * weights == pytest.approx(counted, rel=1e-3)
    _, config = ComfyFamily(lambda kind: found).inspect(read_header(path))
    assert config.shape.token_weights == pytest.approx(counted, rel=1e-3)
    assert config.shape.copies == group.activation_copies


def test_blocks_that_cannot_be_measured_keep_the_formulas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The class cannot be built on the meta device here."""
    small, subject, found = candidate(save_tiny(folder, "causal_wan"))
    monkeypatch.setitem(small.described.unet_config, "patch_size", (1, 2, -2))  # no model can be built with this size
    with torch.inference_mode():
        assert with_costs(small, [subject], found) == found


# The quick run has the next test, in which one latent becomes tokens and another one does not.
@thorough
@pytest.mark.parametrize(
    ("name", "references"),
    [
        ("flux", set()),
        ("flux, references", {"ref_latents"}),
        ("wan, image", set()),
        ("wan, reference frame", {"reference_latent"}),
    ],
)
def test_latents_that_become_tokens_are_found(name: str, references: set[str]) -> None:
    with torch.inference_mode():
        subject = SUBJECTS[name]()
        found = next(candidates(subject))
        blocks = [members_of(subject.model, group.path)[0] for group in found.groups]
        assert {*references_of(subject, blocks, found)} == references


def test_reference_latents_of_unknown_names_are_found() -> None:
    subject = toy_with_a_scene()
    with torch.inference_mode():
        names = references_of(subject, ["blocks.0"], next(candidates(subject)))
    assert names == ["scene"]
    latents = {"scene": draw(1, 4, 6, 10, seed=1), "other": draw(1, 4, 6, 10, seed=2)}
    assert reference_tokens(latents, (2, 2), frozenset(names)) == 15
    frame = {"reference_latent": draw(1, 16, 8, 10, seed=1)}  # one frame of a video
    assert reference_tokens(frame, (1, 2, 2)) == reference_tokens(frame, (2, 2)) == 20
