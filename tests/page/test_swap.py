"""Use all GPUs and Back to one GPU in ComfyUI's own page, on its own templates, which have their loaders in subgraphs."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from playwright.sync_api import Error, Page, Route, expect
from safetensors.torch import load_file, save_file

from benchmarks.template_graphs import Node, read, template_files
from scripts.comfyui import ComfyUI
from tests.refusals.unsharded import save_zero123, zero123
from tests.support.graphs.flux import Graph, node
from tests.support.graphs.vae import pixels, saved
from tests.support.latents import relative_error
from tests.support.page.browser import GREETED, OPENING, POLLING, READY, SET
from tests.support.page.swapping import (
    CLOSE,
    FLUX,
    LOOSE,
    PROMOTED,
    PROMPT,
    STATE,
    TRACKER,
    open_stock,
    reload,
    said,
    swap,
    tab,
)
from tests.support.page.template_files import FOLDERS, put_files
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_tiny
from tests.support.tiny.flux import save_flux
from tests.vae.comfy_vaes import save_image_vae

PARTS = 15
"""Number of parts of ComfyUI's list of templates, with fourteen templates each."""

CHANGED = 12
"""Least number of templates of a part in which a loader changes: those with a VAE, or with a supported model."""

SWAPPED = {
    "UNETLoader": "LoadParallelDiffusionModel",
    "CheckpointLoaderSimple": "LoadParallelCheckpoint",
    "VAELoader": "LoadParallelVAE",
}

UNSIZED = "JSON.parse(JSON.stringify(app.rootGraph.serialize(), (key, value) => (key === 'size' ? undefined : value)))"


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    """Save tiny files for FLUX.1's own template, so that it can run."""
    models = comfyui.base_dir / "models"
    save_flux(models / "diffusion_models" / "flux1-dev.safetensors", guidance=True)
    (models / "vae").mkdir(exist_ok=True)
    save_image_vae(models / "vae" / "ae.safetensors")


DRAWN = re.compile(r"painter-\d+-\d+\.png \[input\]")
"""The value of ComfyUI's Painter: for each prompt the page writes a file with a new name, and names the file in the node."""


def undrawn(value: Any) -> Any:
    """Return a field's value, or the value of a Painter without a drawing in place of a Painter's file."""
    return "" if isinstance(value, str) and DRAWN.fullmatch(value) else value


def comparable(prompt: Graph) -> Graph:
    """Return the graph without titles and without the Painters' files."""
    found = {name: {key: value for key, value in each.items() if key != "_meta"} for name, each in prompt.items()}
    for each in found.values():
        each["inputs"] = {key: undrawn(value) for key, value in each["inputs"].items()}
    return found


def assert_swapped(page: Page, before: Graph, swapped: set[str]) -> None:
    """Check that the graph to queue differs only in these loaders."""
    graph = copy.deepcopy(before)
    for name in swapped:
        kind = SWAPPED[graph[name]["class_type"]]
        graph[name]["class_type"] = kind
        graph[name]["inputs"] |= {"frame_batches": "original"} if kind == "LoadParallelVAE" else {}
    assert comparable(page.evaluate(PROMPT)) == comparable(graph)


def test_one_click_swaps_the_loaders_of_fluxs_own_template_and_back(page: Page) -> None:
    open_stock(page, FLUX)
    before, prompt, promoted = page.evaluate(STATE), page.evaluate(PROMPT), page.evaluate(PROMOTED)
    expect(tab(page)).to_contain_text("1 model and 1 VAE in this workflow.")
    text = swap(page, "Use all GPUs")
    assert "1 model and 1 VAE on all GPUs" in text
    assert "No GPU found: the workers use the CPU. Press Run.\nCtrl+Z undoes it." in text
    loaders = {name for name, each in prompt.items() if each["class_type"] in SWAPPED}
    assert len(loaders) == 2
    assert_swapped(page, prompt, loaders)
    assert page.evaluate(PROMOTED) == promoted
    assert page.evaluate(LOOSE) == []
    swapped, after = page.evaluate(STATE), page.evaluate(PROMPT)
    page.evaluate("state => app.loadGraphData(state, true, true, 'saved')", swapped)
    assert page.evaluate(PROMPT) == after, "what was saved opens as it was"
    assert "1 model and 1 VAE back on one GPU" in swap(page, "Back to one GPU")
    assert page.evaluate(PROMPT) == prompt
    assert page.evaluate(PROMOTED) == promoted
    assert page.evaluate(STATE)["definitions"] == before["definitions"], "bit for bit"


@pytest.fixture
def two_gpus(page: Page, comfyui: ComfyUI) -> Iterator[None]:
    """Open the page again as on a machine with two GPUs, before the pack has greeted the user."""

    def answer(route: Route) -> None:
        nodes = route.fetch().json()
        devices = nodes["ParallelPlan"]["input"]["required"]["devices"]
        devices[1]["choices"] = [["auto", "the GPUs that are faster together"], ["0", "RTX 4090"], ["1", "RTX 4090"]]
        route.fulfill(json=nodes)

    def again(greeted: str) -> None:
        page.request.post(f"{comfyui.url}/settings/{GREETED}", data=greeted)
        page.reload(timeout=OPENING)
        page.wait_for_function(READY, polling=POLLING, timeout=OPENING)

    page.route("**/object_info", answer)
    again("null")
    yield
    page.unroute("**/object_info")
    again("0")


@pytest.mark.usefixtures("two_gpus")
def test_a_greeting_offers_the_shortcut_and_a_swap_promises_the_gain(page: Page, comfyui: ComfyUI) -> None:
    """tests/web has the other starts (messages.test.js) and the other promises (swap.test.js)."""
    assert said(page) == "2 GPUs found\nAlt+G uses both."
    assert page.request.get(f"{comfyui.url}/settings/{GREETED}").json() == 2
    expected = {"said": "", "sign": "", "brief": "2 GPUs: about 2.0x", "refused": False}
    page.route("**/parallel/expectation", lambda route: route.fulfill(json=expected))
    open_stock(page, FLUX)
    text = swap(page, "Use all GPUs")
    page.unroute("**/parallel/expectation")
    assert text.splitlines()[1:] == ["2 GPUs: about 2.0x. Press Run.", "Ctrl+Z undoes it."]


@thorough  # the quick run compares these two loaders with ComfyUI's in features/test_flux_parity and features/test_vae
def test_one_click_runs_fluxs_own_template_on_all_gpus_with_the_same_picture(page: Page, comfyui: ComfyUI) -> None:
    open_stock(page, FLUX)
    prompt = page.evaluate(PROMPT)
    swap(page, "Use all GPUs")
    ours, stock = (pixels(comfyui, runnable(graph)) for graph in (page.evaluate(PROMPT), prompt))
    assert stock.std() > 0.01
    assert relative_error(ours.double(), stock.double()) < 1e-4


def runnable(prompt: Graph) -> Graph:
    """Return a queued template in a small size, with a stand-in for text encoders, that saves its picture exactly."""
    graph = copy.deepcopy(prompt)
    for name, each in list(graph.items()):
        small = {"width": 64, "height": 64, "steps": 2}
        each["inputs"] |= {key: value for key, value in small.items() if key in each["inputs"]}
        if each["class_type"] == "DualCLIPLoader":
            graph[name] = node("PackClip", width=64, unprocessed=False)
        elif each["class_type"] == "SaveImage":
            graph["save"] = saved(each["inputs"]["images"])
            del graph[name]
    return graph


def test_one_undo_reverts_the_swap_and_a_redo_repeats_it(page: Page) -> None:
    open_stock(page, FLUX)
    before = page.evaluate(STATE)
    swap(page, "Use all GPUs")
    swapped = page.evaluate(STATE)
    for key, state in (("z", before), ("y", swapped), ("z", before)):
        page.evaluate("document.activeElement?.blur()")
        page.keyboard.press(f"Control+{key}")
        page.wait_for_function(f"count => {TRACKER}.undoQueue.length === count", arg=int(key == "y"), polling=POLLING)
        page.wait_for_function(f"!{TRACKER}._restoringState", polling=POLLING)
        assert page.evaluate(STATE) == state


WAN = "video_wan2_2_14B_t2v"
"""ComfyUI's template of Wan 2.2, whose subgraph loads two models."""


def test_the_subgraph_of_two_models_and_the_tab_name_the_files_and_what_is_not_started(
    page: Page, comfyui: ComfyUI
) -> None:
    folder = comfyui.base_dir / "models" / "diffusion_models"
    names = [f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled" for noise in ("low", "high")]
    for seed, name in enumerate(names):
        save_tiny(folder, "wan", seed=seed).rename(folder / f"{name}.safetensors")
    page.evaluate("app.refreshComboInNodes()")
    open_stock(page, WAN)
    outer = page.evaluate("app.rootGraph.nodes.find(node => node.subgraph).id")
    swap(page, "Use all GPUs")
    line = rf"1 worker: [\d.]+ MB; workers not started \({', '.join(names)}\)"
    page.wait_for_function(
        """([id, line]) => app.rootGraph.getNodeById(id).badges
            .some(badge => RegExp(`^${line}$`).test((typeof badge === "function" ? badge() : badge).text))""",
        arg=[outer, line],
        polling=POLLING,
    )
    for name in names:
        each = re.compile(rf"Load Parallel Diffusion Model, {name}: 1 worker: [\d.]+ MB; the first run starts workers")
        expect(tab(page)).to_contain_text(each)
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", True])
    expect(page.locator(f'[data-node-id="{outer}"]')).to_contain_text(re.compile(rf"^{line} · "))
    loaders = page.evaluate(
        """id => {
            app.canvas.setGraph(app.rootGraph.getNodeById(id).subgraph);
            return app.canvas.graph.nodes.filter(node => node.type.startsWith("LoadParallel")).map(node => node.id);
        }""",
        outer,
    )
    assert len(loaders) == len(names)
    for loader in loaders:
        expect(page.locator(f'[data-node-id="{loader}"]')).to_contain_text("MB; workers not started · Load Parallel")
    page.evaluate("app.canvas.setGraph(app.rootGraph)")
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])


@thorough
def test_the_shortcut_and_the_menus_swap_loaders(page: Page) -> None:
    open_stock(page, FLUX)
    page.evaluate("document.activeElement?.blur()")
    page.keyboard.press("Alt+g")
    assert "1 model and 1 VAE on all GPUs" in said(page)
    menu = """([find, name]) => {
        const node = [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap(g => g.nodes).find(eval(find));
        const item = app.canvas.getNodeMenuOptions(node).find(item => item?.content === name);
        item?.callback();
        return item !== undefined;
    }"""
    assert page.evaluate(menu, ["n => n.type === 'LoadParallelVAE'", "Back to one GPU"])
    assert "1 VAE back on one GPU" in said(page)
    assert page.evaluate(menu, ["n => n.subgraph", "Use all GPUs"])
    assert "1 VAE on all GPUs" in said(page)
    assert not page.evaluate(menu, ["n => n.type === 'SaveImage'", "Use all GPUs"])
    assert not page.evaluate(menu, ["n => n.type === 'LoadParallelVAE'", "Use all GPUs"])


def test_loaders_that_cannot_change_stay_and_the_message_gives_the_reason(page: Page) -> None:
    open_stock(page, FLUX)
    page.evaluate(
        """() => {
            const add = (type, values, mode = 0) => {
                const node = app.graph.add(LiteGraph.createNode(type));
                node.mode = mode;
                for (const [at, value] of values.entries()) node.widgets[at].value = value;
                return node;
            };
            add("UNETLoader", ["is-not-there.safetensors"]);
            add("UNETLoader", ["sprites-flux-schnell.safetensors"], 4); // bypassed
            add("VAELoader", ["ae.safetensors"], 2); // muted
            add("CheckpointLoaderSimple", ["sd15.safetensors"]);
            add("VAELoader", ["taef1"]);
            add("ImageOnlyCheckpointLoader", ["svd.safetensors"]);
            add("PackVae", []); // of another pack
        }"""
    )
    before = page.evaluate(STATE)
    text = swap(page, "Use all GPUs")
    for reason in (
        "Load Diffusion Model was not swapped: is-not-there.safetensors is in none of ComfyUI's model folders",
        "Load Diffusion Model was not swapped: it is muted or bypassed.",
        "Load VAE was not swapped: it is muted or bypassed.",
        "Load VAE was not swapped: taef1 is no file in models/vae",
        "Load Checkpoint Image Only (img2vid model) was not swapped: there is no such loader for several GPUs.",
        "PackVae was not swapped: there is no such loader for several GPUs.",
    ):
        assert reason in text, text
    assert "Load Checkpoint was not swapped: " in text
    assert page.evaluate(STATE)["nodes"] == before["nodes"], "they are as they were"


@thorough
def test_nothing_to_swap_and_a_locked_canvas_give_one_sentence(page: Page) -> None:
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4}, true, true, 'empty')")
    before = page.evaluate(STATE)
    for command, sentence in (
        ("UseAllGPUs", "No loader here can change to all GPUs."),
        ("BackToOneGPU", "No loader here uses all GPUs."),
    ):
        page.evaluate(f"app.extensionManager.command.execute('Parallel.{command}')")
        assert sentence in said(page)
    assert page.evaluate(STATE) == before
    open_stock(page, FLUX)
    before = page.evaluate(STATE)
    page.evaluate("app.canvas.read_only = true")
    for command in ("UseAllGPUs", "BackToOneGPU"):
        page.evaluate(f"app.extensionManager.command.execute('Parallel.{command}')")
        assert "The canvas is locked" in said(page)
    page.evaluate("app.canvas.read_only = false")
    assert page.evaluate(STATE) == before


def test_the_backend_judges_only_files_that_comfyui_lists(comfyui: ComfyUI) -> None:
    loaders = [{"kind": kind, "file": "../../../secret"} for kind in ("UNETLoader", "VAELoader")]
    answer = requests.post(f"{comfyui.url}/parallel/loaders", json=loaders, timeout=60)
    assert answer.status_code == 200
    assert not any(judgement["swap"] for judgement in answer.json())
    assert all(re.match(r"\.\./\.\./\.\./secret is ", judgement["why"]) for judgement in answer.json())


def test_the_button_reports_a_refusal_before_the_run(comfyui: ComfyUI) -> None:
    """The checkpoint has a tensor outside its diffusion model that makes it another model."""
    save_zero123(comfyui)
    loaders = [
        {"kind": "CheckpointLoaderSimple", "file": "refused-zero123.safetensors"},
        {"kind": "UNETLoader", "file": "ip2p.safetensors"},
    ]
    answer = requests.post(f"{comfyui.url}/parallel/loaders", json=loaders, timeout=60)
    graph, said = zero123()
    assert answer.json() == [{"swap": False, "why": said}, {"swap": True, "why": ""}]
    error = comfyui.queue(graph).error
    assert error is not None and error.exception_message.strip() == said


@thorough
@pytest.mark.parametrize("nodes_2", [False, True], ids=["old canvas", "Nodes 2.0"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_template_that_loads_a_model_is_swapped_by_the_button_and_back(
    page: Page,
    comfyui: ComfyUI,
    part: int,
    nodes_2: bool,
) -> None:
    """No link gets loose, no field is lost, and the files stay.

    The message names the loaders that stay. Swapping back restores the graph bit for bit.
    """
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", nodes_2])
    page.reload()  # Nodes 2.0 keeps some megabytes of each workflow that was open
    page.wait_for_function(READY, polling=POLLING)
    changed, wrong = 0, {}
    for name, graph in list(stock_templates().items())[part::PARTS]:
        put_files(comfyui.base_dir / "models", graph)
        try:
            changed += there_and_back(page, name, sized=not nodes_2)
        except (AssertionError, Error) as error:
            wrong[name] = str(error)
        page.evaluate(CLOSE)
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])
    print(f"{changed} templates changed and went back")
    assert wrong == {}
    assert changed >= CHANGED


@functools.cache
def stock_templates() -> dict[str, dict[str, Node]]:
    """Return ComfyUI's own templates that have a loader."""
    graphs = {path.stem: read(path) for path in template_files()}
    return {name: graph for name, graph in graphs.items() if any(each.kind in FOLDERS for each in graph.values())}


def there_and_back(page: Page, name: str, *, sized: bool) -> bool:
    """Swap a template's loaders and swap them back; return True if any loader changed.

    If `sized`, the comparison includes the sizes of nodes, which Nodes 2.0 measures itself.
    """

    def state() -> Any:
        found = page.evaluate(STATE if sized else UNSIZED)
        for graph in (found, *found.get("definitions", {}).get("subgraphs", ())):
            for each in graph["nodes"]:
                if isinstance(values := each.get("widgets_values"), list):
                    each["widgets_values"] = [*map(undrawn, values)]
        return found

    open_stock(page, name)
    reload(page)
    before, prompt, promoted = state(), page.evaluate(PROMPT), page.evaluate(PROMOTED)
    loose = page.evaluate(LOOSE)  # some templates have loose links of their own
    text = swap(page, "Use all GPUs")
    queued = page.evaluate(PROMPT)
    loaders = {key for key, each in prompt.items() if each.get("class_type") in SWAPPED}  # a missing node has no type
    swapped = {key for key in loaders if queued[key]["class_type"] in SWAPPED.values()}
    stays = loaders - swapped
    assert not stays or " was not swapped: " in text, text
    assert_swapped(page, prompt, swapped)
    assert page.evaluate(PROMOTED) == promoted
    assert page.evaluate(LOOSE) == loose
    if swapped:
        swap(page, "Back to one GPU")
    assert state() == before
    return bool(swapped)


@thorough
def test_a_linked_file_and_a_missing_node_stay_and_a_group_node_is_swapped(page: Page) -> None:
    group = {
        "nodes": [
            {"id": -1, "type": "VAELoader", "pos": [0, 0], "size": [300, 60], "index": 0, "mode": 0, "flags": {}, "order": 0,
             "inputs": [], "outputs": [{"name": "VAE", "type": "VAE", "links": [], "slot_index": 0}],
             "properties": {}, "widgets_values": ["ae.safetensors"]},
        ],
        "links": [],
        "external": [[0, 0, "VAE"]],
    }  # fmt: skip
    node = {"id": 1, "type": "workflow>Loaders", "pos": [50, 50], "size": [300, 80], "flags": {}, "order": 0, "mode": 0,
            "inputs": [], "outputs": [{"name": "VAE", "type": "VAE", "links": [], "slot_index": 0}],
            "properties": {}, "widgets_values": ["ae.safetensors"]}  # fmt: skip
    missing = {**node, "id": 2, "type": "UnetLoaderGGUF", "title": "Unet Loader (GGUF)", "pos": [50, 200],
               "outputs": [{"name": "MODEL", "type": "MODEL", "links": []}], "widgets_values": ["flux1-dev.gguf"]}  # fmt: skip
    graph = {"last_node_id": 2, "last_link_id": 0, "nodes": [node, missing], "links": [], "groups": [], "config": {},
             "extra": {"groupNodes": {"Loaders": group}}, "version": 0.4}  # fmt: skip
    page.evaluate("graph => app.loadGraphData(graph, true, true, 'group')", graph)
    page.evaluate(
        """() => {
            const file = app.graph.add(LiteGraph.createNode("ComfySwitchNode"));
            const loader = app.graph.add(LiteGraph.createNode("UNETLoader"));
            const slot = loader.inputs.findIndex(input => input.name === "unet_name");
            file.outputs[0].type = loader.inputs[slot].type; // as a node that chooses files has it
            file.connect(0, loader, slot);
        }"""
    )
    reload(page)
    before, prompt = page.evaluate(STATE), page.evaluate(PROMPT)
    text = swap(page, "Use all GPUs")
    assert "1 VAE on all GPUs" in text, text
    assert "Load Diffusion Model was not swapped: its file comes over a link." in text, text
    assert "Unet Loader (GGUF) was not swapped: its node is not installed." in text, text
    changed = {name for name, each in prompt.items() if each.get("class_type") == "VAELoader"}
    assert len(changed) == 1
    assert_swapped(page, prompt, changed)
    assert "1 VAE back on one GPU" in swap(page, "Back to one GPU")
    assert page.evaluate(STATE) == before


@thorough
def test_a_checkpoint_is_swapped_with_all_of_its_links_and_back(page: Page, comfyui: ComfyUI) -> None:
    models = comfyui.base_dir / "models"
    tensors = load_file(models / "diffusion_models" / "tiny-dev.safetensors")
    (models / "checkpoints").mkdir(exist_ok=True)
    save_file(
        {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()},
        models / "checkpoints" / "swap.safetensors",
    )
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4}, true, true, 'checkpoint')")
    page.evaluate(
        """() => {
            const [loader, sampler, text, decoder] = ["CheckpointLoaderSimple", "KSampler", "CLIPTextEncode", "VAEDecode"]
                .map(type => app.graph.add(LiteGraph.createNode(type)));
            loader.widgets[0].value = "swap.safetensors";
            for (const [slot, node, name] of [[0, sampler, "model"], [1, text, "clip"], [2, decoder, "vae"]])
                loader.connect(slot, node, node.inputs.findIndex(input => input.name === name));
        }"""
    )
    reload(page)
    before, prompt = page.evaluate(STATE), page.evaluate(PROMPT)
    assert "1 model on all GPUs" in swap(page, "Use all GPUs")
    assert_swapped(page, prompt, {name for name, each in prompt.items() if each["class_type"] in SWAPPED})
    swap(page, "Back to one GPU")
    assert page.evaluate(STATE) == before


@thorough
def test_a_swap_during_a_run_does_not_change_the_run(page: Page) -> None:
    """The run has the graph as it was queued. Both end, and the next graph has the new loaders."""
    open_stock(page, FLUX)
    prompt = runnable(page.evaluate(PROMPT))
    for each in prompt.values():
        each["inputs"] |= {"steps": 40} if "steps" in each["inputs"] else {}
    page.evaluate("""async output => {
        window.ended = [];
        for (const kind of ["execution_success", "execution_error"])
            app.api.addEventListener(kind, ({detail}) => ended.push([kind, detail.prompt_id]));
        window.queued = (await app.api.queuePrompt(0, {output, workflow: {}})).prompt_id;
    }""", prompt)  # fmt: skip
    page.wait_for_function("/\\[[1-9]\\d?%\\]/.test(document.title)", polling=POLLING)
    assert "1 model and 1 VAE on all GPUs" in swap(page, "Use all GPUs")
    page.wait_for_function("ended.some(([, id]) => id === queued)", timeout=240_000, polling=POLLING)
    assert page.evaluate("ended.find(([, id]) => id === queued)[0]") == "execution_success"
    kinds = {each["class_type"] for each in page.evaluate(PROMPT).values()}
    assert {SWAPPED["UNETLoader"], SWAPPED["VAELoader"]} <= kinds and not set(SWAPPED) & kinds
