"""ControlNet through the stock Apply ControlNet node gives the same picture as on the stock loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.comfy_oracle import comfy_on_path
from tests.support.graphs.comfyui import LatentOf, save_latent
from tests.support.graphs.flux import (
    Graph,
    controlled,
    insert_after,
    ksampler_graph,
    node,
    parallel,
    ways,
)
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.server import NARROW, save_picture
from tests.support.tiny.controlnet import save_instantx, save_xlabs
from tests.support.tiny.flux import save_conditioning
from tests.support.tiny.pixart import TEXT_WIDTH as PIXART_TEXT
from tests.support.tiny.pixart import save_pixart
from tests.vae.comfy_vaes import save_image_vae

DIFFERENT = 1e-2

T2I = node("ControlNetLoader", control_net_name="t2i.safetensors")


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    folder = comfyui.base_dir / "models" / "controlnet"
    save_xlabs(folder / "tiny-a.safetensors", heads=2)
    save_xlabs(folder / "tiny-b.safetensors", heads=2, single_blocks=0, seed=1)
    save_instantx(folder / "instantx.safetensors", heads=2)
    save_image_vae(comfyui.base_dir / "models" / "vae" / "hint.safetensors")
    save_latent(comfyui, "reference", 1, 16, 7, 5)
    save_picture(comfyui, "hint.png", (80, 48), (6, 10))


def job(**settings: Any) -> Graph:
    """Return a graph of 15 image tokens, with the nodes that a ControlNet needs."""
    return ksampler_graph(NARROW, **{"width": 80, "height": 48, "steps": 3, "cfg": 2.0} | settings) | {
        "net": node("ControlNetLoader", control_net_name="tiny-a.safetensors"),
        "other net": node("ControlNetLoader", control_net_name="tiny-b.safetensors"),
        "image": node("LoadImage", image="hint.png"),
    }


def controlled_by_latent(graph: Graph) -> Graph:
    """Add a ControlNet whose hint is the picture's latent, encoded by the stock VAE."""
    net = node("ControlNetLoader", control_net_name="instantx.safetensors")
    graph = controlled(graph | {"net": net, "vae": node("VAELoader", vae_name="hint.safetensors")}, strength=0.6)
    graph["control by net"]["inputs"]["vae"] = ["vae", 0]
    return graph


CASES: dict[str, tuple[Graph, dict[str, Any]]] = {
    "two on a batch, in a ring": (
        controlled(controlled(job(batch=2), strength=0.5), strength=0.4, net="other net"),
        {"ring": 2},
    ),
    "only at first, texts of 37 and 45, in stages": (
        controlled(job(negative="cond-45"), end=0.4),
        {"pipefusion": 2, "ulysses": 1, "warmup_steps": 8},
    ),
    "a latent hint, each row apart": (controlled_by_latent(job(batch=2)), {"devices": "cpu:4", "data": 2, "cfg": 2}),
}
"""Graphs and plans. A ring divides the tokens as ulysses does; models/test_sequence_parallel has the residuals."""

FURTHER: dict[str, tuple[Graph, dict[str, Any]]] = {
    "beside a reference": (
        insert_after(
            controlled(job() | {"reference": node("LoadLatent", latent="reference.latent")}),
            "positive",
            "ReferenceLatent",
            "conditioning",
            latent=["reference", 0],
        ),
        {"ulysses": 2},
    ),
    "one, sharded": (controlled(job(), strength=0.7), {"ulysses": 2, "weights": "sharded"}),
}
"""Cases for `--all`. Quick tests of the same: test_files_of_flux (references), test_keeping_step (sharded weights)."""


@pytest.mark.parametrize(
    ("graph", "plan"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=thorough) for name, case in FURTHER.items()),
    ],
)
def test_a_controlnet_gives_the_stock_latent(
    latent_of: LatentOf, assert_equal_latents: EqualLatents, graph: Graph, plan: dict[str, Any]
) -> None:
    prompts = {side: graph["control by net"]["inputs"][side] for side in ("positive", "negative")}
    uncontrolled = graph | {"sampler": node("KSampler", **graph["sampler"]["inputs"] | prompts)}
    assert relative_error(latent_of(graph), latent_of(uncontrolled)) > DIFFERENT
    assert ways(assert_equal_latents(parallel(graph, **plan), graph)) == ["ControlNet"]


def test_a_controlnet_for_a_family_without_controlnets_is_refused(comfyui: ComfyUI) -> None:
    comfy_on_path()
    from comfy.t2i_adapter.adapter import Adapter

    torch.manual_seed(0)
    adapter = Adapter(cin=192, channels=[8, 16, 32, 32], nums_rb=2, ksize=1, sk=True, use_conv=False)
    save_file(adapter.state_dict(), comfyui.base_dir / "models" / "controlnet" / "t2i.safetensors")
    save_pixart(comfyui.base_dir / "models" / "diffusion_models" / "pixart-controlled.safetensors")
    save_conditioning(comfyui.input_dir / "pixart.safetensors", 9, width=PIXART_TEXT)
    graph = parallel(controlled(job(positive="pixart", negative="pixart") | {"net": T2I}))
    graph["model"] = node("LoadParallelPixArt", unet_name="pixart-controlled.safetensors", weight_dtype="default")
    graph["model"]["inputs"]["plan"] = ["plan", 0]
    run = comfyui.queue(graph, timeout=300)
    assert run.error is not None
    assert run.error.exception_message == (
        "the ControlNet changes input blocks, which this model does not have: use a ControlNet that was made for this model."
    )
