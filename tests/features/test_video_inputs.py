"""Further inputs of videos: masks by frame, a first frame, control videos, two experts, context windows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import (
    PLANS,
    TOKENS,
    TOLERANCE,
    LatentOf,
    graph_of,
    masked,
    save_families,
    save_latent,
    spread,
    with_tensors,
)
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import Graph, insert_after_model, node, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY, save_tiny
from tests.support.tiny.models import draw


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "wan", "vace", "wan_i2v", "wan22_5b")
    save_latent(comfyui, "wan22_5b", 1, *TINY["wan22_5b"].latent)


@pytest.mark.parametrize("plan", [PLANS[1], *(pytest.param(PLANS[i], marks=thorough) for i in (0, 2))])
def test_a_first_frame_by_a_mask_gives_the_stock_latent(plan: dict[str, Any], latent_of: LatentOf) -> None:
    """Wan 2.2 5B has a timestep for each frame."""
    graph = masked(graph_of("wan22_5b", steps=2), 10, 8, 3)
    assert_matters_and_stock(latent_of, graph_of("wan22_5b", steps=2), graph, **plan)


@thorough  # models/test_sequence_parallel has Wan with a picture
@pytest.mark.parametrize("channels", [32, 48, 128])
def test_a_first_frame_of_another_vae_gives_the_stock_latent(
    channels: int, comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """ComfyUI uses only as many channels as the model has. A model class that does not is refused (tests/refusals/inputs.py)."""
    given = {"concat_latent_image": draw(1, channels, 3, 9, 10, seed=channels)}
    plain = graph_of("wan_i2v", steps=2)
    graph = with_tensors(comfyui, plain, f"i2v-{channels}", given)
    assert_matters_and_stock(latent_of, plain, graph, **PLANS[0])


@pytest.mark.parametrize("plan", [PLANS[2], *(pytest.param(plan, marks=thorough) for plan in PLANS[:2])])
def test_control_videos_give_the_stock_latent(comfyui: ComfyUI, plan: dict[str, Any], latent_of: LatentOf) -> None:
    """VACE gets two control videos of different strength."""
    given = {
        "vace_frames": draw(2, 1, 32, 3, 8, 10, seed=31),
        "vace_mask": (draw(2, 1, 64, 3, 8, 10, seed=32) > 0).float(),
        "vace_strength": torch.tensor([0.7, 1.5]),
    }
    plain = graph_of("vace", steps=2)
    graph = with_tensors(comfyui, plain, "vace", given)
    assert_matters_and_stock(latent_of, plain, graph, **plan)


EXPERTS = {"high": 77, "low": 78}


def two_experts(seed: int) -> Graph:
    """Return a graph as in Wan 2.2's template: the second model continues where the first one stops."""
    graph = graph_of("wan", seed=seed)
    for name in EXPERTS:
        graph[f"{name} model"] = node("UNETLoader", unet_name=f"expert-{name}.safetensors", weight_dtype="default")
    sides = {side: [side, 0] for side in TOKENS}
    common = {"noise_seed": seed, "steps": 4, "cfg": 2.5, "sampler_name": "euler", "scheduler": "simple", **sides}
    high = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 2, "return_with_leftover_noise": "enable"}
    low = {"add_noise": "disable", "start_at_step": 2, "end_at_step": 99, "return_with_leftover_noise": "disable"}
    graph["high"] = node("KSamplerAdvanced", model=["high model", 0], latent_image=["latent", 0], **common, **high)
    graph["sampler"] = node("KSamplerAdvanced", model=["low model", 0], latent_image=["high", 0], **common, **low)
    return graph


LOADED = re.compile(r"Parallel: the workers loaded (\d+) MiB")
MOVED = re.compile(r"expert-\w+\.safetensors(?: released|: \S+ MiB restored)")
MEBIBYTE = 1 << 20


def test_two_experts_are_read_once(comfyui: ComfyUI, latent_of: LatentOf, tmp_path: Path) -> None:
    """Both experts stay with the workers, in the first prompt and in the next one."""
    sizes = []
    for name, seed in EXPERTS.items():
        path = comfyui.base_dir / "models" / "diffusion_models" / f"expert-{name}.safetensors"
        save_tiny(tmp_path, "wan", seed=seed).rename(path)
        sizes.append(path.stat().st_size / MEBIBYTE)
    stock = {seed: latent_of(two_experts(seed)) for seed in (41, 42)}
    for seed, expected in ((41, sizes), (42, [])):
        graph = spread(two_experts(seed), strict=False)
        for name in EXPERTS:
            loader = graph[f"{name} model"]
            graph[f"{name} model"] = node("LoadParallelDiffusionModel", **loader["inputs"], plan=["plan", 0])
        run, log = queue_logged(comfyui, graph)
        assert relative_error(saved_latent(comfyui, run.check()), stock[seed]) <= TOLERANCE
        assert ways(log) == ["loop", "loop"]
        assert [int(size) for size in LOADED.findall(log)] == pytest.approx(expected, abs=1)
        assert MOVED.findall(log) == []


def test_context_windows_give_the_stock_latent(latent_of: LatentOf) -> None:
    """ComfyUI divides the video into windows, so each window is a separate call."""
    latent = node("EmptyHunyuanLatentVideo", width=64, height=48, length=29, batch_size=1)
    graph = graph_of("wan", steps=2) | {"latent": latent}
    windowed = insert_after_model(
        graph,
        "WanContextWindowsManual",
        context_length=17,
        context_overlap=8,
        context_schedule="standard_uniform",
        context_stride=1,
        closed_loop=False,
        fuse_method="pyramid",
        freenoise=True,
        retain_first_frame=False,
        split_conds_to_windows=False,
    )
    assert_matters_and_stock(latent_of, graph, windowed, strict=False)
