"""Model files of all forms, LoRA and dtypes for ComfyUI's own models: Load Parallel Diffusion Model against the stock loader."""

from __future__ import annotations

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

GGUF = (Type.Q8_0, Type.Q4_K)
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
SCALED = ("old", "marks", "metadata")


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "wan")
    folder = comfyui.base_dir / "models" / "diffusion_models"
    tensors = load_file(folder / "wan.safetensors")
    for form, dtype in TYPES.items():
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, folder / f"wan-{form}.safetensors")
    for form in SCALED:
        write_scaled(folder / f"wan-{form}.safetensors", tensors, form)
    for kind in GGUF:
        quantise(folder / f"wan-{kind.name}.gguf", folder / f"wan-{kind.name}-values.safetensors", kind, tensors)
    save_lora(comfyui.base_dir / "models" / "loras" / "wan-lora.safetensors", LORA["wan"], tensors)


def of_file(form: str) -> Graph:
    """Return a graph of two steps with a file of this form."""
    graph = graph_of("wan", steps=2)
    graph["model"]["inputs"]["unet_name"] = f"wan{form}.safetensors"
    return graph


def check(latent_of: LatentOf, graph: Graph, plan: str, file: str | None = None) -> None:
    """Check that a graph's latent on workers, from another file if one is given, equals the stock loader's."""
    ours = spread(graph, **BY_STORE[plan])
    if file is not None:
        ours["model"]["inputs"]["unet_name"] = file
    assert relative_error(latent_of(ours), latent_of(graph)) <= TOLERANCE


@pytest.mark.parametrize(
    ("form", "plan"),
    [
        ("-marks", "sharded"),
        # in the quick run test_files_of_flux has marks in stages and bf16, and a LoRA is on streamed fp8 below
        *(
            pytest.param(*case, marks=thorough)
            for case in (
                *(("-bf16", "sharded"), ("-fp16", "stages"), ("-fp8", "ulysses"), ("-fp8", "streamed")),
                *(("-fp8", "stages"), ("-old", "sharded"), ("-metadata", "stages")),
            )
        ),
    ],
)
def test_files_of_every_dtype_give_the_stock_latent(latent_of: LatentOf, form: str, plan: str) -> None:
    check(latent_of, of_file(form), plan)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Q4_K", "stages"),
        *(pytest.param(*case, marks=thorough) for case in (("Q4_K", "streamed"), ("Q8_0", "sharded"))),
    ],
)
def test_gguf_files_give_the_stock_latent_of_their_values(latent_of: LatentOf, kind: str, plan: str) -> None:
    """ComfyUI runs the values that the gguf package itself expands."""
    check(latent_of, of_file(f"-{kind}-values"), plan, f"wan-{kind}.gguf")


def test_the_loaders_weight_dtype_gives_the_stock_latent(latent_of: LatentOf) -> None:
    graph = of_file("")
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    check(latent_of, graph, "sharded")


# -- LoRA


FILES = {"": "wan.safetensors", "-fp8": "wan-fp8.safetensors", "-Q4_K-values": "wan-Q4_K.gguf"}
"""The stock loader's form of a file, and the file of the workers."""

QUICK = ("-fp8", "streamed")
"""The case of the quick run, where the next test has a LoRA in stages, test_lora_on_flux one on sharded GGUF, and test_quantised
one on FLUX.2.
"""


@pytest.mark.parametrize(
    ("form", "plan"),
    [pytest.param(form, plan, marks=[thorough] * ((form, plan) != QUICK)) for form in FILES for plan in BY_STORE],
)
def test_a_lora_gives_the_stock_latent(latent_of: LatentOf, form: str, plan: str) -> None:
    """The latent equals the stock loader's on weights of every kind; for GGUF the stock loader has the values in fp32."""
    stock = with_lora(of_file(form), "wan", 0.8)
    assert relative_error(latent_of(stock), latent_of(of_file(form))) > DIFFERENT
    check(latent_of, stock, plan, FILES[form])


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
