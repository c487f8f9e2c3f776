"""Inductor, which compiles kernels of the blocks, gives the result of ComfyUI's KSampler for each store of weights.

The other tests compile with `cudagraphs`, which on CPUs runs the same graphs uncompiled and takes only seconds.
"""

from __future__ import annotations

from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import BY_STORE, DIFFERENT, TOLERANCE, LatentOf, graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after_model, queue_logged
from tests.support.graphs.loras import LORA, save_lora, with_lora
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough
from tests.support.tiny.formats import quantise
from tests.support.tiny.quantised import save_quantised

NAME = "flux2"
GGUF = f"{NAME}-inductor.gguf"
VALUES = f"{NAME}-inductor-values.safetensors"
pytestmark = thorough


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, NAME)
    models = comfyui.base_dir / "models"
    folder = models / "diffusion_models"
    tensors = load_file(folder / f"{NAME}.safetensors")
    for form in ("fp8", "int8_convrot"):
        save_quantised(folder / f"{NAME}-inductor-{form}.safetensors", tensors, form)
    quantise(folder / GGUF, folder / VALUES, Type.Q4_K, tensors)
    save_lora(models / "loras" / f"{NAME}-lora.safetensors", LORA[NAME], tensors)


def of_file(file: str, strength: float = 0.8) -> Graph:
    """Return a graph of two steps with a file, and a LoRA of this strength."""
    graph = graph_of(NAME, steps=2)
    graph["model"]["inputs"]["unet_name"] = file
    return with_lora(graph, NAME, strength)


def compiled(server: ComfyUI, graph: Graph) -> Tensor:
    """Return the latent of a parallel graph with compiled blocks; fail if a kind of block was not compiled."""
    run, log = queue_logged(server, insert_after_model(graph, "TorchCompileModel", backend="inductor"), timeout=900)
    latent = saved_latent(server, run.check())
    assert "blocks compiled by inductor" in log
    assert "is not compiled" not in log
    return latent


@pytest.mark.parametrize("plan", BY_STORE.values(), ids=BY_STORE)
def test_compiled_blocks_of_each_store_give_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf, plan: dict[str, Any]
) -> None:
    graph = graph_of(NAME, steps=2)
    error = relative_error(compiled(comfyui, spread(graph, **plan)), latent_of(graph))
    print(f"{error:.1e} from ComfyUI's")
    assert error <= TOLERANCE


def test_compile_on_in_the_plan_compiles_the_blocks(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The plan compiles without a node on the MODEL. One model call at a time, nothing is compiled, and a message says so."""
    graph = graph_of(NAME, steps=2)
    run, log = queue_logged(comfyui, spread(graph, **BY_STORE["ulysses"], compile="on"), timeout=900)
    assert relative_error(saved_latent(comfyui, run.check()), latent_of(graph)) <= TOLERANCE
    assert "blocks compiled by inductor" in log and "is not compiled" not in log
    by_calls = spread(graph, strict=False, **BY_STORE["ulysses"], compile="on")
    run, log = queue_logged(comfyui, insert_after_model(by_calls, "RescaleCFG", multiplier=0.7))
    run.check()
    assert "blocks compiled" not in log
    assert any("The blocks are not compiled" in text.text for text in run.texts)


@pytest.mark.parametrize("file", [f"{NAME}.safetensors", f"{NAME}-inductor-fp8.safetensors"], ids=["fp32", "fp8"])
def test_loras_of_two_strengths_in_compiled_blocks_give_the_stock_latent(
    comfyui: ComfyUI, latent_of: LatentOf, file: str
) -> None:
    for strength in (0.8, -0.3):
        graph = of_file(file, strength)
        assert relative_error(compiled(comfyui, spread(graph, **BY_STORE["ulysses"])), latent_of(graph)) <= TOLERANCE


def test_gguf_with_a_lora_in_compiled_blocks_gives_the_stock_latent(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The stock loader does not read GGUF and runs the same values in fp32."""
    ours = of_file(GGUF)
    stock = of_file(VALUES)
    assert relative_error(latent_of(stock), latent_of(of_file(f"{NAME}.safetensors"))) > DIFFERENT
    assert relative_error(compiled(comfyui, spread(ours, **BY_STORE["ulysses"])), latent_of(stock)) <= TOLERANCE


def test_layers_that_round_are_no_further_from_the_exact_result_than_comfyuis(
    comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    """INT8's layers round their inputs: an input's last bit decides the rounding, and later layers amplify the difference."""
    graph, exact = of_file(f"{NAME}-inductor-int8_convrot.safetensors"), latent_of(of_file(f"{NAME}.safetensors"))
    ours, stock = compiled(comfyui, spread(graph, **BY_STORE["ulysses"])), latent_of(graph)
    print(f"{relative_error(ours, stock):.2g} from ComfyUI's")
    assert relative_error(ours, exact) <= 1.5 * relative_error(stock, exact)
