"""Files as users have them, LoRA and types for ComfyUI's own models: Load Parallel Diffusion Model against the stock loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after_model, queue_logged
from tests.support.graphs.loras import LORA, save_lora, with_lora
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import product, thorough
from tests.support.tiny.formats import quantise, write_scaled

NAMES = ("flux2", "wan")

PLANS: dict[str, dict[str, Any]] = {
    "ulysses": {"devices": "cpu:2", "cfg": 1, "ulysses": 2},
    "stages": {"devices": "cpu:2", "pipefusion": 2, "warmup_steps": 99},
    "sharded": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "weights": "sharded"},
    "streamed": {"devices": "cpu:2", "cfg": 1, "ulysses": 2, "weights": "streamed"},
}
GGUF = (Type.Q8_0, Type.Q4_K)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
SCALED = ("old", "marks", "metadata")

LatentOf = Callable[[Graph], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, *NAMES)
    folder = comfyui.base_dir / "models" / "diffusion_models"
    for name in NAMES:
        tensors = load_file(folder / f"{name}.safetensors")
        for form, dtype in TYPES.items():
            save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / f"{name}-{form}.safetensors")
        for form in SCALED:
            write_scaled(folder / f"{name}-{form}.safetensors", tensors, form)
        for kind in GGUF:
            path = folder / f"{name}-{kind.name}.gguf"
            quantise(path, folder / f"{name}-{kind.name}-values.safetensors", kind, tensors)
        save_lora(comfyui.base_dir / "models" / "loras" / f"{name}-lora.safetensors", LORA[name], tensors)


# -- files


def of_file(name: str, form: str, **settings: Any) -> Graph:
    """A small job with a file."""
    graph = graph_of(name, **{"steps": 2} | settings)
    graph["model"]["inputs"]["unet_name"] = f"{name}-{form}.safetensors"
    return graph


def check(latent_of: LatentOf, graph: Graph, plan: dict[str, Any], file: str | None = None) -> None:
    """A graph's result on workers, from another file if one is given, is the stock loader's."""
    ours = spread(graph, **plan)
    if file is not None:
        ours["model"]["inputs"]["unet_name"] = file
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(
    ("form", "name", "plan"),
    [
        pytest.param(form, name, plan, marks=() if quick else thorough)
        for form, name, plan, quick in (
            ("bf16", "flux2", "stages", False),
            ("bf16", "wan", "sharded", True),
            ("fp16", "flux2", "sharded", False),
            ("fp16", "wan", "stages", False),
            ("fp8", "flux2", "sharded", True),
            ("fp8", "wan", "ulysses", False),
            ("fp8", "wan", "streamed", True),
            ("fp8", "wan", "stages", False),
            ("old", "flux2", "ulysses", False),
            ("old", "wan", "sharded", False),
            ("marks", "flux2", "stages", True),
            ("marks", "wan", "sharded", True),
            ("metadata", "flux2", "sharded", False),
            ("metadata", "wan", "stages", False),
        )
    ],
)
def test_types_of_files(latent_of: LatentOf, form: str, name: str, plan: str) -> None:
    check(latent_of, of_file(name, form), PLANS[plan])


@pytest.mark.parametrize(
    ("kind", "name", "plan"),
    [
        pytest.param(Type.Q8_0, "flux2", "ulysses", marks=thorough),
        pytest.param(Type.Q8_0, "wan", "sharded", marks=thorough),
        pytest.param(Type.Q4_K, "flux2", "sharded", marks=thorough),
        (Type.Q4_K, "wan", "stages"),
        pytest.param(Type.Q4_K, "wan", "streamed", marks=thorough),
    ],
)
def test_gguf_files(latent_of: LatentOf, kind: Type, name: str, plan: str) -> None:
    """ComfyUI runs the values that the gguf package itself expands."""
    check(latent_of, of_file(name, f"{kind.name}-values"), PLANS[plan], f"{name}-{kind.name}.gguf")


@pytest.mark.parametrize("name", [pytest.param("flux2", marks=thorough), "wan"])
def test_weight_dtype_of_the_loader(latent_of: LatentOf, name: str) -> None:
    graph = graph_of(name, steps=2)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    check(latent_of, graph, PLANS["sharded"])


# -- LoRA


@product(plan=PLANS, name=NAMES, model=["", "fp8", "Q4_K"])
def test_lora(latent_of: LatentOf, plan: dict[str, Any], name: str, model: str) -> None:
    """On weights of every kind; on GGUF as on the stock loader with their values in fp32."""
    form = "Q4_K-values" if model == "Q4_K" else model
    graph = of_file(name, form) if form else graph_of(name, steps=2)
    stock = with_lora(graph, name, 0.8)
    assert relative_error(latent_of(stock), latent_of(graph)) > DIFFERENT
    check(latent_of, stock, plan, f"{name}-{model}{'.gguf' if model == 'Q4_K' else '.safetensors'}" if model else None)


@pytest.mark.parametrize("plan", ["stages", *(pytest.param(plan, marks=thorough) for plan in ("ulysses", "sharded"))])
def test_another_strength_reads_nothing_again(comfyui: ComfyUI, latent_of: LatentOf, plan: str) -> None:
    graphs = [with_lora(graph_of("wan", seed=90), "wan", strength) for strength in (0.8, -0.5)]
    expected = [latent_of(graph) for graph in graphs]
    comfyui.queue(spread(graph_of("wan", seed=91), **PLANS[plan]), timeout=300).check()
    for graph, stock in zip(graphs, expected, strict=True):
        run, log = queue_logged(comfyui, spread(graph, **PLANS[plan]))
        assert relative_error(saved_latent(comfyui, run.check()), stock) <= TOLERANCE
        assert "the workers loaded" not in log
        assert "restored" not in log


# -- bf16


def in_bf16(graph: Graph) -> Graph:
    """With bf16 as the type of the computation."""
    return insert_after_model(graph, "ModelComputeDtype", dtype="bf16")


@product(name=NAMES, plan={"ulysses": PLANS["ulysses"], "stages": PLANS["stages"]})
def test_bf16(latent_of: LatentOf, name: str, plan: dict[str, Any]) -> None:
    """One worker gives ComfyUI's own bits, several are no further from fp32."""
    graph = graph_of(name)
    exact, stock = latent_of(graph), latent_of(in_bf16(graph))
    assert torch.equal(latent_of(spread(in_bf16(graph), "cpu:1")), stock)
    ours = relative_error(latent_of(spread(in_bf16(graph), **plan)), exact)
    print(f"{name}: {ours:.5f}, ComfyUI {relative_error(stock, exact):.5f}")
    assert ours <= 1.5 * relative_error(stock, exact)
