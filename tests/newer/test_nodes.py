"""Nodes that only newer ComfyUIs have, each on a model that reads its values: equal to ComfyUI's, or refused by name.

The page lists the outcome of each. For videos with sound, the tests compare both latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from scripts.comfyui import ComfyUI, QueuedRun
from tests.support.comfyuis import only_in_newer
from tests.support.graphs.comfyui import (
    DIFFERENT,
    TOLERANCE,
    save_families,
    save_latent,
    spread,
)
from tests.support.graphs.flux import Graph, insert_after_model, node, queue_logged, ways
from tests.support.graphs.sound import shown, sound_graph
from tests.support.latents import relative_error, saved_latent
from tests.support.node_outcomes import REFUSALS, newer_nodes, refused

SPLITS: Mapping[str, dict[str, Any]] = {"ulysses 2": {"cfg": 1, "ulysses": 2}, "cfg 2": {"cfg": 2}}


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    save_families(comfyui, "minimax", "ltxav")
    save_latent(comfyui, "ltxav-sound", 1, 8, 11, 16)


def on_the_model(kind: str, **inputs: Any) -> Callable[[Graph], Graph]:
    """Return a function that inserts a node between LTX-2 and its sampler."""
    return lambda graph: insert_after_model(graph, kind, start_percent=0.0, end_percent=1.0, **inputs)


def by_a_guider(kind: str, **inputs: Any) -> Callable[[Graph], Graph]:
    """Return a function that replaces the sampler by SamplerCustomAdvanced with a guider."""

    def changed(graph: Graph) -> Graph:
        given = graph["sampler"]["inputs"]
        links = {name: given[name] for name in ("model", "positive", "negative")}
        return graph | {
            "noise": node("RandomNoise", noise_seed=given["seed"]),
            "guider": node(kind, **links, **inputs),
            "select": node("KSamplerSelect", sampler_name=given["sampler_name"]),
            "sigmas": node("BasicScheduler", model=["model", 0], scheduler=given["scheduler"], steps=2, denoise=1.0),
            "sampler": node(
                "SamplerCustomAdvanced",
                **{name: [name, 0] for name in ("noise", "guider", "sigmas")},
                sampler=["select", 0],
                latent_image=given["latent_image"],
            ),
        }

    return changed


def with_a_guide(graph: Graph) -> Graph:
    """Add a picture at a frame of MiniMax-H3's video."""
    parts = {name: each for name, each in shown("last frame", steps=2).items() if name in ("encoders", "picture")}
    links = {"positive": ["positive", 0], "latent": ["latent", 0], "vae": ["encoders", 1], "image": ["picture", 0]}
    sampler = node("KSampler", **graph["sampler"]["inputs"] | {"positive": ["guided", 0]})
    return graph | parts | {"guided": node("MiniMaxH3AddGuide", **links, frame_idx=5), "sampler": sampler}


TRIED: Mapping[str, tuple[str, Callable[[Graph], Graph]]] = {
    "LTXVSpatioTemporalGuidance": ("ltxav", on_the_model("LTXVSpatioTemporalGuidance", scale=1.5, blocks="1")),
    "LTXVModalityGuidance": ("ltxav", on_the_model("LTXVModalityGuidance", modality_scale=3.0)),
    "LTXVDualCFGGuider": ("ltxav", by_a_guider("LTXVDualCFGGuider", video_cfg=3.0, audio_cfg=2.0)),
    "MiniMaxH3AddGuide": ("minimax", with_a_guide),
}
"""The nodes under test by class: the node's model, and the function that inserts the node into that model's graph."""


def both(server: ComfyUI, run: QueuedRun) -> tuple[Tensor, Tensor]:
    run.check()
    return saved_latent(server, run), saved_latent(server, run, "save sound")


@pytest.mark.parametrize("plan", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("kind", TRIED)
def test_a_newer_node_on_a_model_that_reads_it_gives_the_listed_outcome(
    kind: str, plan: dict[str, Any], comfyui: ComfyUI
) -> None:
    only_in_newer(kind, bool(comfyui.object_info(kind)))
    name, put = TRIED[kind]
    plain = sound_graph(name, steps=2)
    graph = put(plain)
    run, log = queue_logged(comfyui, spread(graph, strict=False, **plan))
    outcome = newer_nodes()[kind]
    if refused(kind, run):
        assert outcome == "refused"
        return
    stock, without = both(comfyui, comfyui.queue(graph)), both(comfyui, comfyui.queue(plain))
    assert max(map(relative_error, without, stock)) > DIFFERENT
    assert max(map(relative_error, both(comfyui, run), stock)) <= TOLERANCE
    assert outcome == ("in the loop" if ways(log) == ["loop"] else "one call")


def test_a_shift_of_minimax_h3_gives_comfyuis_latents_or_its_error(comfyui: ComfyUI) -> None:
    """The stock model fails with this node from ComfyUI 0.32 on. A parallel model then fails too."""
    graph = insert_after_model(sound_graph("minimax", steps=2), "ModelSamplingSD3", shift=9.0)
    own, stock = comfyui.queue(spread(graph, strict=False)), comfyui.queue(graph)
    if stock.error is None:
        assert max(map(relative_error, both(comfyui, own), both(comfyui, stock))) <= TOLERANCE
    else:
        assert own.error is not None
        assert own.error.exception_type in REFUSALS or own.error.exception_message == stock.error.exception_message
