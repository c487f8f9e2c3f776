"""FLUX.1, FLUX.2, Wan and VACE through Load Parallel Diffusion Model, against the stock loader in the same ComfyUI."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    FLUX1,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    save_families,
    save_latent,
    spread,
    with_reference,
)
from tests.support.graphs.family_checks import (
    assert_matters_and_stock,
    assert_stale_patches_depend_on_patches_and_warmup_alone,
    assert_stock,
)
from tests.support.graphs.flux import insert_after_model, node, step_by_step
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.tiny.flux import save_conditioning

STAGES: dict[str, Any] = {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "flux2", "wan", "vace")
    for side, tokens in TOKENS.items():
        save_conditioning(comfyui.input_dir / f"{FLUX1}-{side}.safetensors", tokens)
    save_latent(comfyui, f"reference-{FLUX1}", 1, 16, 7, 5)
    save_latent(comfyui, "reference-flux2", 1, 128, 3, 4)


SPLITS: list[tuple[str, dict[str, Any]]] = [
    (FLUX1, {"devices": "cpu:3", "ring": 3}),
    (FLUX1, STAGES),
    (FLUX1, {"devices": "cpu:2", "weights": "sharded"}),
    # in the quick run a reference runs FLUX.2 under the automatic plan
    ("flux2", {}),
    ("flux2", {"devices": "cpu:4", "cfg": 2, "ulysses": 2}),
    # in the quick run models/test_sequence_parallel has FLUX.2 in stages of two ranks
    ("flux2", STAGES),
    ("flux2", STAGES | {"devices": "cpu:4", "ulysses": 2}),
    # in the quick run a batch runs Wan under the automatic plan
    ("wan", {}),
    # in the quick run models/test_sequence_parallel has Wan in a ring, and test_every_sampler one with sharded weights
    ("wan", {"devices": "cpu:3", "ring": 3, "weights": "sharded"}),
    # in the quick run test_video_inputs has control videos, models/test_sequence_parallel VACE in patches, and
    # test_every_sampler Wan in stages
    ("vace", {}),
    ("vace", STAGES),
]
"""Models and their plans; without settings, the plan is automatic."""


@pytest.mark.parametrize(("name", "plan"), [(FLUX1, {}), *(pytest.param(*case, marks=thorough) for case in SPLITS)])
def test_every_kind_of_split_gives_the_stock_result(name: str, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Stages run one branch, and test_every_sampler has both."""
    one_branch = {"cfg": 1.0} if "pipefusion" in plan else {}
    assert_stock(latent_of, graph_of(name, steps=2, **one_branch), **plan)


@pytest.mark.parametrize("name", [pytest.param(FLUX1, marks=thorough), "flux2"])  # test_files_of_flux has Kontext's
def test_references_give_the_stock_latent(name: str, latent_of: LatentOf) -> None:
    """The references are Kontext's for FLUX.1. They run in the loop and with one forward per call.

    The node that stops the loop changes nothing, so both runs have one stock result.
    """
    plain = graph_of(name, steps=2, cfg=1.0)
    graph = with_reference(plain, f"reference-{name}")
    assert_matters_and_stock(latent_of, plain, graph)
    one_at_a_time = latent_of(spread(step_by_step(graph), strict=False))
    assert relative_error(one_at_a_time, latent_of(graph)) <= TOLERANCE


def test_a_shift_of_the_schedule_and_a_batch_give_the_stock_result(latent_of: LatentOf) -> None:
    """Stock nodes shift the schedule and make the batch."""
    graph = insert_after_model(graph_of("wan", steps=2), "ModelSamplingSD3", shift=8.0)
    graph["latent"] = node("EmptyHunyuanLatentVideo", width=80, height=72, length=5, batch_size=2)
    assert_stock(latent_of, graph)


@thorough  # in the quick run engine/test_products has the rule, and models/test_sequence_parallel Wan and FLUX.2 in patches
def test_stale_patches_of_frames_depend_only_on_patches_and_warmup(latent_of: LatentOf) -> None:
    """models/test_products has patches of rows."""
    frames = {"latent": node("EmptyHunyuanLatentVideo", width=64, height=48, length=21, batch_size=1)}
    assert_stale_patches_depend_on_patches_and_warmup_alone(latent_of, graph_of("wan", steps=4) | frames)
