"""Every kind of node that takes part in sampling, on a parallel MODEL against the stock loader's: equal, or refused by name.

ComfyUI itself lists its nodes, so a new node shows up here. The page lists the nodes of one ComfyUI in full, and of newer
ComfyUIs the nodes that were tried (`newer/test_nodes` has those that FLUX.1 does not read). Nodes of a still newer ComfyUI are
tried too, and the run reports their outcomes. A node whose description does not give its inputs is reported as not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.comfyui import ComfyUI, QueuedRun
from tests.support.comfyuis import is_listed, tell_new
from tests.support.graphs.comfyui import DIFFERENT, TOLERANCE, LatentOf, spread
from tests.support.graphs.every_node import (
    FILES,
    SIZES,
    base_graph,
    family_graph,
    graph_with,
    inputs_of,
    plays_a_part,
    with_custom_sampler,
)
from tests.support.graphs.family_tests import save_with_prompts
from tests.support.graphs.flux import Graph, node, parallel, queue_logged, ways
from tests.support.graphs.loras import save_lora
from tests.support.latents import relative_error, saved_latent
from tests.support.node_outcomes import PAGE, REFUSALS, newer_nodes, refused
from tests.support.selection import thorough
from tests.support.tiny.comfyui import TINY
from tests.support.tiny.controlnet import SDXL, save_of_unet, save_wan_vae, save_xlabs
from tests.support.tiny.lora import save_adapter
from tests.vae.comfy_vaes import save_comfy_vae, save_image_vae

INPUTS: dict[str, dict[str, Any]] = {
    "HiDreamO1ReferenceImages": {"images.image_1": ["image", 0]},
    "WanInfiniteTalkToVideo": {"mode": "single_speaker"},
    "PerpNeg": {"empty_conditioning": ["other", 0]},  # with the positive prompt, the node divides by zero
    "FlipSigmas": {"sigmas": ["falling", 0]},  # a last sigma of 1 divides by zero
    "SplitSigmas": {"step": 1},
    "SplitSigmasDenoise": {"denoise": 0.5},
    # the defaults of these nodes do nothing to this model
    "ConditioningMultiply": {"multiplier": 0.5},
    "ConditioningSetAreaPercentage": {"width": 0.5, "height": 1.0, "x": 0.25, "y": 0.0, "strength": 0.7},
    "ConditioningSetTimestepRange": {"start": 0.0, "end": 0.6},
    "FluxGuidance": {"guidance": 1.7},
    "ModelComputeDtype": {"dtype": "fp32"},
    "ScaleROPE": {"scale_x": 1.5, "shift_y": 2.0},
    "SkipLayerGuidanceDiT": {"double_layers": "0", "single_layers": "0", "start_percent": 0.0},
    "SkipLayerGuidanceDiTSimple": {"double_layers": "0", "single_layers": "0", "start_percent": 0.0},
    "UNetCrossAttentionMultiply": {"q": 0.8, "k": 1.2, "v": 0.9, "out": 1.1},
    "UNetSelfAttentionMultiply": {"q": 0.8, "k": 1.2, "v": 0.9, "out": 1.1},
    "UNetTemporalAttentionMultiply": {"self_structural": 0.8, "cross_structural": 1.2},
    "SkipLayerGuidanceSD3": {"layers": "0", "start_percent": 0.0},
}
"""Inputs that the description of a node does not give, or whose defaults have little effect."""

PLAIN = ("KSampler", "SamplerCustomAdvanced")
"""Names of the graphs without the node that is tried."""

ONE_SIDED = ("BasicGuider", "CFGOverride", "DualModelGuider", "NAGuidance")
"""Nodes after which a picture's model calls have no second branch, so that only one GPU has work."""

PARTS = 8
"""Number of parts of the list of nodes: the quick run takes every eighth node by name.

`test_stock_nodes_on_flux` has a node of each mechanism, and `refusals` has the nodes that are refused.
"""

ELSEWHERE = {"TorchCompileModel"}
"""Nodes that test_model_options and test_quantised compare, because one such node takes as long as all others."""

SOUND: Mapping[str, Any] = {"audio_encoder_output": ["sound", 0]}
MADE_FOR: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "HunyuanImageToVideo": ("hunyuan_i2v", {}),
    "HunyuanVideo15ImageToVideo": ("hunyuan15", {"start_image": None}),  # its VAE has only one size
    "HunyuanVideo15SuperResolution": ("meanflow", {"start_image": None}),
    "Kandinsky5ImageToVideo": ("kandinsky", {}),
    "LTXVAddGuide": ("ltxv", {}),
    "LTXVCropGuides": ("ltxv", {}),
    "LTXVImgToVideo": ("ltxv", {}),
    "Wan22FunControlToVideo": ("wan_i2v", {}),
    "WanAnimateToVideo": ("animate", {"face_video": None}),  # its encoder takes gigabytes
    "WanCameraImageToVideo": ("camera", {}),
    "WanDancerVideo": ("dancer", SOUND),
    "WanFirstLastFrameToVideo": ("wan_i2v", {}),
    "WanFunControlToVideo": ("fun_control", {}),
    "WanFunInpaintToVideo": ("wan_i2v", {}),
    "WanHuMoImageToVideo": ("humo", SOUND),
    "WanImageToVideo": ("wan_i2v", {}),
    "WanMoveTrackToVideo": ("wan_i2v", {}),
    "WanPhantomSubjectToVideo": ("wan", {}),
    "WanSCAILToVideo": ("scail", {}),
    "WanSoundImageToVideo": ("s2v", SOUND),
    "WanSoundImageToVideoExtend": ("s2v", SOUND),
    "WanTrackToVideo": ("wan_i2v", {}),
    "WanUni3CControlnetApply": ("wan", {"model_patch": ["uni3c", 0]}),
    "WanVaceToVideo": ("vace", {}),
}
"""Nodes that have no effect on FLUX.1: the model for which each is made, and inputs as in INPUTS."""

NOT_BESIDE_PLAIN = ("LTXVAddGuide", "LTXVCropGuides", "WanAnimateToVideo", "WanHuMoImageToVideo", "WanVaceToVideo")
"""Nodes without a plain graph to compare: they lengthen the video, find nothing to crop, or give HuMo sound of its length."""

ENCODERS = {
    "s2v": {"layers": 25, "width": 1024},
    "humo": {"layers": 33, "width": 1280},
    "dancer": {"layers": 1, "width": 8},
}
"""The layers and the width of the sound encoders' outputs for these models."""

EMPTY = {
    "hunyuan15": "EmptyHunyuanVideo15Latent",
    "meanflow": "EmptyHunyuanVideo15Latent",
    "ltxv": "EmptyLTXVLatentVideo",
}

ROWS = {
    "in the loop": "equal, in the workers' loop",
    "one call": "equal, one forward per model call",
    "refused": "refused by name",
    "not applicable": "ComfyUI's own fails",
}
"""The beginnings of the rows of the page's table of nodes, by outcome."""


def rows_of_the_page() -> dict[str, tuple[int, list[str]]]:
    """Return the count and the nodes of each row of the page's table, by outcome."""
    text = PAGE.read_text(encoding="utf-8")
    found = {}
    for outcome, beginning in ROWS.items():
        (row,) = re.findall(rf"^\| {re.escape(beginning)}[^|]* \| (\d+) \| ([^|]+) \|$", text, re.MULTILINE)
        found[outcome] = int(row[0]), row[1].split(", ")
    return found


def on_the_page() -> dict[str, str]:
    """Return the outcome of each node that the page lists."""
    return {name: outcome for outcome, (_, names) in rows_of_the_page().items() for name in names}


Run = tuple[QueuedRun, str]
"""A run, and the server's log of it."""


def outcome(server: ComfyUI, plain: QueuedRun, stock: QueuedRun | None, own: Run) -> tuple[str, str]:
    """Compare two runs of a graph; return the outcome in a word or two, and the figures or the message.

    Args:
        plain: The run without the node, with the stock loader.
        stock: The run with the stock loader; None if `own` is refused.
        own: The run on a parallel MODEL.
    """
    run, log = own
    failed = run.error and f"{run.error.node_type}: {run.error.exception_message}"
    if stock is None:
        return "refused", str(failed)
    if stock.error is not None:
        alike = run.error is not None and (
            run.error.exception_message == stock.error.exception_message or run.error.exception_type in REFUSALS
        )
        message = f"{stock.error.node_type}: {stock.error.exception_message}"
        return "not applicable" if alike else "different", message
    if failed:
        return "different", failed
    error = relative_error(saved_latent(server, run), saved_latent(server, stock))
    changed, before = saved_latent(server, stock), saved_latent(server, plain)
    effect = f"by {relative_error(changed, before):.0e}" if changed.shape == before.shape else "in its size"
    way = "in the loop" if set(ways(log)) == {"loop"} else "one call"
    return way if error <= TOLERANCE else "different", f"{error:.1e}; the node changes the picture {effect}"


def nodes_to_try(server: ComfyUI, without: Collection[str]) -> dict[str, Any]:
    """Return the descriptions of ComfyUI's own nodes that take part in sampling, except those of other tests."""
    return {
        name: info
        for name, info in sorted(server.get("/object_info").items())
        if plays_a_part(info)
        and not info["python_module"].startswith("custom_nodes.")
        and name not in {*ELSEWHERE, *MADE_FOR, *without}
    }


def run_all(server: ComfyUI, graphs: Mapping[str, Graph], unknown: dict[str, str]) -> dict[str, Run]:
    """Run many graphs. Put the names of graphs that ComfyUI does not accept into `unknown`."""
    runs = {name: queue_logged(server, graph, timeout=600) for name, graph in graphs.items()}
    unknown |= {name: str(run.error) for name, (run, _) in runs.items() if run.status == "rejected"}
    return {name: run for name, run in runs.items() if name not in unknown}


def compared(
    server: ComfyUI,
    infos: Mapping[str, Any],
    ours: Callable[[Graph], Graph],
    figures: Path,
    base: Graph | None = None,
    files: Mapping[str, str] = FILES,
) -> tuple[dict[str, str], dict[str, str]]:
    """Compare nodes on a parallel MODEL with the stock loader's. Fail if an outcome is "different".

    Args:
        infos: The nodes' descriptions.
        ours: Replaces a graph's MODEL by a parallel MODEL.
        figures: Path of the file of figures to write.
        base: The graph of `graph_with`.
        files: Names of files for inputs, as `FILES`.

    Returns:
        The outcome of each node, and the reason for each node that was not tried. The listed ComfyUI has no such node.
    """
    plain = base or base_graph()
    graphs, unknown = {"KSampler": plain, "SamplerCustomAdvanced": with_custom_sampler(plain)}, dict[str, str]()
    (server.base_dir / "models" / "hypernetworks").mkdir(exist_ok=True)
    torch.save({"activation_func": "linear"}, server.base_dir / "models" / "hypernetworks" / FILES["hypernetwork_name"])
    for name, info in infos.items():
        own = {input_name: files[input_name] for input_name, *_ in inputs_of(info) if input_name in files}
        try:
            graphs[name] = graph_with(name, info, own | INPUTS.get(name, {}), base)
        except ValueError as reason:
            unknown[name] = str(reason)
    runs = run_all(server, {name: ours(graph) for name, graph in graphs.items()}, unknown)
    stock = run_all(server, {name: graphs[name] for name, (run, _) in runs.items() if not refused(name, run)}, unknown)
    assert not (is_listed() and unknown), "write down in INPUTS how these nodes are used"
    found = []
    for name in graphs.keys() - unknown.keys() - {*PLAIN}:
        before, _ = stock["SamplerCustomAdvanced" if "guider" in graphs[name] else "KSampler"]
        found.append((*outcome(server, before, stock[name][0] if name in stock else None, runs[name]), name))
    lines = [f"{how:15} {name:40} {figure}" for how, figure, name in sorted(found)]
    figures.write_text("\n".join(lines))
    print(f"\n{figures}")
    assert [line for line in lines if line.startswith("different")] == []
    return {name: how for how, _, name in found}, unknown


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=thorough) for part in range(1, PARTS))])
def test_every_node_has_the_listed_outcome(comfyui: ComfyUI, tmp_path: Path, part: int) -> None:
    """Each node gives the same latent by the listed way, is refused by name, or ComfyUI fails too."""
    models, newer = comfyui.base_dir / "models", newer_nodes("FLUX.1")
    save_xlabs(models / "controlnet" / FILES["control_net_name"], heads=2)
    save_adapter(models / "loras" / FILES["lora_name"], "lora-bfl")
    there = nodes_to_try(comfyui, newer_nodes().keys() - newer.keys())
    was, unknown = compared(comfyui, dict([*there.items()][part::PARTS]), parallel, tmp_path / "nodes.txt")
    page = on_the_page() | newer
    assert {name: how for name, how in was.items() if name in page} == {
        name: how for name, how in page.items() if name in was
    }
    if is_listed():
        assert there.keys() == on_the_page().keys() - {*ELSEWHERE, *MADE_FOR}
    tell_new("nodes", {f"{name} ({how})" for name, how in was.items() if name not in page})
    tell_new(
        "nodes that were not tried", {f"{name} ({why})" for name, why in unknown.items() if name not in newer_nodes()}
    )


@thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_every_node_on_sdxl_gives_the_same_latent_or_is_refused_by_name(
    comfyui: ComfyUI, tmp_path: Path, part: int
) -> None:
    """SDXL runs unsharded under the automatic plan: the latent is the same, a refusal names the node, or ComfyUI fails too."""
    models = comfyui.base_dir / "models"
    save_with_prompts(comfyui, "sdxl")
    vae = save_image_vae(models / "vae" / "every-node-sd.safetensors", name="sd").name
    files = dict.fromkeys(("lora_name", "control_net_name"), "every-node-sdxl.safetensors")
    save_of_unet(models / "controlnet" / files["control_net_name"], SDXL)
    tensors = load_file(models / "diffusion_models" / "sdxl.safetensors")
    layer = "diffusion_model.input_blocks.3.1.transformer_blocks.1.attn2.to_v"
    save_lora(models / "loras" / files["lora_name"], (layer,), tensors)
    latent = node("EmptyLatentImage", **{key: SIZES[key] for key in ("width", "height", "batch_size")})
    base = family_graph("sdxl", latent, vae, beside=False)
    base["control"]["inputs"]["control_net_name"] = files["control_net_name"]

    def ours(graph: Graph) -> Graph:
        alone = any(each["class_type"] in ONE_SIDED for each in graph.values())
        return spread(graph, "cpu:1" if alone else "cpu:2", strict=False)

    infos = dict([*nodes_to_try(comfyui, newer_nodes()).items()][part::PARTS])
    was, _ = compared(comfyui, infos, ours, tmp_path / "nodes.txt", base, files)
    assert sum(how in ("in the loop", "one call") for how in was.values()) > len(was) / 2


def test_the_page_gives_the_right_counts_of_its_lists() -> None:
    """Each node is in exactly one list, and the counts on the page are the lengths of the lists."""
    rows = rows_of_the_page()
    assert all(count == len(names) for count, names in rows.values())
    nodes = [name for _, names in rows.values() for name in names]
    assert len({*nodes}) == len(nodes)
    assert f"has {len(nodes)} kinds of node" in PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def families(comfyui: ComfyUI) -> Mapping[str, Graph]:
    """Provide the base graph of each model for which nodes are made."""
    vaes = comfyui.base_dir / "models" / "vae"
    save_wan_vae(vaes / "every-node-wan.safetensors")
    save_comfy_vae(vaes / "every-node-ltxv.safetensors", "ltx2")
    graphs = {}
    for name in dict.fromkeys(name for name, _ in MADE_FOR.values()):
        save_with_prompts(comfyui, name)
        size = {key: SIZES[key] for key in ("width", "height", "batch_size")}
        latent = node(
            EMPTY.get(name, "EmptyHunyuanLatentVideo"), **size, length=9 if name == "ltxv" else SIZES["length"]
        )
        vae = f"every-node-{'ltxv' if name == 'ltxv' else 'wan'}.safetensors"
        graphs[name] = family_graph(name, latent, vae, bool(TINY[name].extra(1))) | {
            "sound": node("PackSound", **ENCODERS.get(name, {})),
            "uni3c": node("PackUni3C", width=384),
        }
    return graphs


@thorough
@pytest.mark.parametrize("kind", MADE_FOR)
def test_a_node_on_the_model_for_which_it_is_made_gives_the_listed_outcome(
    kind: str, comfyui: ComfyUI, families: Mapping[str, Graph], latent_of: LatentOf
) -> None:
    name, given = MADE_FOR[kind]
    base = families[name]
    graph = graph_with(kind, comfyui.object_info(kind), given, base)
    run, log = queue_logged(comfyui, spread(graph, strict=False))
    listed = on_the_page()[kind]
    if refused(kind, run):
        assert listed == "refused"
        return
    stock = latent_of(graph)
    assert relative_error(saved_latent(comfyui, run.check()), stock) <= TOLERANCE
    assert listed == ("in the loop" if ways(log) == ["loop"] else "one call")
    if kind not in NOT_BESIDE_PLAIN:
        assert relative_error(latent_of(base), stock) > DIFFERENT
