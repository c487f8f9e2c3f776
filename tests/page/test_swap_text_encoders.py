"""Use all GPUs and Back to one GPU for text encoders, which change only where one GPU has no room for them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from playwright.sync_api import Page
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.template_graphs import read, template_files
from scripts.comfyui import REPO, ComfyUI, Graph
from tests.support.comfy_oracle import comfy_on_path
from tests.support.page.browser import POLLING, READY
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
    swap,
)
from tests.support.selection import thorough
from tests.support.sparse_files import write_sparse
from tests.support.tiny.flux import save_flux
from tests.support.tiny.text_encoders import save_text_encoder
from tests.vae.comfy_vaes import save_image_vae

Put = Callable[..., None]

CLIP, T5 = "clip_l.safetensors", "t5xxl_fp16.safetensors"
"""The text encoders of FLUX.1's template: CLIP-L and T5 XXL in their real sizes, without data on the disk."""

GB = 1_000_000_000
LARGE = (24 * GB, 23 * GB)
SMALL = (2 * GB, 1 * GB)
"""Total and free bytes of a GPU that holds both encoders, and of one that holds no CLIP-L beside a CUDA context."""

WHY_CLIP = "needs 1.10 GB on one GPU (247 MB of weights), and no GPU has more than 1.00 GB free."


@pytest.fixture(scope="module", autouse=True)
def _files(comfyui: ComfyUI) -> None:
    """Save the files of FLUX.1's template."""
    models = comfyui.base_dir / "models"
    (models / "text_encoders").mkdir(exist_ok=True)
    comfy_on_path()
    import comfy.sd1_clip

    clip = next(comfy.sd1_clip.SD1ClipModel(device="meta", dtype=torch.float16).children())
    write_sparse(models / "text_encoders" / CLIP, clip.transformer.state_dict())
    save_t5(models / "text_encoders" / T5)
    save_flux(models / "diffusion_models" / "flux1-dev.safetensors", guidance=True)
    save_image_vae(models / "vae" / "ae.safetensors")


def save_t5(path: Path) -> None:
    import comfy.ops
    from comfy.text_encoders import t5

    settings = json.loads(Path(t5.__file__).with_name("t5_config_xxl.json").read_text(encoding="utf-8"))
    module = t5.T5(settings, dtype=torch.bfloat16, device="meta", operations=comfy.ops.disable_weight_init)
    write_sparse(path, module.state_dict())


@pytest.fixture
def cards(comfyui: ComfyUI) -> Iterator[Put]:
    """Provide a function that gives the check of loaders GPUs with these total and free bytes."""

    def put(*pairs: tuple[int, int]) -> None:
        requests.post(f"{comfyui.url}/other_pack/cards", json=pairs, timeout=60).raise_for_status()

    yield put
    put()


def judged(comfyui: ComfyUI, **loader: Any) -> tuple[bool, str]:
    """Return the server's answer about a loader."""
    asked = [{"kind": "CLIPLoader", "file": CLIP, "type": "stable_diffusion"} | loader]
    (answer,) = requests.post(f"{comfyui.url}/parallel/loaders", json=asked, timeout=60).json()
    return answer["swap"], answer["why"]


DUAL = {"kind": "DualCLIPLoader", "file": CLIP, "further_files": [T5], "type": "flux"}


def test_a_text_encoder_is_swapped_only_if_no_gpu_holds_it(comfyui: ComfyUI, cards: Put) -> None:
    assert judged(comfyui) == (False, ""), "without a GPU"
    for pairs in ([LARGE, LARGE], [SMALL, LARGE], [SMALL]):
        cards(*pairs)
        assert judged(comfyui) == (False, ""), pairs
    cards(SMALL, SMALL)
    assert judged(comfyui) == (True, f"{CLIP} {WHY_CLIP}")
    cards((24 * GB, 9 * GB), (24 * GB, 10 * GB))
    why = f"{CLIP} with {T5} needs 10.62 GB on one GPU (9.77 GB of weights), and no GPU has more than 10.00 GB free."
    assert judged(comfyui, **DUAL) == (True, why)


def test_a_large_text_encoder_that_the_workers_cannot_run_stays_with_the_reason(comfyui: ComfyUI, cards: Put) -> None:
    folder = comfyui.base_dir / "models" / "text_encoders"
    with (folder / "pickle.pt").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(200_000_000)
    write_sparse(folder / "another.safetensors", {"img_in.weight": torch.empty(10_000, 10_000, device="meta")})
    for name, why in (
        ("pickle.pt", r"pickle\.pt is a PyTorch pickle, which is not supported"),
        ("another.safetensors", r"another\.safetensors lacks the tensor clip_l\.\S+: choose a complete text encoder"),
        ("nothing.safetensors", r"nothing\.safetensors is no file in models/text_encoders: download it"),
        (CLIP, r"Not enough memory for the text encoder: its workers on cuda:0 need 1\.\d\d GB .* cuda:0 has 900 MB:"),
    ):
        cards(*[(900_000_000, 900_000_000) if name == CLIP else SMALL] * 2)
        swapped, said = judged(comfyui, file=name)
        assert not swapped and re.match(why, said), said
    cards(LARGE, LARGE)
    assert judged(comfyui, file="pickle.pt") == (False, ""), "one GPU holds it"


def test_the_checkpoint_of_ltx_is_read_from_its_folder_or_refused(comfyui: ComfyUI, cards: Put) -> None:
    checkpoints = comfyui.base_dir / "models" / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    save_t5(checkpoints / T5)
    write_sparse(checkpoints / "ltx.safetensors", {"img_in.weight": torch.empty(10_000, 10_000, device="meta")})
    cards(SMALL, SMALL)
    twice = f"{T5} is the name of a file in models/text_encoders and in models/checkpoints: rename one of the two."
    for name, why in (
        ("nothing.safetensors", "nothing.safetensors is no file in models/checkpoints: download it, or pick another."),
        (T5, twice),
        ("ltx.safetensors", f"{CLIP}, ltx.safetensors lacks the tensor"),
    ):
        swapped, said = judged(comfyui, kind="LTXAVTextEncoderLoader", further_files=[name], type="flux")
        assert not swapped and said.startswith(why), said


def test_the_server_knows_the_loaders_that_the_page_swaps(comfyui: ComfyUI, cards: Put) -> None:
    pairs = (REPO / "web" / "swap" / "pairs.js").read_text(encoding="utf-8")
    kinds = re.findall(r'one: "(\w+)",\s+all: "LoadParallelCLIP"', pairs)
    assert len(kinds) == 5
    cards(SMALL, SMALL)
    unknown = [kind for kind in (*kinds, "CLIPLoaderOfAnotherPack") if "no loader to" in judged(comfyui, kind=kind)[1]]
    assert unknown == ["CLIPLoaderOfAnotherPack"]


def single(page: Page) -> None:
    """Open a graph that encodes a prompt with one text encoder, and saves the conditioning."""
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4}, true, true, 'encoder')")
    page.evaluate(
        """file => {
            const [loader, text, all, save] = ["CLIPLoader", "CLIPTextEncode", "PackEverything", "SaveConditioning"]
                .map(type => app.graph.add(LiteGraph.createNode(type)));
            for (const [at, value] of [file, "stable_diffusion", "default"].entries()) loader.widgets[at].value = value;
            text.widgets[0].value = "a (red:1.3) fox";
            for (const [from, to, name] of [[loader, text, "clip"], [text, all, "conditioning"], [all, save, "conditioning"]])
                from.connect(0, to, to.inputs.findIndex(input => input.name === name));
        }""",
        CLIP,
    )
    reload(page)


def kinds(prompt: Graph) -> set[str]:
    """Return the node classes of a graph. A node that is not installed has none."""
    return {each.get("class_type", "") for each in prompt.values()}


def conditioning(comfyui: ComfyUI, prompt: Graph) -> Tensor:
    """Return the conditioning that a queued graph saves."""
    outputs = comfyui.queue(prompt, timeout=300).check().outputs
    (saved,) = (output["conditioning"][0] for output in outputs.values() if "conditioning" in output)
    return load_file(comfyui.input_dir / saved["filename"])["cond"]


def test_a_text_encoder_too_large_for_one_gpu_is_swapped_with_the_reason_and_back(
    page: Page, comfyui: ComfyUI, cards: Put
) -> None:
    """The queued graph makes the same conditioning. Back to one GPU restores the workflow, and one undo reverts that."""
    save_text_encoder(comfyui.base_dir / "models" / "text_encoders" / CLIP, "clip-l")
    cards(SMALL, SMALL)
    single(page)
    before, prompt = page.evaluate(STATE), page.evaluate(PROMPT)
    text = swap(page, "Use all GPUs")
    assert "1 text encoder on all GPUs" in text, text
    assert f"Load CLIP was swapped: {CLIP} {WHY_CLIP}" in text, text
    swapped, queued = page.evaluate(STATE), page.evaluate(PROMPT)
    assert kinds(queued) == kinds(prompt) - {"CLIPLoader"} | {"LoadParallelCLIP"}
    assert page.evaluate(LOOSE) == []
    assert torch.equal(conditioning(comfyui, queued), conditioning(comfyui, prompt))
    assert "1 text encoder back on one GPU" in swap(page, "Back to one GPU")
    assert page.evaluate(STATE) == before
    undone = page.evaluate(f"{TRACKER}.undoQueue.length") - 1
    page.evaluate("document.activeElement?.blur()")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"count => {TRACKER}.undoQueue.length === count", arg=undone, polling=POLLING)
    page.wait_for_function(f"!{TRACKER}._restoringState", polling=POLLING)
    assert page.evaluate(STATE) == swapped


def swap_flux(page: Page, more: Callable[[], Any] = lambda: None) -> tuple[str, dict[str, Any]]:
    """Swap the loaders of FLUX.1's template and back; return the message of the swap and the queued loader of text encoders.

    Args:
        more: changes the template before.
    """
    open_stock(page, FLUX)
    more()
    reload(page)
    before, prompt, promoted = page.evaluate(STATE), page.evaluate(PROMPT), page.evaluate(PROMOTED)
    text = swap(page, "Use all GPUs")
    state, queued = page.evaluate(STATE), page.evaluate(PROMPT)
    assert page.evaluate(PROMOTED) == promoted
    assert page.evaluate(LOOSE) == []
    page.evaluate("state => app.loadGraphData(state, true, true, 'saved')", state)
    assert page.evaluate(PROMPT) == queued, "what was saved opens as it was"
    swap(page, "Back to one GPU")
    assert page.evaluate(PROMPT) == prompt
    assert page.evaluate(PROMOTED) == promoted
    assert page.evaluate(STATE)["definitions"] == before["definitions"], "bit for bit"
    (loader,) = (each for each in queued.values() if "CLIP" in each["class_type"] and "type" in each["inputs"])
    return text, loader


def test_two_text_encoders_of_a_subgraph_are_swapped_with_their_promoted_fields_and_back(
    page: Page, cards: Put
) -> None:
    cards((24 * GB, 10 * GB), (24 * GB, 10 * GB))
    text, loader = swap_flux(page)
    assert "1 model, 1 text encoder and 1 VAE on all GPUs" in text, text
    assert f"Load CLIP (Dual) was swapped: {CLIP} with {T5} needs 10.62 GB on one GPU" in text, text
    assert loader["class_type"] == "LoadParallelCLIP"
    none = {"clip_name3": "none", "clip_name4": "none"}
    assert loader["inputs"] == {"clip_name": CLIP, "clip_name2": T5, "type": "flux"} | none


@thorough
def test_a_promoted_device_keeps_the_loader_with_the_reason(page: Page, cards: Put) -> None:
    """Link `device`, which Load Parallel CLIP lacks, to a field of the subgraph."""
    cards((24 * GB, 10 * GB), (24 * GB, 10 * GB))

    def promote() -> None:
        page.evaluate(
            """() => {
                const [graph] = [...app.rootGraph.subgraphs.values()];
                const loader = graph.nodes.find(node => node.type === "DualCLIPLoader");
                const slot = loader.inputs.findIndex(input => input.name === "device");
                graph.inputNode.emptySlot.connect(loader.inputs[slot], loader);
            }"""
        )

    text, loader = swap_flux(page, promote)
    assert "Load CLIP (Dual) was not swapped: its device comes over a link." in text, text
    assert loader["class_type"] == "DualCLIPLoader"


IN_PARALLEL = {
    "DualCLIPLoader": (("clip_name1", "clip_name2"), None),
    "LTXAVTextEncoderLoader": (("text_encoder", "ckpt_name"), "ltxv"),
    "QuadrupleCLIPLoader": (("clip_name1", "clip_name2", "clip_name3", "clip_name4"), "hidream"),
}
"""The files' fields of ComfyUI's loaders of several files, and the type of those that have no field for it."""

FILES = ("clip_name", "clip_name2", "clip_name3", "clip_name4")

TOO_LARGE = """() => {
    const fetch = app.api.fetchApi.bind(app.api);
    const judged = ({ further_files }) => ({ swap: further_files.length > 0, why: "It is large." });
    app.api.fetchApi = async (path, options) => path !== "/parallel/loaders" ? fetch(path, options) : new Response(
        JSON.stringify(JSON.parse(options.body).map(judged)),
    );
}"""
"""JavaScript that gives the page the server's answer about files that are not here: encoders of several files are too large."""


def in_parallel(prompt: Graph) -> Graph:
    """Return a copy of the graph with Load Parallel CLIP in place of each loader of several files, without titles."""
    graph = {name: {key: each[key] for key in each if key != "_meta"} for name, each in copy.deepcopy(prompt).items()}
    for each in graph.values():
        fields, kind = IN_PARALLEL.get(each.get("class_type", ""), ((), None))
        if fields:
            inputs = each["inputs"]
            files = {name: inputs[field] for name, field in zip(FILES, fields, strict=False)}
            each["class_type"] = "LoadParallelCLIP"
            each["inputs"] = dict.fromkeys(FILES, "none") | files | {"type": kind or inputs["type"]}
    return graph


@thorough
def test_every_template_with_text_encoders_of_several_files_is_swapped_and_back(page: Page) -> None:
    """No link gets loose, no promoted field is lost, and what is saved opens as it was."""
    graphs = {path.stem: read(path) for path in template_files()}
    found = {name: {each.kind for each in graph.values()} & {*IN_PARALLEL} for name, graph in graphs.items()}
    names = [name for name, kinds_here in found.items() if kinds_here]
    assert len(names) > 40
    assert {*IN_PARALLEL} == set().union(*found.values())
    page.evaluate(TOO_LARGE)
    wrong = {}
    for name in names:
        open_stock(page, name)
        reload(page)
        before, prompt = page.evaluate(STATE), page.evaluate(PROMPT)
        promoted = page.evaluate(PROMOTED)
        loose = page.evaluate(LOOSE)  # some templates have loose links of their own
        text, swapped = swap(page, "Use all GPUs"), page.evaluate(PROMPT)
        reload(page)
        checks = {
            "message": "was swapped: It is large." in text,
            "queued": in_parallel(swapped) == in_parallel(prompt) and not kinds(swapped) & {*IN_PARALLEL},
            "saved": page.evaluate(PROMPT) == swapped,
            "promoted": page.evaluate(PROMOTED) == promoted,
            "loose": page.evaluate(LOOSE) == loose,
        }
        swap(page, "Back to one GPU")
        checks["back"] = page.evaluate(STATE) == before
        if failed := [what for what, held in checks.items() if not held]:
            wrong[name] = failed
        page.evaluate(CLOSE)
    page.reload()
    page.wait_for_function(READY, polling=POLLING)
    assert wrong == {}
