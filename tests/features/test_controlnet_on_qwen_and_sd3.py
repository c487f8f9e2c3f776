"""ControlNet of Qwen-Image and SD 3 through the stock Apply ControlNet node gives the same picture as on the stock loader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.features.conftest import EqualLatents
from tests.support.graphs.comfyui import LatentOf, graph_of, spread
from tests.support.graphs.comfyui_inputs import LATENTS
from tests.support.graphs.flux import Graph, controlled, node, ways
from tests.support.graphs.networks import NETWORK_PLANS
from tests.support.latents import relative_error
from tests.support.selection import thorough
from tests.support.server import save_picture
from tests.support.tiny.comfyui import TINY, save_tiny, save_wide
from tests.support.tiny.controlnet import save_qwen, save_sd3, save_wan_vae
from tests.support.tiny.models import draw
from tests.vae.comfy_vaes import save_image_vae

pytestmark = thorough
"""The mark that leaves this file to `--all`. Quick tests of the same code: test_controlnet_on_flux (the nodes) and
models/test_sequence_parallel (SD 3.5 with residuals).
"""

DIFFERENT = 1e-2
QWEN, SD3 = "wide_qwen", "sd3"
"""Names of the models. ComfyUI assumes the real width for Qwen-Image, so its file has this width and a single block."""

SIZES = LATENTS | {QWEN: node("EmptySD3LatentImage", width=112, height=72, batch_size=1)}
MASKS = {"positive": [1, 1, 0, 1, 1, 1, 0], "negative": [1, 1, 1, 1, 0, 0, 0]}
"""Attention masks of one length, so that ComfyUI makes one call of both branches, which the workers compute as two."""


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    save_sd3(models / "controlnet" / f"{SD3}-net.safetensors")
    save_image_vae(models / "vae" / f"{SD3}-hint.safetensors")
    save_wan_vae(models / "vae" / f"{QWEN}-hint.safetensors")
    save_picture(comfyui, "hint-112.png", (112, 72), (9, 14))
    save_tiny(models / "diffusion_models", SD3)
    for side, mask in MASKS.items():
        [(cond, options)] = TINY[SD3].prompt(len(mask), seed=sum(mask))
        save_file({"cond": cond, **options}, comfyui.input_dir / f"controlled-{SD3}-{side}.safetensors")
        masked = {"cond": draw(1, len(mask), 3584, seed=sum(mask)), "attention_mask": torch.tensor([mask])}
        save_file(masked, comfyui.input_dir / f"controlled-{QWEN}-{side}.safetensors")


@pytest.fixture(scope="module")
def wide(comfyui: ComfyUI) -> None:
    """Save the large files of Qwen-Image and its ControlNet."""
    save_wide(comfyui.base_dir / "models" / "diffusion_models", QWEN)
    save_qwen(comfyui.base_dir / "models" / "controlnet" / f"{QWEN}-net.safetensors")


def graphs(name: str) -> tuple[Graph, Graph]:
    """Return a graph with a ControlNet and the same graph without."""
    graph = graph_of("wan") | {"latent": SIZES[name]}
    graph["model"]["inputs"]["unet_name"] = f"{name}.safetensors"
    for side in MASKS:
        graph[side]["inputs"]["conditioning"] = f"controlled-{name}-{side}.safetensors"
    beside = {
        "net": node("ControlNetLoader", control_net_name=f"{name}-net.safetensors"),
        "vae": node("VAELoader", vae_name=f"{name}-hint.safetensors"),
        "image": node("LoadImage", image="hint-112.png"),
    }
    with_net = controlled(graph | beside, strength=0.7)
    with_net["control by net"]["inputs"]["vae"] = ["vae", 0]
    return with_net, graph


@pytest.fixture
def check(latent_of: LatentOf, assert_equal_latents: EqualLatents) -> Callable[[str, str], None]:
    """Provide a function that checks a model under a plan: the latent equals the stock loader's; the ControlNet changes it."""

    def compare(name: str, plan: str) -> None:
        graph, plain = graphs(name)
        assert relative_error(latent_of(plain), latent_of(graph)) > DIFFERENT
        assert ways(assert_equal_latents(spread(graph, strict=False, **NETWORK_PLANS[plan]), graph)) == ["ControlNet"]

    return compare


@pytest.mark.parametrize("plan", NETWORK_PLANS)
def test_sd3_is_controlled_as_on_the_stock_loader(check: Callable[[str, str], None], plan: str) -> None:
    check(SD3, plan)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("plan", ["ulysses 2", "cfg 2", "ulysses 2 x ring 2"])
def test_qwen_image_with_masked_texts_is_controlled_as_on_the_stock_loader(
    check: Callable[[str, str], None], plan: str
) -> None:
    check(QWEN, plan)
