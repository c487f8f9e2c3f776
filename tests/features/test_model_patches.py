"""Model patches that run a network next to the model's blocks give the same picture as on the stock loader."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.graphs.comfyui import LatentOf
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_matters_and_stock
from tests.support.graphs.flux import Graph, insert_after_model, node
from tests.support.graphs.networks import CHANGED, NETWORK_PLANS, anima_graphs, change
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_wide
from tests.support.tiny.controlnet import save_wan_vae
from tests.support.tiny.models import draw


@pytest.fixture(scope="module")
def anima(comfyui: ComfyUI) -> tuple[Graph, Graph]:
    return anima_graphs(comfyui)


@thorough  # in the quick run models/test_networks runs these networks, and test_infinite_talk one through ComfyUI's nodes
@pytest.mark.parametrize("plan", NETWORK_PLANS)
def test_lllite_changes_anima_as_on_the_stock_loader(
    latent_of: LatentOf, anima: tuple[Graph, Graph], plan: str
) -> None:
    """The degree cfg 2 makes the graph run one model call at a time."""
    patched, plain = anima
    strict = plan != "cfg 2"
    if not strict:
        patched = insert_after_model(patched, "RescaleCFG", multiplier=0.7)
    assert_matters_and_stock(latent_of, plain, patched, strict=strict, **NETWORK_PLANS[plan])


@pytest.mark.parametrize(("changed", "said"), CHANGED)
def test_inputs_that_a_network_does_not_support_are_refused(
    comfyui: ComfyUI, anima: tuple[Graph, Graph], changed: Graph, said: str
) -> None:
    assert refused(comfyui, change(anima[0], changed)).startswith(said)


QWEN = "wide_qwen"


@thorough
@pytest.mark.parametrize("plan", ["ulysses 2", "cfg 2"])
def test_diffsynth_adds_to_qwen_image_as_on_the_stock_loader(
    comfyui: ComfyUI, latent_of: LatentOf, anima: tuple[Graph, Graph], plan: str
) -> None:
    """The latent is smaller than the picture, which the node encodes again at the latent's size."""
    models = comfyui.base_dir / "models"
    save_wide(models / "diffusion_models", QWEN)
    save_wan_vae(models / "vae" / f"{QWEN}-hint.safetensors")
    plain = anima[1] | {"latent": node("EmptySD3LatentImage", width=96, height=80, batch_size=1)}
    plain["model"] = node("UNETLoader", unet_name=f"{QWEN}.safetensors", weight_dtype="default")
    for tokens, side in ((7, "positive"), (4, "negative")):
        save_file({"cond": draw(1, tokens, 3584, seed=tokens)}, comfyui.input_dir / f"{QWEN}-{side}.safetensors")
        plain[side] = node("LoadConditioning", conditioning=f"{QWEN}-{side}.safetensors")
    beside = {
        "vae": node("VAELoader", vae_name=f"{QWEN}-hint.safetensors"),
        "network": node("PackNetwork", blocks=1),
    }
    given = {"model_patch": ["network", 0], "vae": ["vae", 0], "image": ["image", 0], "strength": 0.7}
    patched = insert_after_model(plain | beside, "QwenImageDiffsynthControlnet", **given)
    assert_matters_and_stock(latent_of, plain, patched, strict=plan != "cfg 2", **NETWORK_PLANS[plan])
