"""Graphs in ComfyUI's API format: changes of their loaders, of their size, seed and number of steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from .client import Graph

SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
"""ComfyUI's nodes that denoise and report their steps. Their first output is the latent."""

GGUF = "UnetLoaderGGUF"
"""Another pack's loader of GGUF files."""

LOADERS = {
    "UNETLoader": "LoadParallelDiffusionModel",
    GGUF: "LoadParallelDiffusionModel",
    "CheckpointLoaderSimple": "LoadParallelCheckpoint",
    "VAELoader": "LoadParallelVAE",
}
"""Loader of ComfyUI's -> this pack's loader that replaces it, with the same inputs."""

BACK = {
    "LoadParallelDiffusionModel": "UNETLoader",
    "LoadParallelFlux": "UNETLoader",
    "LoadParallelCheckpoint": "CheckpointLoaderSimple",
    "LoadParallelVAE": "VAELoader",
    "ParallelSampler": "KSampler",
}
"""Node of this pack -> the node that replaces it in a stock graph."""

OURS_ALONE = ("plan", "devices", "preset", "frame_batches")
"""Inputs that only this pack's loaders have."""

FILES = ("unet_name", "ckpt_name")
"""Inputs that name a model's file."""

PLAN, LATENT = "bench plan", "bench latent"
"""Ids of the nodes that a benchmark adds."""

FOLDER = "parallel-bench"
"""Folder in ComfyUI's output folder for the files of benchmarks."""

JOBS = f"{FOLDER}/jobs"
"""Folder for the files that a benchmark's jobs save."""

ALL_STEPS = 10_000
"""The value with which KSamplerAdvanced says that it ends at the last step."""


class NotMeasured(ValueError):
    """The error of a job that cannot be measured. The message says why and what to do."""


def read_graph(path: Path) -> Graph:
    """Read a graph from an API export, or from a picture that ComfyUI saved. Raises NotMeasured if a file is neither."""
    try:
        if path.suffix.lower() in (".png", ".webp"):
            with Image.open(path) as image:
                text = str(image.info["prompt"])
        else:
            text = path.read_text(encoding="utf-8")
        graph = json.loads(text)
    except (OSError, KeyError, ValueError) as error:
        raise NotMeasured(f"{path} holds no graph ({error}): export one by File > Export (API) in ComfyUI.") from None
    if not is_graph(graph):
        raise NotMeasured(f"{path} is not in ComfyUI's API format: export it by File > Export (API) in ComfyUI.")
    return graph


def is_graph(content: Any) -> bool:
    """Return True if a value has the form of a graph."""
    return isinstance(content, dict) and all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in content.values()
    )


def stock(graph: Graph) -> Graph:
    """Return the same graph with ComfyUI's own loaders and samplers, without plans.

    Raises:
        NotMeasured: the graph has no loader of a model, or not exactly one last sampler.
    """
    graph = {name: node for name, node in copy.deepcopy(graph).items() if node["class_type"] != "ParallelPlan"}
    for node in graph.values():
        if node["class_type"] in BACK:
            node["class_type"] = BACK[node["class_type"]]
            for input_name in OURS_ALONE:
                node["inputs"].pop(input_name, None)
        if node["class_type"] == "UNETLoader" and str(node["inputs"].get("unet_name")).endswith(".gguf"):
            node["class_type"] = GGUF  # ComfyUI's own loader does not read GGUF
            node["inputs"].pop("weight_dtype", None)
    if not model_files(graph):
        raise NotMeasured(
            "The graph has no Load Diffusion Model and no Load Checkpoint: choose a graph with one of these loaders."
        )
    last_sampler(graph)
    return graph


def ours(graph: Graph, devices: str, stays: Collection[str]) -> Graph:
    """Return a stock graph with this pack's loaders on a plan's devices. Loaders whose ids are in `stays` do not change."""
    graph = copy.deepcopy(graph)
    for name, node in graph.items():
        if node["class_type"] in LOADERS and name not in stays:
            node["inputs"] |= {"weight_dtype": "default"} if node["class_type"] == GGUF else {}
            node["class_type"] = LOADERS[node["class_type"]]
            node["inputs"]["plan"] = [PLAN, 0]
    graph[PLAN] = {"class_type": "ParallelPlan", "inputs": {"devices": devices}}
    return graph


def loaders(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Yield the id, class and file of each loader of a stock graph that this pack may have a loader for.

    Raises:
        NotMeasured: a loader gets its file from another node.
    """
    for name, node in graph.items():
        if node["class_type"] in LOADERS:
            file = next((node["inputs"][key] for key in (*FILES, "vae_name") if key in node["inputs"]), None)
            if not isinstance(file, str):
                raise NotMeasured(
                    f"{node['class_type']} of the graph gets its file from another node: choose the file in the "
                    "loader itself."
                )
            yield name, node["class_type"], file


def model_files(graph: Graph) -> list[str]:
    """Return the files of a stock graph's diffusion models, in the graph's order."""
    return [file for _, kind, file in loaders(graph) if kind != "VAELoader"]


def samplers(graph: Graph) -> list[str]:
    """Return the ids of the nodes that denoise. Raises NotMeasured if there is none."""
    ids = [name for name, node in graph.items() if node["class_type"] in SAMPLERS]
    if not ids:
        raise NotMeasured(f"The graph has none of {', '.join(SAMPLERS)}: choose a graph with one of these samplers.")
    return ids


def last_sampler(graph: Graph) -> str:
    """Return the id of the sampler that no other sampler follows. Raises NotMeasured if there is none, or more than one."""
    ids = samplers(graph)
    last = [name for name in ids if not any(name in _before(graph, later) for later in ids)]
    if len(last) != 1:
        raise NotMeasured(f"The graph ends with {len(last)} samplers, and one is needed: remove the others.")
    return last[0]


def with_latent(graph: Graph) -> Graph:
    """Return a graph that also saves the latent of its last sampler. Raises NotMeasured as `last_sampler` does."""
    saved = {"samples": [last_sampler(graph), 0], "filename_prefix": f"{JOBS}/latent"}
    return graph | {LATENT: {"class_type": "SaveLatent", "inputs": saved}}


def with_own_outputs(graph: Graph) -> Graph:
    """Return a graph whose nodes save their files into a folder of benchmarks."""
    graph = copy.deepcopy(graph)
    for node in graph.values():
        if isinstance(node["inputs"].get("filename_prefix"), str):
            node["inputs"]["filename_prefix"] = f"{JOBS}/saved"
    return graph


def changed(
    graph: Graph,
    *,
    model: str = "",
    size: tuple[int, int, int] | None = None,
    steps: int = 0,
) -> Graph:
    """Return a graph with another file of its diffusion model, another size or number of steps, where they are given.

    Args:
        size: width and height in pixels, and frames, which count if the graph has frames.
        steps: steps of the whole denoise. Samplers that take turns share them as before.

    Raises:
        NotMeasured: the graph has no value that could be changed.
    """
    graph = copy.deepcopy(graph)
    if model:
        named = [(node["inputs"], key) for node in graph.values() for key in FILES if key in node["inputs"]]
        if len(named) != 1:
            raise NotMeasured(f"The graph loads {len(named)} diffusion models: choose the file in the graph itself.")
        inputs, key = named[0]
        inputs[key] = model
    if size:
        _resize(graph, size)
    if steps:
        _set_steps(graph, steps)
    return graph


def reseeded(graph: Graph) -> Graph:
    """Return a graph with other noise. ComfyUI then computes everything again that it has computed for the first graph."""
    graph = copy.deepcopy(graph)
    for inputs, key in _values(graph, ("seed", "noise_seed")):
        inputs[key] += 1
    return graph


def described(graph: Graph) -> tuple[str, int]:
    """Return a graph's size, as 1024x1024 or 1280x720x81, and its number of steps; empty and 0 if they are not known."""
    sizes = [
        "x".join(
            str(node["inputs"][key]) for key in ("width", "height", "length") if _is_number(node["inputs"].get(key))
        )
        for node in graph.values()
        if _has_size(node)
    ]
    steps = [inputs[key] for inputs, key in _values(graph, ("steps",))]
    return max(sizes, key=len, default=""), max(steps, default=0)


def _resize(graph: Graph, size: tuple[int, int, int]) -> None:
    sized = [node["inputs"] for node in graph.values() if _has_size(node)]
    if not sized:
        raise NotMeasured("No node of the graph has a width and a height as values: set the size in the graph itself.")
    for inputs in sized:
        inputs["width"], inputs["height"] = size[:2]
        if _is_number(inputs.get("length")):
            inputs["length"] = size[2]


def _set_steps(graph: Graph, steps: int) -> None:
    counts = [(inputs, key) for inputs, key in _values(graph, ("steps",)) if inputs[key] > 0]
    if not counts:
        raise NotMeasured("No node of the graph has its steps as a value: set their number in the graph itself.")
    before = max(inputs[key] for inputs, key in counts)
    for inputs, key in counts:
        inputs[key] = round(inputs[key] * steps / before)
    for inputs, key in _values(graph, ("start_at_step", "end_at_step")):
        if inputs[key] < ALL_STEPS:
            inputs[key] = round(inputs[key] * steps / before)


def _has_size(node: dict[str, Any]) -> bool:
    return all(_is_number(node["inputs"].get(key)) for key in ("width", "height"))


def _values(graph: Graph, keys: Collection[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the inputs with one of these names that are numbers, not links."""
    for node in graph.values():
        yield from ((node["inputs"], key) for key in keys if _is_number(node["inputs"].get(key)))


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _before(graph: Graph, name: str) -> set[str]:
    """Return the ids of all nodes that a node depends on."""
    ids: set[str] = set()
    waiting = [name]
    while waiting:
        for value in graph[waiting.pop()]["inputs"].values():
            if isinstance(value, list) and value and isinstance(value[0], str) and value[0] in graph.keys() - ids:
                ids.add(value[0])
                waiting.append(value[0])
    return ids


Ask = Callable[[list[dict[str, str]]], list[str]]
"""Returns for each loader, given by `kind` and `file`, the reason why it has to stay, or an empty string."""


def staying(graph: Graph, ask: Ask) -> dict[str, str]:
    """Return the ids of a stock graph's loaders that stay ComfyUI's, with the reasons.

    Raises:
        NotMeasured: a model's loader has to stay.
    """
    entries = list(loaders(graph))
    whys = ask([{"kind": kind, "file": file} for _, kind, file in entries])
    stays = {name: why for (name, _, _), why in zip(entries, whys, strict=True) if why}
    models = [name for name, kind, _ in entries if kind != "VAELoader"]
    if refused := [stays[name] for name in models if name in stays]:
        raise NotMeasured(f"The graph's model cannot run on several GPUs: {refused[0]}")
    return stays
