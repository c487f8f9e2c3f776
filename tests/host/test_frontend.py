"""The pack in ComfyUI's own page, in a real browser: templates, Run, node search, tooltips and node help."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright

from scripts.comfyui import PACKS, REPO, ComfyUI
from tests.host.graphs import parallel

(PACK,) = PACKS
NODES = (
    "ParallelPlan",
    "LoadParallelDiffusionModel",
    "LoadParallelFlux",
    "LoadParallelCogVideoX",
    "LoadParallelPixArt",
    "LoadParallelVAE",
    "ParallelSampler",
    "CogVideoParallelDecode",
    "LoadConditioning",
    "SaveConditioning",
)
TEMPLATES = sorted(path.stem for path in (REPO / "workflows").glob("*.json"))
LOADERS = {name for name in NODES if name.startswith("LoadParallel")} - {"LoadParallelVAE"}
OPTIONAL = 7
"""The shape in which the page draws an input that may stay unconnected."""

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 30_000
"""Milliseconds for one thing to appear in the page."""

Info = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def page(comfyui: ComfyUI) -> Iterator[Page]:
    """ComfyUI's page, without the greeting of a first visit; nothing is fetched from anywhere else."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(PATIENCE)
        page.route(lambda url: not url.startswith(comfyui.url), lambda route: route.abort())
        page.request.post(f"{comfyui.url}/settings/Comfy.TutorialCompleted", data="true")
        page.goto(comfyui.url)
        ready = "window.app?.vueAppReady && app.graph.nodes.length && app.extensionManager.workflow.activeWorkflow"
        page.wait_for_function(ready)  # the default graph is there
        yield page
        browser.close()


@pytest.fixture(scope="module")
def info(comfyui: ComfyUI) -> Info:
    """What ComfyUI tells of the pack's nodes."""
    every: Info = comfyui.get("/object_info")
    return {name: node for name, node in every.items() if node["python_module"] == f"custom_nodes.{PACK}"}


def press(thing: Locator) -> None:
    """Click what is to be seen, in one turn of the page.

    ComfyUI draws its lists anew at any time, and one that is drawn anew between press and release of a mouse button
    loses the click.
    """
    expect(thing).to_be_visible()
    thing.dispatch_event("click")


def template_cards(page: Page) -> Locator:
    """Open the template browser at this pack; its cards."""
    press(page.get_by_role("button", name="Templates"))
    dialog = page.get_by_role("dialog")
    press(dialog.get_by_text(PACK, exact=True))
    return dialog.get_by_test_id("template-workflows-content").locator("[data-testid^=template-workflow-]")


def open_template(page: Page, name: str) -> None:
    """Open one of the pack's templates from the template browser."""
    active = "app.extensionManager.workflow.activeWorkflow"
    before = page.evaluate(f"{active}.path")
    press(template_cards(page).and_(page.get_by_test_id(f"template-workflow-{name}")))
    expect(page.get_by_role("dialog")).to_have_count(0)
    # opened once more, it gets a number
    page.wait_for_function(f"{active}?.path !== {before!r} && {active}?.filename.startsWith({name!r})")


def test_template_browser_lists_the_templates(page: Page) -> None:
    cards = template_cards(page)
    for name in TEMPLATES:
        card = cards.and_(page.get_by_test_id(f"template-workflow-{name}"))
        card.scroll_into_view_if_needed()  # pictures are loaded when they come into sight
        expect(card.get_by_role("heading")).to_have_text(name)
        expect(card.locator('img:not([src*="default-template"])')).to_be_visible()  # our thumbnail, not the stand-in
    expect(cards).to_have_count(len(TEMPLATES))
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_opens_whole(page: Page, name: str) -> None:
    open_template(page, name)
    every = "[app.graph, ...app.graph.subgraphs.values()].flatMap(graph => graph.nodes)"
    nodes = dict(page.evaluate(f"{every}.map(n => [n.type, n.type in LiteGraph.registered_node_types])"))
    assert nodes.keys() & LOADERS
    assert all(nodes.values()), nodes
    expect(page.get_by_text("Missing node")).to_have_count(0)
    if name == "sprites_parallel":  # its files are here; FLUX.1 dev's are not
        expect(page.get_by_test_id("error-overlay")).to_have_count(0)
    unconnected = page.evaluate(
        f"{every}.flatMap(n => (n.inputs ?? []).filter(i => !i.widget && i.link == null && i.shape !== {OPTIONAL})"
        ".map(i => `${n.type} ${i.name}`))"
    )
    assert unconnected == []


def test_missing_node_would_be_seen(page: Page) -> None:
    """What the test above looks for is what this ComfyUI shows."""
    page.evaluate(
        """async url => {
            const graph = await (await fetch(url)).json();
            graph.nodes.find(n => n.type === "ParallelPlan").type = "NoSuchNode";
            await app.loadGraphData(graph, true, true, "broken");
        }""",
        f"/api/workflow_templates/{PACK}/sprites_parallel.json",
    )
    expect(page.get_by_text("Missing node").first).to_be_visible()


def test_sprites_template_runs_from_the_page(page: Page, comfyui: ComfyUI) -> None:
    open_template(page, "sprites_parallel")
    page.evaluate(
        """() => {
            const plan = app.graph.nodes.find(n => n.type === "ParallelPlan");
            plan.widgets.find(w => w.name === "devices").value = "cpu:2";
            window.seen = {titles: [], ended: null};
            new MutationObserver(() => seen.titles.push(document.title))
                .observe(document.querySelector("title"), {childList: true});
            for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
                app.api.addEventListener(kind, event => seen.ended = [kind, event.detail]);
        }"""
    )
    with page.expect_response("**/prompt") as queued:
        page.get_by_test_id("queue-button").click()
    prompt_id = queued.value.json()["prompt_id"]
    page.wait_for_function("seen.ended", timeout=240_000)
    kind, detail = page.evaluate("seen.ended")
    assert (kind, detail["prompt_id"]) == ("execution_success", prompt_id), detail

    titles = "\n".join(page.evaluate("seen.titles"))  # the browser tab shows the graph's and the node's progress
    assert re.search(r"\[\d+%\]\[[1-9]\d?%\] ParallelSampler", titles), titles
    page.wait_for_function("app.graph.nodes.find(n => n.type === 'SaveImage').imgs?.length")

    history = comfyui.history(prompt_id)
    assert history["status"]["status_str"] == "success"
    (saved,) = [image for output in history["outputs"].values() for image in output.get("images", ())]
    with Image.open(comfyui.output_dir / saved["subfolder"] / saved["filename"]) as file:
        picture = file.convert("RGB")
    assert picture.size == (128, 128)
    centre, corner = picture.getpixel((64, 64)), picture.getpixel((4, 4))
    assert centre[0] > 150 and max(centre[1:]) < 100, centre  # a red circle …
    assert min(corner) > 200, corner  # … on white


def test_api_graph_is_the_demos() -> None:
    """The README's graph for the HTTP API is the stock one with the loader and the sampler swapped."""
    stock, swapped = (
        json.loads((REPO / "scripts" / f"{name}.json").read_text()) for name in ("sprites_api", "sprites_parallel_api")
    )
    assert swapped == parallel(stock, "auto", sampler=True)


def open_search(page: Page) -> Locator:
    """Open the node search; its results."""
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    expect(page.get_by_placeholder("Add a node...")).to_be_visible()
    return page.get_by_test_id("result-item")


def close_search(page: Page) -> None:
    page.keyboard.press("Escape")
    expect(page.get_by_placeholder("Add a node...")).to_have_count(0)


def test_pack_has_these_nodes(info: Info) -> None:
    assert sorted(info) == sorted(NODES)
    assert {node["category"] for node in info.values()} == {"Parallel"}


def test_category_lists_the_nodes(page: Page, info: Info) -> None:
    results = open_search(page)
    press(page.get_by_test_id("category-Parallel"))
    for node in info.values():
        expect(results.filter(has_text=node["display_name"]).first).to_be_visible()
    expect(results).to_have_count(len(NODES))
    close_search(page)


@pytest.mark.parametrize("name", NODES)
def test_node_is_found_by_its_names(page: Page, info: Info, name: str) -> None:
    display_name, aliases = info[name]["display_name"], info[name]["search_aliases"]
    assert aliases
    results = open_search(page)
    for words in (display_name, *aliases):
        page.get_by_placeholder("Add a node...").fill(words)
        expect(results.filter(has=page.get_by_text(display_name, exact=True)).first).to_be_visible()
    close_search(page)


@pytest.mark.parametrize("name", NODES)
def test_everything_has_a_tooltip(info: Info, name: str) -> None:
    node = info[name]
    inputs = node["input"].get("required", {}) | node["input"].get("optional", {})
    assert [key for key, (_, *options) in inputs.items() if not (options and options[0].get("tooltip"))] == []
    assert len(node["output_tooltips"]) == len(node["output"])
    assert all(node["output_tooltips"])
    assert node["description"]


@pytest.mark.parametrize("name", NODES)
def test_node_help(page: Page, info: Info, name: str) -> None:
    page.evaluate(
        """name => {
            const node = app.graph.nodes.find(n => n.type === name) ?? app.graph.add(LiteGraph.createNode(name));
            app.canvas.deselectAll();
            app.canvas.selectNode(node);
        }""",
        name,
    )
    if page.get_by_test_id("panel-tab-info").count() == 0:
        press(page.get_by_test_id("info-button"))
    text = page.locator(".node-help-content")
    expect(text.get_by_role("heading", level=1)).to_have_text(info[name]["display_name"])
    node = info[name]
    for slot in (*node["input"].get("required", {}), *node["input"].get("optional", {}), *node["output_name"]):
        expect(text.get_by_role("listitem").locator("code").get_by_text(slot, exact=True).first).to_be_visible()
