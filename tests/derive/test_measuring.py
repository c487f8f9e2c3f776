"""What blocks cost, measured on small models, against counts by hand; and which latents become tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel_backend.derive.derive import derive
from parallel_backend.derive.deriving import candidates
from parallel_backend.derive.measuring import with_costs
from parallel_backend.models.comfyui.comfy_family import plan_shape
from parallel_backend.models.comfyui.latents import reference_tokens
from parallel_backend.models.comfyui.small import small
from parallel_backend.models.spread.blocks import blocks_of
from parallel_backend.models.spread.declaration import Declaration
from tests.derive.table import SUBJECTS
from tests.derive.toys import WIDTH, toy, toy_with_a_scene
from tests.support.tiny.models import draw


def costs(name: str) -> tuple[Any, Declaration]:
    with torch.inference_mode():
        subject = SUBJECTS[name]()
        return subject.model, with_costs([subject], next(candidates(subject)))


def test_a_block_costs_what_is_counted_by_hand() -> None:
    """Each token is multiplied by all weights of two layers. At its peak a block holds it, its q, k and v, what attention gave,
    and that in the order of the layers."""
    subject = toy()
    found = with_costs([subject], next(candidates(subject)))
    weights = sum(parameter.numel() for parameter in subject.model.blocks[0].parameters())
    [group] = found.groups
    assert group.applied == pytest.approx(4 * WIDTH**2 / weights, abs=1e-4)
    assert group.copies == pytest.approx(6, abs=0.01)


@pytest.mark.parametrize("name", ["flux", "qwen-image", "z-image", "auraflow"])
def test_plans_of_what_is_derived_go_by_the_written_declarations_figures(name: str) -> None:
    """Where the formulas hold: in blocks whose every layer is for the tokens of the sequence."""
    case = small(name)
    model, found = costs(name)
    ours, its = (
        plan_shape(case.kind, model, each, blocks_of(model, each), case.x.shape[1], case.x.ndim - 2)
        for each in (found, case.declaration)
    )
    assert ours.token_weights == pytest.approx(its.token_weights, rel=1e-3)
    assert ours.copies == pytest.approx(its.copies, rel=0.35)


@pytest.mark.parametrize(("name", "squares"), [("wan, text", 6), ("humo", 8)])
def test_layers_that_are_for_the_text_do_not_count(name: str, squares: int) -> None:
    """Of attention to text, and to sound, the picture's tokens are multiplied for the queries and what comes out."""
    model, found = costs(name)
    [group] = found.groups
    block = model.blocks[0]
    feed_forward = 2 * block.ffn[0].weight.numel()
    weights = sum(parameter.numel() for parameter in block.parameters())
    assert group.applied * weights == pytest.approx(squares * model.dim**2 + feed_forward, rel=1e-3)


def test_what_cannot_be_measured_is_left_to_formulas() -> None:
    """SD 3's small model has positions for pictures of up to eight tokens."""
    _, found = costs("sd 3")
    assert all(group.operations and not group.applied and not group.copies for group in found.groups)


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
    assert costs(name)[1].references == references


def test_those_of_a_name_that_nobody_knows_count_too() -> None:
    found = derive([toy_with_a_scene()])
    assert found.declaration.references == {"scene"}
    scene = {"scene": draw(1, 4, 6, 10, seed=1), "other": draw(1, 4, 6, 10, seed=2)}
    assert reference_tokens(scene, (2, 2), found.declaration.references) == 15
