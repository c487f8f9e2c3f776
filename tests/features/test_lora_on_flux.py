"""LoRA and other adapters through ComfyUI's stock nodes give the same picture as on the stock loader, and leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.flux import (
    Graph,
    insert_after_model,
    ksampler_graph,
    parallel,
    queue_logged,
    step_by_step,
    ways,
)
from tests.support.latents import relative_error, saved_latent
from tests.support.leaving import check_that_one_copy_waits_and_comes_back
from tests.support.selection import thorough
from tests.support.server import NARROW
from tests.support.tiny.formats import save_fp8, save_gguf, save_scaled
from tests.support.tiny.lora import HIDDEN, SCHEMES, save_adapter
from tests.support.tiny.models import draw

DIFFERENT = 1e-2

PLANS: dict[str, dict[str, Any]] = {
    "ulysses-2": {"ulysses": 2},
    "sharded-2": {"ulysses": 2, "weights": "sharded"},
    "pp-2": {"pipefusion": 2, "ulysses": 1, "warmup_steps": 8},
    "streamed-2": {"ulysses": 2, "weights": "streamed"},
}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    folder = comfyui.base_dir / "models" / "loras"
    for seed, scheme in enumerate(SCHEMES):
        save_adapter(folder / f"{scheme}.safetensors", scheme, seed)
    models = comfyui.base_dir / "models" / "diffusion_models"
    save_fp8(models / "tiny-fp8.safetensors", torch.float8_e4m3fn, heads=2, seed=4)
    save_scaled(models / "tiny-scaled.safetensors", "marks", heads=2, seed=4)
    save_file(_expanded(load_file(models / "tiny-scaled.safetensors")), models / "tiny-scaled-expanded.safetensors")
    save_gguf(models / "tiny-q4.gguf", models / "tiny-q4-expanded.safetensors", Type.Q4_K, heads=2, seed=4)


def _expanded(scaled: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return plain fp32 tensors with the values of a scaled fp8 file."""
    return {
        name: tensor.float() * scaled.get(f"{name.removesuffix('.weight')}.weight_scale", torch.tensor(1.0))
        for name, tensor in scaled.items()
        if not name.endswith((".weight_scale", ".comfy_quant"))
    }


def job(*adapters: tuple[str, float], model: str = NARROW, **settings: Any) -> Graph:
    """Return a small graph with adapters stacked on the MODEL, the last one first in the graph."""
    graph = ksampler_graph(model, **{"width": 40, "height": 56, "steps": 2, "cfg": 2.0} | settings)
    for scheme, strength in adapters:
        name = f"{scheme}.safetensors"
        graph = insert_after_model(graph, "LoraLoaderModelOnly", lora_name=name, strength_model=strength)
    return graph


SCALED, GGUF = "tiny-scaled.safetensors", "tiny-q4.gguf"

STACK = (("lora-kohya", 0.7), ("lora-peft", -0.3))
STACKS = [((scheme, 0.7), (other, -0.3)) for scheme, other in pairwise([*SCHEMES, next(iter(SCHEMES))])] + [
    (("dora-columns-of-parts", -0.3), ("lokr", 0.7), ("dora-rows", 1.0))
]
"""Pairs of adapters in which every kind has either strength."""


@pytest.mark.parametrize(
    ("plan", "stack"),
    [
        pytest.param(
            plan,
            stack,
            id=f"{name}, {' and '.join(scheme for scheme, _ in stack)}",
            marks=[thorough] * (row != 4 * column),  # models/test_merged_fp8.py has every kind in the quick run
        )
        for column, (name, plan) in enumerate(PLANS.items())
        for row, stack in enumerate(STACKS)
    ],
)
def test_adapters_give_the_stock_latent(
    latent_of: LatentOf,
    assert_equal_latents: EqualLatents,
    plan: dict[str, Any],
    stack: tuple[tuple[str, float], ...],
) -> None:
    """The latent equals the stock loader's, and each adapter changes it."""
    graph = job(*stack)
    for taken in range(len(stack)):
        assert relative_error(latent_of(graph), latent_of(job(*stack[:taken], *stack[taken + 1 :]))) > DIFFERENT
    assert_equal_latents(parallel(graph, **plan), graph)


@pytest.mark.parametrize(
    ("plan", "model"),  # in the quick run test_adapters_give_the_stock_latent has the other plans
    [
        ("ulysses-2", SCALED),
        ("sharded-2", GGUF),
        pytest.param("pp-2", SCALED, marks=thorough),
        pytest.param("streamed-2", GGUF, marks=thorough),
    ],
)
def test_adapters_on_scaled_and_gguf_weights_give_the_stock_latent(
    assert_equal_latents: EqualLatents, plan: str, model: str
) -> None:
    """Scaled weights are quantised again, as in the stock loader. It does not read GGUF, so it has those values in fp32."""
    stack = (("dora-columns", 0.7), ("lora-peft", -0.3))
    stock = job(*stack, model="tiny-scaled" if "scaled" in model else "tiny-q4-expanded")
    ours = parallel(stock, **PLANS[plan])
    ours["model"]["inputs"]["unet_name"] = model
    assert_equal_latents(ours, stock)


@thorough
@pytest.mark.parametrize("model", [f"{NARROW}.safetensors", GGUF, "tiny-fp8.safetensors", SCALED])
def test_weights_with_adapters_leave_the_devices_and_come_back(comfyui: ComfyUI, model: str) -> None:
    graph = parallel(job(("dora-columns", 0.7), ("lora-peft", -0.3)), ulysses=2)
    graph["model"]["inputs"]["unet_name"] = model
    check_that_one_copy_waits_and_comes_back(comfyui, graph)


def test_an_adapter_across_the_parts_of_a_fused_quantised_weight_gives_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf, assert_equal_latents: EqualLatents
) -> None:
    """The OFT adapter's blocks contain rows of both q and k."""
    layer, rows = "lora_unet_double_blocks_0_img_attn_qkv", 96
    blocks = 0.05 * draw(3 * HIDDEN // rows, rows, rows, seed=3)
    tensors = {f"{layer}.oft_blocks": blocks, f"{layer}.alpha": torch.tensor(6.0)}
    save_file(tensors, comfyui.base_dir / "models" / "loras" / "oft-across.safetensors")
    stock = job(("oft-across", 1.0), model="tiny-fp8")
    assert relative_error(latent_of(stock), latent_of(job(model="tiny-fp8"))) > DIFFERENT
    assert_equal_latents(parallel(stock, **PLANS["ulysses-2"]), stock)


@pytest.mark.parametrize(
    ("way", "plan"),  # in the quick run models/test_merged_fp8 removes adapters in every store
    [
        (dict, "sharded-2"),
        *(pytest.param(dict, plan, marks=thorough) for plan in ("ulysses-2", "pp-2", "streamed-2")),
        pytest.param(step_by_step, "sharded-2", marks=thorough),
    ],
)
def test_adapters_change_the_weights_and_leave_no_trace(
    comfyui: ComfyUI, way: Callable[[Graph], Graph], plan: str
) -> None:
    def latent(*adapters: tuple[str, float]) -> Tensor:
        run, log = queue_logged(comfyui, parallel(way(job(*adapters)), **PLANS[plan]))
        assert ways(log), "ComfyUI had the result already"
        return saved_latent(comfyui, run.check())

    before, with_two = latent(), latent(*STACK)
    assert not torch.equal(before, with_two)
    weaker = latent(("lora-kohya", 0.2), STACK[1])
    assert not torch.equal(weaker, with_two)
    comfyui.free()
    assert torch.equal(latent(*STACK), with_two)
    assert torch.equal(latent(), before)
