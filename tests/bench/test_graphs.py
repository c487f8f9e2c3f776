"""A benchmark's graphs: stock and ours, other sizes and steps, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from parallel_backend.bench.client import Graph
from parallel_backend.bench.graphs import (
    JOBS,
    LATENT,
    PLAN,
    NotMeasured,
    changed,
    described,
    model_files,
    ours,
    read_graph,
    reseeded,
    samplers,
    staying,
    stock,
    with_latent,
    with_own_outputs,
)
from parallel_backend.bench.server import GRAPH

PARALLEL = GRAPH.with_name("sprites_parallel_api.json")


def graph() -> Graph:
    return read_graph(GRAPH)


def two_experts() -> Graph:
    """Return a graph with two samplers that take turns, as in Wan 2.2's."""
    model = {"class_type": "UNETLoader", "inputs": {"unet_name": "high.safetensors", "weight_dtype": "default"}}
    low = {"class_type": "UNETLoader", "inputs": {"unet_name": "low.safetensors", "weight_dtype": "default"}}
    shared = {"noise_seed": 7, "steps": 20, "cfg": 3.5}
    video = {"class_type": "EmptyHunyuanLatentVideo", "inputs": {"width": 640, "height": 480, "length": 81}}
    first = {"model": ["1", 0], "latent_image": ["3", 0], "start_at_step": 0, "end_at_step": 10, **shared}
    second = {"model": ["2", 0], "latent_image": ["4", 0], "start_at_step": 10, "end_at_step": 10000, **shared}
    sampling = [{"class_type": "KSamplerAdvanced", "inputs": inputs} for inputs in (first, second)]
    return {"1": model, "2": low, "3": video, "4": sampling[0], "5": sampling[1]}


def test_the_demos_two_graphs_convert_into_each_other() -> None:
    """The parallel graph converts to the stock graph, and back with the same file names."""
    assert stock(read_graph(PARALLEL)) == graph()
    swapped = ours(graph(), "cpu:2", {"vae"})
    assert (swapped["model"]["class_type"], swapped["vae"]["class_type"]) == ("LoadParallelDiffusionModel", "VAELoader")
    assert swapped["model"]["inputs"]["plan"] == [PLAN, 0]
    assert swapped[PLAN]["inputs"] == {"devices": "cpu:2"}
    assert stock(swapped) == graph()


def test_gguf_files_convert_to_the_loader_that_reads_them() -> None:
    found = ours(graph(), "0-1", ())
    found["model"]["inputs"]["unet_name"] = "quantised.gguf"
    own = stock(found)
    assert own["model"] == {"class_type": "UnetLoaderGGUF", "inputs": {"unet_name": "quantised.gguf"}}
    assert ours(own, "0-1", ())["model"] == found["model"]


def test_a_graph_is_read_from_its_picture(tmp_path: Path) -> None:
    told = PngImagePlugin.PngInfo()
    told.add_text("prompt", json.dumps(graph()))
    Image.new("RGB", (8, 8)).save(tmp_path / "drawn.png", pnginfo=told)
    assert read_graph(tmp_path / "drawn.png") == graph()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.json", None, "holds no graph"),
        ("broken.json", "{", "holds no graph"),
        ("workflow.json", '{"nodes": [], "links": []}', "is not in ComfyUI's API format"),
        ("list.json", "[]", "is not in ComfyUI's API format"),
        ("half.json", '{"1": {"class_type": "KSampler"}}', "is not in ComfyUI's API format"),
        ("other.json", '{"1": {"class_type": 1, "inputs": {}}}', "is not in ComfyUI's API format"),
    ],
)
def test_files_without_a_graph_are_refused(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(NotMeasured, match=said):
        read_graph(tmp_path / name)


def test_size_steps_and_file_of_a_graph_can_be_changed() -> None:
    found = changed(graph(), model="other.safetensors", size=(64, 96, 1), steps=4)
    assert described(found) == ("64x96", 4)
    assert model_files(found) == ["other.safetensors"]
    assert described(graph()) == ("128x128", 20)


def test_samplers_that_take_turns_share_a_changed_number_of_steps() -> None:
    found = changed(two_experts(), size=(1280, 720, 33), steps=8)
    turns = [(found[name]["inputs"]["start_at_step"], found[name]["inputs"]["end_at_step"]) for name in ("4", "5")]
    assert turns == [(0, 4), (4, 10000)]
    assert described(found) == ("1280x720x33", 8)
    assert samplers(found) == ["4", "5"]
    assert with_latent(found)[LATENT]["inputs"]["samples"] == ["5", 0]
    assert [reseeded(found)[name]["inputs"]["noise_seed"] for name in ("4", "5")] == [8, 8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: changed(two_experts(), model="one.safetensors"), "loads 2 diffusion models"),
        (lambda: with_latent({**graph(), "5": two_experts()["5"]}), "ends with 2 samplers, and one is needed"),
        (lambda: samplers({"1": two_experts()["1"]}), "has none of KSampler"),
        (lambda: changed({}, size=(8, 8, 1)), "a width and a height"),
        (lambda: changed({}, steps=3), "has its steps"),
    ],
)
def test_a_change_that_a_graph_does_not_allow_is_refused(change: Callable[[], object], said: str) -> None:
    with pytest.raises(NotMeasured, match=said):
        change()


def test_a_vae_loader_may_stay_stock_but_a_model_loader_may_not() -> None:
    whys = {"UNETLoader": "", "VAELoader": "it is another kind of VAE."}

    def ask(asked: list[dict[str, str]]) -> list[str]:
        return [whys[each["kind"]] for each in asked]

    assert staying(graph(), ask) == {"vae": "it is another kind of VAE."}
    whys["UNETLoader"] = "it is broken."
    with pytest.raises(NotMeasured, match="on several GPUs: it is broken"):
        staying(graph(), ask)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            {"vae": graph()["vae"]},
            "has no Load Diffusion Model and no Load Checkpoint: choose a graph with one of these loaders.",
        ),
        (
            {"model": graph()["model"]},
            "has none of KSampler, KSamplerAdvanced, SamplerCustom, SamplerCustomAdvanced: choose",
        ),
        (
            {**graph(), "model": {"class_type": "UNETLoader", "inputs": {"unet_name": ["name", 0]}}},
            "UNETLoader of the graph gets its file from another node: choose the file in the loader itself.",
        ),
        (
            {**graph(), "vae": {"class_type": "VAELoader", "inputs": {}}},
            "VAELoader of the graph gets its file from another node: choose the file in the loader itself.",
        ),
    ],
)
def test_a_graph_without_a_model_to_measure_is_refused_in_one_sentence(found: Graph, said: str) -> None:
    with pytest.raises(NotMeasured, match=said) as refused:
        stock(found)
    assert "\n" not in str(refused.value)


def test_inputs_that_are_lists_are_no_links() -> None:
    found = graph()
    found["sampler"]["inputs"] |= {"points": [[0, 1], [2, 3]], "names": ["nobody"], "none": []}
    assert with_latent(stock(found))[LATENT]["inputs"]["samples"] == ["sampler", 0]


def test_the_files_of_a_benchmark_are_saved_in_a_separate_folder() -> None:
    saved = {node["inputs"].get("filename_prefix") for node in with_own_outputs(with_latent(graph())).values()}
    assert saved == {None, f"{JOBS}/saved"}
