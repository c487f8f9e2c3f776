"""Every kind of node that takes part in sampling, on a parallel MODEL against the stock loader's: equal, or refused by name.

ComfyUI itself tells which nodes there are, so a new one shows up here; one that its description does not tell how to use
fails until its inputs are written down.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from scripts.comfyui import ComfyUI, ComfyUIError, Run
from tests.host.conftest import relative_error, saved_latent
from tests.host.every_node import FILES, base_graph, custom_graph, graph_with, plays_a_part
from tests.host.graphs import Graph, parallel
from tests.tiny_controlnet import save_xlabs
from tests.tiny_lora import save_adapter

TOLERANCE = 1e-5
REFUSALS = ("Refused", "PlanRefused")
"""What the errors are called by which this pack says no."""

OTHER_PACKS = "custom_nodes."
"""Where the nodes come from that are not ComfyUI's."""

INPUTS: dict[str, dict[str, Any]] = {
    "HiDreamO1ReferenceImages": {"images.image_1": ["image", 0]},
    "WanInfiniteTalkToVideo": {"mode": "single_speaker"},
    "PerpNeg": {"empty_conditioning": ["other", 0]},  # of the positive, it divides by zero
    "FlipSigmas": {"sigmas": ["falling", 0]},  # a last sigma of 1 divides by zero
    "SplitSigmas": {"step": 1},
    "SplitSigmasDenoise": {"denoise": 0.5},
    # what does nothing to this model as it is set
    "ConditioningMultiply": {"multiplier": 0.5},
    "ConditioningSetAreaPercentage": {"width": 0.5, "height": 1.0, "x": 0.25, "y": 0.0, "strength": 0.7},
    "ConditioningSetTimestepRange": {"start": 0.0, "end": 0.6},
    "FluxGuidance": {"guidance": 1.7},
    "ModelComputeDtype": {"dtype": "fp32"},
    "ScaleROPE": {"scale_x": 1.5, "shift_y": 2.0},
    "SkipLayerGuidanceDiT": {"double_layers": "0", "single_layers": "0", "start_percent": 0.0},
    "SkipLayerGuidanceDiTSimple": {"double_layers": "0", "single_layers": "0", "start_percent": 0.0},
    "SkipLayerGuidanceSD3": {"layers": "0", "start_percent": 0.0},
}
"""What the description of a node does not tell, or where its defaults say little."""

UNKNOWN = "write down in INPUTS how these nodes are used"

ELSEWHERE = {"TorchCompileModel"}
"""What test_comfy_quantised and test_graphs compare, because it takes as long as all others."""


def refused(run: Run) -> bool:
    """Whether this pack said no, in one of its sentences."""
    return run.error is not None and run.error.exception_type in REFUSALS


def outcome(server: ComfyUI, plain: Run, stock: Run | None, own: Run) -> tuple[str, str]:
    """How two runs of a graph compare, in a word or two, and the figures or the message.

    Args:
        plain: without the node, with the stock loader.
        stock: with the stock loader; None if `own` is refused.
        own: with Load Parallel FLUX.
    """
    if stock is None:
        assert own.error is not None
        return "refused", f"{own.error.node_type}: {own.error.exception_message}"
    if stock.error is not None:
        alike = own.error is not None and own.error.exception_message == stock.error.exception_message
        message = f"{stock.error.node_type}: {stock.error.exception_message}"
        return "not applicable" if alike else "different", message
    if own.error is not None:
        return "different", f"{own.error.node_type}: {own.error.exception_message}"
    error = relative_error(saved_latent(server, own), saved_latent(server, stock))
    effect = relative_error(saved_latent(server, stock), saved_latent(server, plain))
    figures = f"{error:.1e}; the node changes the picture by {effect:.0e}"
    return "equal" if error <= TOLERANCE else "different", figures


def run_all(server: ComfyUI, graphs: dict[str, Graph]) -> dict[str, Run]:
    """The runs of many graphs, queued at once."""
    prompts, rejected = {}, {}
    for name, graph in graphs.items():
        try:
            prompts[name] = server.submit(graph)
        except ComfyUIError as error:
            rejected[name] = str(error)
    runs = {name: server.wait(prompt, timeout=600) for name, prompt in prompts.items()}
    assert not rejected, UNKNOWN
    return runs


def test_every_node_gives_the_same_latent_or_is_refused_by_name(comfyui: ComfyUI, tmp_path: Path) -> None:
    models = comfyui.base_dir / "models"
    save_xlabs(models / "controlnet" / FILES["control_net_name"], heads=2)
    save_adapter(models / "loras" / FILES["lora_name"], "lora-bfl")
    (models / "hypernetworks").mkdir(exist_ok=True)
    torch.save({"activation_func": "linear"}, models / "hypernetworks" / FILES["hypernetwork_name"])
    infos = {
        name: info
        for name, info in comfyui.get("/object_info").items()
        if plays_a_part(info) and not info["python_module"].startswith(OTHER_PACKS) and name not in ELSEWHERE
    }
    unknown, graphs = {}, {"KSampler": base_graph(), "SamplerCustomAdvanced": custom_graph()}
    for name, info in infos.items():
        try:
            graphs[name] = graph_with(name, info, INPUTS.get(name, {}))
        except ValueError as reason:
            unknown[name] = str(reason)
    assert not unknown, UNKNOWN
    own = run_all(comfyui, {name: parallel(graph) for name, graph in graphs.items()})
    stock = run_all(comfyui, {name: graph for name, graph in graphs.items() if not refused(own[name])})
    found = []
    for name, graph in graphs.items():
        plain = stock["SamplerCustomAdvanced" if "guider" in graph else "KSampler"]
        found.append((*outcome(comfyui, plain, stock.get(name), own[name]), name))
    lines = [f"{how:15} {name:40} {figure}" for how, figure, name in sorted(found)]
    (tmp_path / "nodes.txt").write_text("\n".join(lines))
    print(f"\n{tmp_path / 'nodes.txt'}: {dict(Counter(how for how, _, _ in found))}")
    assert [line for line in lines if line.startswith("different")] == []
