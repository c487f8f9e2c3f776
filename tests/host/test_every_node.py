"""Every kind of node that takes part in sampling, on a parallel MODEL against the stock loader's: equal, or refused by name.

ComfyUI itself tells which nodes there are, so a new one shows up here; one that its description does not tell how to use
fails until its inputs are written down.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from scripts.comfyui import ComfyUI, Run
from tests.host.conftest import relative_error, saved_latent
from tests.host.every_node import base_graph, custom_graph, graph_with, plays_a_part
from tests.host.graphs import Graph, parallel
from tests.tiny_controlnet import save_xlabs

TOLERANCE = 1e-5
PACK = "custom_nodes."
"""Where other packs' nodes come from; the stock ones are tried."""

INPUTS: dict[str, dict[str, Any]] = {
    "HiDreamO1ReferenceImages": {"images.image_1": ["image", 0]},
    "WanInfiniteTalkToVideo": {"mode": "single_speaker"},
}
"""What the description of a node does not tell."""


def outcome(server: ComfyUI, stock: Run, own: Run) -> tuple[str, str]:
    """How two runs of a graph compare, in a word, and the figure or the message."""
    if stock.error is not None:
        if own.error is None:
            return "different", f"works where ComfyUI fails: {stock.error.exception_message}"
        return "not applicable", f"{stock.error.node_type}: {stock.error.exception_message}"
    if own.error is not None:
        refused = own.error.exception_type.endswith(".Refused")
        return "refused" if refused else "different", f"{own.error.node_type}: {own.error.exception_message}"
    error = relative_error(saved_latent(server, own), saved_latent(server, stock))
    return "equal" if error <= TOLERANCE else "different", f"{error:.1e}"


def run_all(server: ComfyUI, graphs: dict[str, Graph]) -> dict[str, Run]:
    """The runs of many graphs, queued at once."""
    runs = {name: server.submit(graph) for name, graph in graphs.items()}
    return {name: server.wait(prompt, timeout=600) for name, prompt in runs.items()}


def test_every_node_gives_the_same_latent_or_is_refused_by_name(comfyui: ComfyUI, tmp_path: Path) -> None:
    save_xlabs(comfyui.base_dir / "models" / "controlnet" / "tiny-xlabs.safetensors")
    infos = {
        name: info
        for name, info in comfyui.get("/object_info").items()
        if plays_a_part(info) and not info["python_module"].startswith(PACK)
    }
    unknown, graphs = {}, {"KSampler": base_graph(), "SamplerCustomAdvanced": custom_graph()}
    for name, info in infos.items():
        try:
            graphs[name] = graph_with(name, info, INPUTS.get(name, {}))
        except ValueError as reason:
            unknown[name] = str(reason)
    assert not unknown, "write down in INPUTS how these nodes are used"
    stock = run_all(comfyui, graphs)
    own = run_all(comfyui, {name: parallel(graph) for name, graph in graphs.items()})
    found = {name: outcome(comfyui, stock[name], own[name]) for name in graphs}
    lines = [
        f"{kind:15} {name:40} {figure}" for name, (kind, figure) in sorted(found.items(), key=lambda one: one[1][0])
    ]
    (tmp_path / "nodes.txt").write_text("\n".join(lines))
    print(f"\n{tmp_path / 'nodes.txt'}: {dict(Counter(kind for kind, _ in found.values()))}")
    assert [line for line in lines if line.startswith("different")] == []
