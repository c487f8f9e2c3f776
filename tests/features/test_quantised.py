"""Files of ComfyUI's own quantisers: the workers multiply as ComfyUI does, also with LoRA."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.comfyui import BY_STORE, DIFFERENT, graph_of, save_families, spread
from tests.support.graphs.flux import Graph, insert_after_model
from tests.support.graphs.loras import LORA, save_lora, with_lora
from tests.support.graphs.quantised import LatentOf, distance, file_name
from tests.support.latents import relative_error
from tests.support.leaving import check_that_one_copy_waits_and_comes_back
from tests.support.selection import thorough
from tests.support.tiny.quantised import FORMATS, save_quantised

NAMES = ("flux2", "wan")

QUICK = {"fp8": "flux2", "nvfp4": "wan", "int8_convrot": "flux2"}
"""Formats of the quick run, each with its model: fp8 on one rank, the others with a LoRA on several.

`models/test_quantised` has every layer.
"""

SPREAD = [
    ("fp8", "ulysses", "wan"),
    ("fp8_e5m2", "stages", "flux2"),
    ("nvfp4", "sharded", "wan"),
    ("mxfp8", "stages", "flux2"),
    ("int8", "ulysses", "wan"),
    ("int8_rows", "sharded", "flux2"),
    ("int8_convrot", "sharded", "flux2"),
    ("int8_convrot", "stages", "wan"),
    ("w4a4", "ulysses", "flux2"),
]
QUICK_SPREAD = SPREAD[2], SPREAD[6]


@pytest.fixture(scope="module", autouse=True)
def _files(pytestconfig: pytest.Config, comfyui: ComfyUI) -> None:
    save_families(comfyui, *NAMES)
    folder = comfyui.base_dir / "models" / "diffusion_models"
    for name in NAMES:
        tensors = load_file(folder / f"{name}.safetensors")
        for form in FORMATS:
            if pytestconfig.getoption("all") or QUICK.get(form) == name:
                save_quantised(folder / file_name(name, form), tensors, form)
        save_lora(comfyui.base_dir / "models" / "loras" / f"{name}-lora.safetensors", LORA[name], tensors)


def of_file(name: str, form: str) -> Graph:
    """Return a small graph with a quantised file."""
    graph = graph_of(name, steps=2)
    graph["model"]["inputs"]["unet_name"] = file_name(name, form)
    return graph


@thorough
def test_a_weight_dtype_applies_to_the_same_weights_as_in_comfyui(latent_of: LatentOf) -> None:
    graph = of_file("flux2", "nvfp4")
    default = latent_of(graph)
    graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    assert relative_error(latent_of(graph), default) > DIFFERENT
    distance(latent_of, graph, graph, {"devices": "cpu:2"}, "nvfp4")


@pytest.mark.parametrize(  # in the quick run models/test_quantised has every format's bits with a LoRA
    "form", [pytest.param(form, marks=[thorough] * (form != "fp8")) for form in FORMATS]
)
def test_lora_on_one_rank_gives_comfyuis_own_bits(latent_of: LatentOf, form: str) -> None:
    graph = with_lora(of_file("flux2", form), "flux2", 0.8)
    assert relative_error(latent_of(graph), latent_of(of_file("flux2", form))) > DIFFERENT
    assert torch.equal(latent_of(spread(graph, "cpu:1")), latent_of(graph))


@pytest.mark.parametrize(  # in the quick run models/test_quantised has a sharded layer of these two kinds too
    ("form", "plan", "name"), [pytest.param(*case, marks=[thorough] * (case not in QUICK_SPREAD)) for case in SPREAD]
)
def test_quantised_files_with_a_lora_on_several_ranks_are_as_precise_as_comfyui(
    latent_of: LatentOf, form: str, plan: str, name: str
) -> None:
    exact = with_lora(graph_of(name, steps=2), name, 0.8)
    distance(latent_of, with_lora(of_file(name, form), name, 0.8), exact, BY_STORE[plan], form)


@thorough
@pytest.mark.parametrize("form", QUICK)
def test_weights_with_lora_leave_the_devices_and_come_back(comfyui: ComfyUI, form: str) -> None:
    graph = spread(with_lora(of_file("flux2", form), "flux2", 0.8), **BY_STORE["ulysses"])
    check_that_one_copy_waits_and_comes_back(comfyui, graph)


@thorough  # in the quick run test_model_options compiles Wan's blocks by the same node, models/test_compiled any blocks
def test_compiled_quantised_blocks_with_a_lora_give_the_stock_latent(assert_equal_latents: EqualLatents) -> None:
    """Compiled blocks keep ComfyUI's own quantised layers. The backend of the node on the MODEL overrides the plan's."""
    graph = with_lora(of_file("flux2", "nvfp4"), "flux2", 0.8)
    compiled = insert_after_model(spread(graph, "cpu:1", compile="on"), "TorchCompileModel", backend="cudagraphs")
    log = assert_equal_latents(compiled, graph)
    assert "blocks compiled by cudagraphs" in log
    assert "is not compiled" not in log
    assert re.search(r"Parallel: blocks compiled in \d+\.\d s;", log)
