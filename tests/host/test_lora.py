"""LoRA and its kin through ComfyUI's stock nodes: the same picture as on the stock loader, and no trace afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.host.conftest import relative_error, saved_latent
from tests.host.graphs import Graph, insert_after_model, ksampler_graph, parallel, queue_logged, ways
from tests.tiny_flux import flux_tensors
from tests.tiny_lora import SCHEMES, save_adapter

TOLERANCE = 1e-5
DIFFERENT = 1e-2

PLANS: dict[str, dict[str, Any]] = {
    "ulysses-2": {"ulysses": 2},
    "sharded-2": {"ulysses": 2, "weights": "sharded"},
    "pp-2": {"pipefusion": 2, "ulysses": 1, "warmup_steps": 8},
}

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    folder = comfyui.base_dir / "models" / "loras"
    for seed, scheme in enumerate(SCHEMES):
        save_adapter(folder / f"{scheme}.safetensors", scheme, seed)
    models = comfyui.base_dir / "models" / "diffusion_models"
    quantised = flux_tensors(dtype=torch.float8_e4m3fn, seed=4)
    save_file(quantised, models / "tiny-fp8.safetensors")
    save_file({name: tensor.float() for name, tensor in quantised.items()}, models / "tiny-expanded.safetensors")


def job(*adapters: tuple[str, float], model: str = "tiny-schnell", **settings: Any) -> Graph:
    """A small job with adapters stacked on the MODEL, the last one first in the graph."""
    graph = ksampler_graph(model, **{"width": 72, "height": 104, "steps": 3, "cfg": 2.0} | settings)
    for scheme, strength in adapters:
        name = f"{scheme}.safetensors"
        graph = insert_after_model(graph, "LoraLoaderModelOnly", lora_name=name, strength_model=strength)
    return graph


STACK = (("lora-kohya", 0.7), ("lora-peft", -0.3))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_an_adapter_does_what_it_does_on_the_stock_loader(
    latent_of: LatentOf, plan: dict[str, Any], scheme: str
) -> None:
    graph = job((scheme, 0.7))
    assert relative_error(latent_of(graph), latent_of(job())) > DIFFERENT
    assert relative_error(latent_of(parallel(graph, **plan)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(
    "stack", [STACK, (("dora-columns-of-parts", -0.3), ("lokr", 0.7), ("dora-rows", 1.0))], ids=str
)
def test_stacked_adapters(latent_of: LatentOf, plan: dict[str, Any], stack: tuple[tuple[str, float], ...]) -> None:
    graph = job(*stack)
    assert relative_error(latent_of(parallel(graph, **plan)), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize("scheme", ["lora-peft", "loha", "lokr-whole", "dora-rows", "dora-columns-of-parts", "oft"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_adapters_on_quantised_weights(latent_of: LatentOf, plan: dict[str, Any], scheme: str) -> None:
    """As on the stock loader with the same values in fp32."""
    stack = ((scheme, 0.7), ("lora-kohya", -0.3))
    ours, stock = job(*stack, model="tiny-fp8"), job(*stack, model="tiny-expanded")
    assert relative_error(latent_of(stock), latent_of(job(model="tiny-expanded"))) > DIFFERENT
    assert relative_error(latent_of(parallel(ours, **plan)), latent_of(stock)) <= TOLERANCE


@pytest.mark.parametrize("sampler", ["uni_pc", "euler"], ids=["step by step", "in the loop"])
def test_adapters_change_and_go_without_a_trace(comfyui: ComfyUI, sampler: str) -> None:
    def latent(*adapters: tuple[str, float], **plan: Any) -> Tensor:
        run, log = queue_logged(comfyui, parallel(job(*adapters, sampler=sampler), **plan))
        assert ways(log), "ComfyUI had the result already"
        return saved_latent(comfyui, run.check())

    for plan in PLANS.values():
        before, with_two = latent(**plan), latent(*STACK, **plan)
        assert not torch.equal(before, with_two)
        weaker = latent(("lora-kohya", 0.2), STACK[1], **plan)
        assert not torch.equal(weaker, with_two)
        assert torch.equal(latent(*STACK, **plan), with_two)
        assert torch.equal(latent(**plan), before)
