"""All templates against ComfyUI's description of its nodes; those of CogVideoX and PixArt are queued on tiny models.

Load Conditioning replaces text encoders, which have no tiny size; everything else is the template's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image
from safetensors.torch import save_file

from benchmarks.template_cards import ALIKE, CARDS, OFFERED, apart, differs, memory_of
from benchmarks.template_cards import draw as drawn
from scripts.comfyui import REPO, ComfyUI
from tests.page.conftest import Info
from tests.support.graphs.flux import Graph, node
from tests.support.page.contents import SPRITES, TEMPLATES, template
from tests.support.page.template_widgets import widgets_of
from tests.support.selection import thorough
from tests.support.tiny.cogvideox import TEXT_WIDTH, save_cogvideox
from tests.support.tiny.models import draw
from tests.support.tiny.pixart import save_pixart
from tests.vae.comfy_vaes import save_image_vae

BY_COMMAND = {"pixart_alpha_vae.safetensors"}
"""Files that are saved under another name, so a note gives the command."""


@pytest.fixture(scope="module")
def _files(comfyui: ComfyUI, video_vae: Path) -> None:
    """Save tiny models under the names of the templates' files, two prompts, and a picture.

    CogVideoX's VAE has its real size, because ComfyUI accepts no other.
    """
    models = comfyui.base_dir / "models"
    save_pixart(models / "diffusion_models" / "PixArt-XL-2-1024-MS.safetensors")
    save_image_vae(models / "vae" / "pixart_alpha_vae.safetensors", name="sd")
    for number in range(2):
        save_file({"cond": draw(1, 7, TEXT_WIDTH, seed=number)}, comfyui.input_dir / f"template-{number}.safetensors")
    save_cogvideox(models / "diffusion_models" / "CogVideoX-5b.safetensors", "5b")
    save_cogvideox(models / "diffusion_models" / "CogVideoX-5b-I2V.safetensors", "5b-i2v")
    Image.new("RGB", (50, 40), (200, 80, 40)).save(comfyui.input_dir / "example.png")


def tiny(comfyui: ComfyUI, name: str) -> Graph:
    """Return a template as the page would queue it, small, on two workers and without a text encoder."""
    graph = api_graph(comfyui, template(name))
    texts = 0
    for key, each in list(graph.items()):
        kind, inputs = each["class_type"], each["inputs"]
        small = {"width": 48, "height": 32, "length": 9, "steps": 2}
        inputs |= {field: small[field] for field in inputs if field in small}
        if kind == "CLIPTextEncode":
            graph[key] = node("LoadConditioning", conditioning=f"template-{texts}.safetensors")
            texts += 1
        elif kind == "CLIPLoader":
            del graph[key]
        elif kind == "ParallelPlan":
            inputs["devices"] = "cpu:2"
        elif kind in ("LoadParallelCogVideoX", "LoadParallelPixArt"):
            inputs["unet_name"] += ".safetensors"  # the templates' models are diffusers folders
    assert texts == 2
    return graph


def api_graph(comfyui: ComfyUI, page: dict[str, Any]) -> Graph:
    """Return a graph of the page in the form in which the page queues it."""
    sources = {link[0]: [str(link[1]), link[2]] for link in page["links"]}
    graph: Graph = {}
    for each in page["nodes"]:
        if each["type"] == "MarkdownNote":
            continue
        links = {slot["name"]: sources[slot["link"]] for slot in each["inputs"] if slot["link"] is not None}
        values = dict(widgets_of(comfyui.object_info(each["type"])["input"], iter(each.get("widgets_values") or ())))
        graph[str(each["id"])] = node(each["type"], **values, **links)
    return graph


def output(comfyui: ComfyUI, graph: Graph, kind: str) -> Any:
    run = comfyui.queue(graph, timeout=300).check()
    (name,) = [name for name, each in graph.items() if each["class_type"] == kind]
    (file,) = comfyui.files(run, name)
    return file


# the quick run has the templates' nodes and inputs in test_every_template_fits_comfyuis_nodes, the models through them in
# families/test_diffusers, a template's picture in test_contents, and a playable video in features/test_vae
@thorough
@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("name", ["CogVideoX-5b text to video", "CogVideoX-5b image to video"])
def test_video_templates_save_a_playable_video(comfyui: ComfyUI, name: str) -> None:
    with av.open(output(comfyui, tiny(comfyui, name), "SaveVideo")) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 9
    assert {frame.shape for frame in frames} == {(32, 48, 3)}
    assert frames[0].std() > 0


@thorough  # as above
@pytest.mark.usefixtures("_files")
def test_the_pixart_template_saves_a_picture(comfyui: ComfyUI) -> None:
    with Image.open(output(comfyui, tiny(comfyui, "PixArt-alpha"), "SaveImage")) as picture:
        assert picture.size == (48, 32)
        assert len(picture.getcolors(48 * 32)) > 1


def test_every_template_has_its_own_picture_as_the_command_draws_it() -> None:
    pictures = {(REPO / "workflows" / f"{name}.jpg").read_bytes() for name in TEMPLATES}
    assert len(pictures) == len(TEMPLATES)
    assert {*CARDS, SPRITES} == set(TEMPLATES)
    assert [name for name, card in CARDS.items() if differs(REPO / "workflows" / f"{name}.jpg", drawn(card))] == []
    one, other = (drawn(CARDS[name]) for name in ("FLUX.1 dev", "FLUX.2 dev"))
    assert apart(one, other) > ALIKE, "another picture would be seen"


def test_cards_are_ordered_by_ease_of_use_and_give_the_memory_of_each_gpu() -> None:
    """First comes the template whose files the pack has, then those that the page offers, by memory, then those with notes."""
    words = json.loads((REPO / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["parallel"]["templates"]
    first, *others = words
    assert (first, set(others)) == (SPRITES, set(CARDS))
    needs = {name: memory_of(card) for name, card in CARDS.items()}
    assert [name for name in others if not words[name].endswith(f"{needs[name]}." if needs[name] else ".")] == []

    def turn(name: str) -> tuple[bool, float]:
        return CARDS[name].files != OFFERED, float(needs[name].partition(" ")[0] or "inf")

    assert others == sorted(others, key=turn)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_fits_comfyuis_nodes(all_nodes: Info, name: str) -> None:
    page = template(name)
    graphs = {each["id"]: each for each in page.get("definitions", {}).get("subgraphs", ())}
    for each in [*page["nodes"], *(inner for graph in graphs.values() for inner in graph["nodes"])]:
        kind = each["type"]
        if kind in ("Note", "MarkdownNote", "Reroute"):  # nodes of the page itself
            continue
        if kind in graphs:
            inputs, outputs = ([slot["name"] for slot in graphs[kind][side]] for side in ("inputs", "outputs"))
        else:
            inputs = [each for part in ("required", "optional") for each in all_nodes[kind]["input"].get(part, ())]
            outputs = all_nodes[kind]["output_name"]
        assert {slot["name"].split(".")[0] for slot in each["inputs"]} <= set(inputs), kind
        assert len(each["outputs"]) <= len(outputs), kind
        files = [value for value in each.get("widgets_values") or () if str(value).endswith(".safetensors")]
        if files and kind not in graphs and name != SPRITES:  # the page offers to download missing files
            offered = {file["name"]: file for file in each["properties"].get("models", ())}
            names = {file.removeprefix("checkpoints/") for file in files}  # so the pack lists full checkpoints
            assert names - BY_COMMAND <= set(offered), kind
            for title, file in offered.items():
                assert file["url"].split("?")[0].endswith(f"/{title}") and file["directory"], kind
