"""TRELLIS.2, from ComfyUI 0.34: its stages under cfg 2, and voxels that belong to a whole batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from safetensors.torch import save_file

from scripts.comfyui import ComfyUI
from tests.support.comfyuis import only_in_newer
from tests.support.copies.sized import sized_copy
from tests.support.graphs.comfyui import DIFFERENT, TOKENS, TOLERANCE, LatentOf, save_families, spread
from tests.support.graphs.diffusers import refused
from tests.support.graphs.family_checks import assert_stock
from tests.support.graphs.flux import Graph, node, queue_logged, ways
from tests.support.latents import relative_error, saved_latent
from tests.support.node_outcomes import newer_nodes
from tests.support.tiny.models import draw

NAME = "trellis2"
STAGES = ("Trellis2ShapeStage", "Trellis2UpsampleStage", "Trellis2TextureStage")


@pytest.fixture(scope="module")
def comfyui(comfyui: ComfyUI, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """Start a copy of ComfyUI that reads sizes from files, with the model and its prompts; skip if there is no such class."""
    only_in_newer(STAGES[0], bool(comfyui.object_info(STAGES[0])))
    server = sized_copy(tmp_path_factory.mktemp("trellis2"))
    save_families(server, NAME)
    for side, tokens in TOKENS.items():
        save_file({"embeds": draw(1, 7, 48, seed=tokens)}, server.input_dir / f"{NAME}-embeds-{side}.safetensors")
    with server:
        yield server


def staged(stages: tuple[str, ...], batch: int = 1, cfg: float = 2.5) -> Graph:
    """Return a graph with a sampler for each stage, by the stock loader; without stages, a graph for the structure.

    The last sampler is "sampler".
    """
    prompts = {side: [side, 0] for side in TOKENS}
    settings = {"sampler_name": "euler", "scheduler": "simple", "seed": 7, "steps": 2, "cfg": cfg, "denoise": 1.0}
    graph: Graph = {
        "model": node("UNETLoader", unet_name=f"{NAME}.safetensors", weight_dtype="default"),
        "voxels": node("PackVoxels", batch=batch),
        "structure": node("EmptyTrellis2LatentStructure", batch_size=batch),
    }
    for side in TOKENS:
        graph[f"text-{side}"] = node("LoadConditioning", conditioning=f"{NAME}-{side}.safetensors")
        graph[side] = node("PackPrompt", conditioning=[f"text-{side}", 0], file=f"{NAME}-embeds-{side}.safetensors")
    graph["sampler"] = node("KSampler", model=["model", 0], latent_image=["structure", 0], **prompts, **settings)
    before = ""
    for number, stage in enumerate(stages):
        given = {
            "Trellis2ShapeStage": {"voxel": ["voxels", 0]},
            "Trellis2UpsampleStage": {"shape_latent": [before, 0], "vae": ["voxels", 1], "target_resolution": 1024},
            "Trellis2TextureStage": {"shape_latent": [before, 0]},
        }[stage]
        graph[stage] = node(stage, **prompts, **given)
        links = dict(zip((*TOKENS, "latent_image"), ([stage, output] for output in range(3)), strict=True))
        before = "sampler" if number == len(stages) - 1 else f"sampler {number}"
        graph[before] = node("KSampler", model=["model", 0], **links, **settings)
    return graph | {"save": node("SaveLatent", samples=["sampler", 0], filename_prefix="trellis2")}


@pytest.mark.parametrize("stages", [(), STAGES[:1], STAGES[:2], (STAGES[0], STAGES[2])], ids="-".join)
def test_stages_under_cfg_2_give_the_stock_result(
    stages: tuple[str, ...], comfyui: ComfyUI, latent_of: LatentOf
) -> None:
    graph = staged(stages)
    stock = latent_of(graph)
    run, log = queue_logged(comfyui, spread(graph, cfg=2))
    assert relative_error(saved_latent(comfyui, run.check()), stock) <= TOLERANCE
    assert set(ways(log)) == {"loop"}
    if stages:
        assert relative_error(latent_of(staged(stages, cfg=1.0)), stock) > DIFFERENT
        assert newer_nodes()[stages[-1]] == "in the loop"


def test_shapes_of_a_batch_give_the_stock_result_without_data_ranks(comfyui: ComfyUI, latent_of: LatentOf) -> None:
    """The voxels of a batch are one list, so each rank has all of them."""
    graph = staged(STAGES[:1], batch=2)
    assert_stock(latent_of, graph, cfg=2)
    assert refused(comfyui, spread(graph, data=2)).startswith("data 2 is more than the batch of 1")
