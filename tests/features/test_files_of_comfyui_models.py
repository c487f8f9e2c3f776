"""Model files of all forms, LoRA and dtypes for ComfyUI's own models: Load Parallel Diffusion Model against the stock loader."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import BY_STORE, DIFFERENT, TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after_model, queue_logged
from tests.support.graphs.loras import LORA, save_lora, with_lora
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.formats import quantise, write_scaled
from tests.support.tiny.models import draw

NAMES = ("flux2", "wan")
QUICK_NAMES = ("wan",)

GGUF = (Type.Q8_0, Type.Q4_K)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
SCALED = ("old", "marks", "metadata")


@pytest.fixture(scope="module", autouse=True)
def _files(pytestconfig: pytest.Config, comfyui: ComfyUI) -> None:
    names = NAMES if pytestconfig.getoption("all") else QUICK_NAMES
    save_families(comfyui, *names)
    folder = comfyui.base_dir / "models" / "diffusion_models"
    for name in names:
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
    """Return a small graph with a file of this form."""
    graph = graph_of(name, **{"steps": 2} | settings)
    graph["model"]["inputs"]["unet_name"] = f"{name}-{form}.safetensors"
    return graph


def check(latent_of: LatentOf, graph: Graph, plan: dict[str, Any], file: str | None = None) -> None:
    """Check that a graph's latent on workers, from another file if one is given, equals the stock loader's."""
    ours = spread(graph, **plan)
    if file is not None:
        ours["model"]["inputs"]["unet_name"] = file
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(  # in the quick run test_files_of_flux has marks in stages and bf16, a LoRA below fp8 streamed
    ("form", "name", "plan"),
    [
        pytest.param(form, name, plan, marks=() if quick else thorough)
        for form, name, plan, quick in (
            ("bf16", "flux2", "stages", False),
            ("bf16", "wan", "sharded", False),
            ("fp16", "flux2", "sharded", False),
            ("fp16", "wan", "stages", False),
            ("fp8", "flux2", "sharded", False),
            ("fp8", "wan", "ulysses", False),
            ("fp8", "wan", "streamed", False),
            ("fp8", "wan", "stages", False),
            ("old", "flux2", "ulysses", False),
            ("old", "wan", "sharded", False),
            ("marks", "flux2", "stages", False),
            ("marks", "wan", "sharded", True),
            ("metadata", "flux2", "sharded", False),
            ("metadata", "wan", "stages", False),
        )
    ],
)
def test_files_of_every_dtype_give_the_stock_latent(latent_of: LatentOf, form: str, name: str, plan: str) -> None:
    check(latent_of, of_file(name, form), BY_STORE[plan])


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
def test_gguf_files_give_the_stock_latent_of_their_values(
    latent_of: LatentOf, kind: Type, name: str, plan: str
) -> None:
    """ComfyUI runs the values that the gguf package itself expands."""
    check(latent_of, of_file(name, f"{kind.name}-values"), BY_STORE[plan], f"{name}-{kind.name}.gguf")


@pytest.mark.parametrize("name", [pytest.param("flux2", marks=thorough), "wan"])
def test_the_loaders_weight_dtype_gives_the_stock_latent(latent_of: LatentOf, name: str) -> None:
    graph = graph_of(name, steps=2)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    check(latent_of, graph, BY_STORE["sharded"])


# -- LoRA


LORAS = [("streamed", "wan", "fp8")]
"""Cases of the quick run, where the next test has a LoRA in stages, test_lora_on_flux one on sharded GGUF, and test_quantised
one on FLUX.2.
"""


@pytest.mark.parametrize(
    ("plan", "name", "model"),
    [
        pytest.param(BY_STORE[plan], name, model, id=f"{plan}-{name}-{model}", marks=[thorough] * (case not in LORAS))
        for case in product(BY_STORE, NAMES, ("", "fp8", "Q4_K"))
        for plan, name, model in [case]
    ],
)
def test_a_lora_gives_the_stock_latent(latent_of: LatentOf, plan: dict[str, Any], name: str, model: str) -> None:
    """The latent equals the stock loader's on weights of every kind; for GGUF the stock loader has the values in fp32."""
    form = "Q4_K-values" if model == "Q4_K" else model
    graph = of_file(name, form) if form else graph_of(name, steps=2)
    stock = with_lora(graph, name, 0.8)
    assert relative_error(latent_of(stock), latent_of(graph)) > DIFFERENT
    check(latent_of, stock, plan, f"{name}-{model}{'.gguf' if model == 'Q4_K' else '.safetensors'}" if model else None)


@pytest.mark.parametrize("plan", ["stages", *(pytest.param(plan, marks=thorough) for plan in ("ulysses", "sharded"))])
def test_another_lora_strength_loads_no_weights_again(comfyui: ComfyUI, latent_of: LatentOf, plan: str) -> None:
    graphs = [with_lora(graph_of("wan", seed=90, steps=2), "wan", strength) for strength in (0.8, -0.5)]
    expected = [latent_of(graph) for graph in graphs]
    comfyui.queue(spread(graph_of("wan", seed=91, steps=2), **BY_STORE[plan]), timeout=300).check()
    for graph, stock in zip(graphs, expected, strict=True):
        run, log = queue_logged(comfyui, spread(graph, **BY_STORE[plan]))
        assert relative_error(saved_latent(comfyui, run.check()), stock) <= TOLERANCE
        assert "the workers loaded" not in log
        assert "restored" not in log


def save_partly_applied(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write a LoRA of Wan with changes for every kind of parameter, of which ComfyUI applies two and omits all others."""
    layer = "diffusion_model.blocks.{}"
    hidden = tensors["blocks.0.self_attn.q.weight"].shape[0]
    factors = draw(hidden, 4, seed=60), 0.5 * draw(4, hidden, seed=61) / hidden**0.5
    column = draw(4, 1, seed=62)
    made = {
        f"diffusion_model.{name}.diff": 0.3 * torch.ones_like(tensors[name]) for name in tensors if "modulation" in name
    }
    made["diffusion_model.head.modulation.set_weight"] = made.pop("diffusion_model.head.modulation.diff")
    made["diffusion_model.patch_embedding.lokr_w1"] = 0.2 * draw(2, 2, seed=63)
    rows, channels, *kernel = tensors["patch_embedding.weight"].shape
    made["diffusion_model.patch_embedding.lokr_w2"] = 0.3 * draw(rows // 2, channels // 2, *kernel, seed=64)
    for name, parts in {
        "0.self_attn.v": {"lora_B.weight": factors[0], "lora_A.weight": factors[1]},
        "0.norm3": {"lora_B.weight": factors[0], "lora_A.weight": column, "dora_scale": torch.ones(hidden, 1)},
        "1.norm3": {
            **{f"hada_w{number}_a": factors[0] for number in (1, 2)},
            **{f"hada_w{number}_b": column for number in (1, 2)},
            "dora_scale": torch.ones(hidden, 1),
        },
        "0.self_attn.q": {"diff": 0.1 * draw(hidden * hidden, seed=65)},
        "0.self_attn.k": {"lora_B.weight": draw(64, 4, seed=66), "lora_A.weight": draw(4, 96, seed=67)},
        "1.self_attn.o.bias": {"set_weight": torch.tensor(0.1)},
    }.items():
        made |= {f"{layer.format(name)}.{part}": tensor for part, tensor in parts.items()}
    save_file({name: tensor.clone() for name, tensor in made.items()}, folder / "wan-partly.safetensors")


@pytest.mark.parametrize(
    "plan", [pytest.param({"devices": "cpu:1"}, marks=thorough), BY_STORE["sharded"]], ids=["alone", "sharded"]
)
def test_lora_changes_that_comfyui_omits_are_omitted_with_a_message(
    comfyui: ComfyUI, latent_of: LatentOf, plan: dict[str, Any]
) -> None:
    folder = comfyui.base_dir / "models"
    save_partly_applied(folder / "loras", load_file(folder / "diffusion_models" / "wan.safetensors"))
    graph = graph_of("wan", steps=2)
    lora = {"lora_name": "wan-partly.safetensors", "strength_model": 0.8}
    stock = insert_after_model(graph, "LoraLoaderModelOnly", **lora)
    assert relative_error(latent_of(stock), latent_of(graph)) > DIFFERENT
    run = comfyui.queue(spread(stock, **plan), timeout=300).check()
    assert relative_error(saved_latent(comfyui, run), latent_of(stock)) <= TOLERANCE
    told = run.texts[-1].text
    assert "4 of the LoRA's changes have no effect, as with ComfyUI's own loader, which never patches" in told
    assert "4 of the LoRA's changes do not fit the model, and ComfyUI leaves them out: " in told
    assert "SHAPE MISMATCH" in told or "ERROR lo" in told


# -- bf16


def in_bf16(graph: Graph) -> Graph:
    """Set the compute dtype of the graph's model to bf16."""
    return insert_after_model(graph, "ModelComputeDtype", dtype="bf16")


@thorough  # in the quick run test_flux_parity has bf16 and fp16, and test_quantised ComfyUI's own bits on one worker
@pytest.mark.parametrize("plan", [BY_STORE[plan] for plan in ("ulysses", "stages")], ids=["ulysses", "stages"])
@pytest.mark.parametrize("name", NAMES)
def test_bf16_is_as_close_to_fp32_as_comfyuis(latent_of: LatentOf, name: str, plan: dict[str, Any]) -> None:
    """One worker gives ComfyUI's own bits; the result of several workers is at most 1.5 times as far from fp32 as ComfyUI's."""
    graph = graph_of(name)
    exact, stock = latent_of(graph), latent_of(in_bf16(graph))
    assert torch.equal(latent_of(spread(in_bf16(graph), "cpu:1")), stock)
    ours = relative_error(latent_of(spread(in_bf16(graph), **plan)), exact)
    print(f"{name}: {ours:.5f}, ComfyUI {relative_error(stock, exact):.5f}")
    assert ours <= 1.5 * relative_error(stock, exact)
