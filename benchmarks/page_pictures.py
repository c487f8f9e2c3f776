"""Takes pictures of the pack in ComfyUI's page for review: each scene in both renderers and themes, 1920 and 1280 wide.

Run from the repository root, with ComfyUI's folder and a Chromium:

    COMFYUI_PATH=... CHROMIUM=... python -m benchmarks.page_pictures FOLDER [--scenes refused,gpus] [--url http://127.0.0.1:8188]

It writes FOLDER/SCENE.png, a scene's eight pictures side by side, and each picture alone as
FOLDER/SCENE/RENDERER-THEME-WIDTH.png. With --url it uses a running ComfyUI, which has the sprites' files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, Route, ViewportSize, expect

from scripts.comfyui import REPO, ComfyUI
from tests.support.page.browser import PACK, POLLING, SET, chromium, dismiss, open_graph, opened, press
from tests.support.page.swapping import TRACKER

SIZES: tuple[ViewportSize, ...] = ({"width": 1920, "height": 1080}, {"width": 1280, "height": 720})
THEMES = ("dark", "light")
RENDERERS = {"canvas": False, "nodes2": True}
PREVIEW = 960
"""Width in pixels of each picture in FOLDER/SCENE.png."""

SPRITES = "Sprites without a GPU"
NODE = "app.graph.nodes.find(n => n.type === '{}')"
TELL = "([name, detail]) => app.api.dispatchEvent(new CustomEvent(name, {detail}))"
FIT = "app.extensionManager.command.execute('Comfy.Canvas.FitView')"
STATUS = "**/parallel/status"
PUSHED = """gpus => {
    const tell = EventTarget.prototype.dispatchEvent;
    EventTarget.prototype.dispatchEvent = function (event) {
        if (event.type === "parallel.status") event.detail.memory = gpus;
        return tell.call(this, event);
    };
}"""
"""JavaScript function that adds these GPUs to the status that the server pushes."""
PATIENCE = 300_000
"""Milliseconds to wait for one thing to appear; nobody waits for the pictures."""

GIGABYTE = 1e9
GPUS = [
    {
        "device": f"cuda:{index}",
        "name": "NVIDIA GeForce RTX 4090",
        "total": 24 * GIGABYTE,
        "free": (3 + index) * GIGABYTE,
        "load": 97 - index,
        "temperature": 71 + index,
    }
    for index in range(4)
]


SIDES = [
    {
        "name": name,
        "plan": plan,
        "step": step,
        "whole": 20 * step + 3,
        "peak": 18.5 * GIGABYTE,
        "error": error,
        "failed": failed,
    }
    for name, plan, step, error, failed in (
        ("stock ComfyUI", "", 0.81, None, ""),
        ("0", "1 worker (cuda:0)", 0.8, 2.1e-7, ""),
        ("0-1", "2 workers (cuda:0, cuda:1): cfg 2", 0.41, 2.3e-7, ""),
        ("0-3", "", 0, None, "0-3, first: Worker 3 (cuda:3) ran out of memory"),
    )
]
ROW = "| 4 x NVIDIA GeForce RTX 4090 | qwen-image.safetensors, 1024x1024, 20 steps | 0.81 s | 0.8 s | 0.41 s | cannot |  |"


def sprites(page: Page) -> None:
    """Show the template that needs no GPU, with its estimate."""
    open_graph(page, SPRITES)
    loader = "app.graph.nodes.find(n => n.type.startsWith('LoadParallel'))"
    texts = f"{loader}.badges.map(badge => (typeof badge === 'function' ? badge() : badge).text)"
    page.wait_for_function(f"{texts}.some(text => /^2 workers: /.test(text))", polling=POLLING)


def first(page: Page) -> None:
    """Show the loader and the tab before a first run, whose workers do not exist yet."""
    open_graph(page, SPRITES)
    devices = f"{NODE.format('ParallelPlan')}.widgets.find(w => w.name === 'devices')"
    page.evaluate(f"{devices}.value = 'cpu:3'")  # no other scene runs on these
    page.evaluate(f"{TRACKER}.captureCanvasState()")
    open_tab(page)
    expect(page.locator(".pp-on-loaders")).to_contain_text("the first run starts workers")


def templates(page: Page) -> None:
    """Show the pack's templates in the template browser."""
    press(page.get_by_role("button", name="Templates"))
    dialog = page.get_by_role("dialog")
    press(dialog.get_by_text(PACK, exact=True))
    expect(dialog.locator('img:not([src*="default-template"])').first).to_be_visible()


def run(page: Page) -> None:
    """Show a run's results on the node and in the tab."""
    sprites(page)
    open_tab(page)
    page.get_by_test_id("queue-button").click()
    page.wait_for_function("app.graph.nodes.find(n => n.type === 'SaveImage').imgs?.length", polling=POLLING)


def starting(page: Page) -> None:
    """Show the progress text of a run, as the server sends it."""
    open_graph(page, SPRITES)
    (number,) = page.evaluate("app.graph.nodes.filter(n => n.type === 'ParallelSampler').map(n => String(n.id))")
    said = {"nodeId": number, "text": "Step 24 of 60 · 0.17 s a step · 7 s left"}
    page.evaluate(TELL, ["progress_text", said])


def refused(page: Page) -> None:
    """Show the error of a plan that cannot run."""
    open_graph(page, SPRITES)
    page.evaluate(f"{NODE.format('ParallelPlan')}.widgets.find(w => w.name === 'ulysses').value = 3")
    page.get_by_test_id("queue-button").click()
    expect(page.locator(".p-toast-detail a")).to_be_visible()


def subgraph(page: Page) -> None:
    """Show the progress of a run inside a subgraph on the outer node."""
    open_graph(page, "Z-Image-Turbo")
    number = page.evaluate(
        "() => { const outer = app.graph.nodes.find(n => n.subgraph);"
        "return `${outer.id}:${outer.subgraph.nodes.find(n => n.type === 'KSampler').id}`; }"
    )
    text = "Step 24 of 60 · 0.17 s a step · 7 s left"
    page.evaluate(TELL, ["progress_text", {"nodeId": number, "text": text}])


def swap(page: Page) -> None:
    """Show "Use all GPUs" on a template of ComfyUI's own without its files, and the reason why its loaders stay."""
    page.evaluate(
        "async () => app.loadGraphData(await (await fetch('/templates/flux_dev_full_text_to_image.json')).json(),"
        " true, true, 'stock', {openSource: 'template'})"
    )
    open_tab(page)
    press(page.locator(".pp-on-loaders").get_by_role("button", name="Use all GPUs", exact=True))
    expect(page.locator(".p-toast-message")).to_be_visible()


def settings(page: Page) -> None:
    """Show Settings > Parallel."""
    page.evaluate("app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    press(page.get_by_role("dialog").get_by_text("Parallel", exact=True).first)
    expect(page.get_by_role("dialog").get_by_text("GPUs during a run")).to_be_visible()


def gpus(page: Page) -> None:
    """Show the strip of four GPUs during a run, and their check boxes in the tab."""

    def answer(route: Route) -> None:
        status = route.fetch().json()
        route.fulfill(json={**status, "memory": GPUS})

    open_graph(page, SPRITES)
    page.route(STATUS, answer)
    page.evaluate(PUSHED, GPUS)
    open_tab(page)
    expect(page.locator(".pp-on-memory").get_by_role("checkbox")).to_have_count(len(GPUS))
    page.evaluate(TELL, ["execution_start", {"prompt_id": ""}])
    expect(page.locator(".pp-strip .pp-gpu")).to_have_count(len(GPUS))


def bench(page: Page) -> None:
    """Show the benchmark of stock ComfyUI and the pack, half done, with a failed side."""
    file = "2026-11-25-4-x-nvidia-geforce-rtx-4090.json"
    shown = {"doing": "0-3, first: step 7 of 20", "sides": SIDES, "row": ROW, "file": file, "said": ""}

    def answer(route: Route) -> None:
        route.fulfill(json={**route.fetch().json(), "bench": shown})

    open_graph(page, SPRITES)
    page.route(STATUS, answer)
    page.evaluate(
        "shown => app.api.addEventListener('parallel.status', e => { e.detail.bench = shown; }, {capture: true})", shown
    )
    open_tab(page)
    section = page.locator(".pp-on-bench")
    expect(section.locator("tbody tr")).to_have_count(len(SIDES))
    section.scroll_into_view_if_needed()


def toggle_tab(page: Page) -> None:
    """Open or close the pack's tab of the sidebar."""
    page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")


def open_tab(page: Page) -> None:
    """Open the pack's tab of the sidebar."""
    toggle_tab(page)
    expect(page.locator(".pp-panel")).to_be_visible()


SCENES: Mapping[str, Callable[[Page], None]] = {
    each.__name__: each
    for each in (sprites, first, templates, starting, run, refused, subgraph, swap, settings, gpus, bench)
}


@contextlib.contextmanager
def server(url: str) -> Iterator[ComfyUI]:
    """Yield a ComfyUI with the sprites' files: a new one, or the one at an address."""
    with tempfile.TemporaryDirectory() as folder:
        comfyui = ComfyUI(os.environ["COMFYUI_PATH"], folder)
        comfyui.patience = 5 * PATIENCE / 1000
        if url:
            comfyui.url = url
            yield comfyui
            return
        files = REPO / "workflows" / "sprites"
        comfyui.add_model("diffusion_models", [files / "sprites-flux-schnell.safetensors"])
        comfyui.add_model("vae_approx", files.glob("taef1_*.safetensors"))
        comfyui.add_input([*files.glob("*-on-*.safetensors"), files / "empty.safetensors"])
        with comfyui:
            yield comfyui


def photograph(page: Page, scene: str, folder: Path) -> None:
    """Take all pictures of a scene."""
    pictures = []
    for renderer, theme in itertools.product(RENDERERS, THEMES):
        page.set_viewport_size(SIZES[0])
        page.evaluate(SET, ["Comfy.VueNodes.Enabled", RENDERERS[renderer]])
        page.evaluate(SET, ["Comfy.ColorPalette", theme])
        page.reload()
        page.wait_for_function(
            "window.app?.vueAppReady && app.extensionManager.workflow.activeWorkflow", polling=POLLING
        )
        dismiss(page)
        SCENES[scene](page)
        for size in SIZES:
            page.set_viewport_size(size)
            page.evaluate(FIT)
            page.wait_for_timeout(1000)  # until fades have ended
            path = folder / scene / f"{renderer}-{theme}-{size['width']}.png"
            page.screenshot(path=path)
            pictures.append(path)
            print(path, flush=True)
        page.unroute(STATUS)
    side_by_side(pictures).save(folder / f"{scene}.png")


def side_by_side(paths: list[Path]) -> Image.Image:
    """Return the pictures in one image, two in a row and of equal width."""
    pictures = [Image.open(path).convert("RGB") for path in paths]
    scaled = [each.resize((PREVIEW, each.height * PREVIEW // each.width)) for each in pictures]
    height = max(each.height for each in scaled)
    whole = Image.new("RGB", (2 * PREVIEW, height * -(-len(scaled) // 2)))
    for place, each in enumerate(scaled):
        whole.paste(each, (place % 2 * PREVIEW, place // 2 * height))
    return whole


def main() -> None:
    """Take the pictures."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("folder", type=Path)
    line.add_argument(
        "--scenes", default=",".join(SCENES), help="the scenes to photograph, separated by commas (default: all)"
    )
    line.add_argument("--url", default="", help="address of a running ComfyUI (default: start one)")
    options = line.parse_args()
    with server(options.url) as comfyui, chromium() as browser, opened(browser, comfyui, PATIENCE) as page:
        expect.set_options(timeout=PATIENCE)
        for scene in options.scenes.split(","):
            photograph(page, scene, options.folder)


if __name__ == "__main__":
    main()
