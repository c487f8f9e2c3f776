"""Takes the guide's pictures of a run in Chromium: the sampler's text, the tab, a killed worker, Chinese.

Run from the repository root, with ComfyUI's folder and a Chromium:

    COMFYUI_PATH=... CHROMIUM=... python -m benchmarks.guide_pictures [FOLDER] [--scenes panel,chinese]

The scene in Chinese needs a font with Chinese letters. It writes PNG files into FOLDER (default: docs/images). The
workers run on the CPU.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Mapping
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, Page, ViewportSize, expect

from benchmarks.page_film import QUIET, few_colours
from benchmarks.page_pictures import FIT, NODE, PATIENCE, SPRITES, open_tab, server, toggle_tab
from scripts.comfyui import REPO, ComfyUI
from tests.support.page.browser import POLLING, READY, SET, chromium, dismiss, open_graph, opened

SIZE: ViewportSize = {"width": 1280, "height": 860}
STEPS = 60
GAP = 10
"""Pixels between two pictures that stand side by side."""

AT_SAMPLER = """() => {
    const node = app.graph.nodes.find(n => n.type === 'ParallelSampler');
    app.canvas.ds.scale = 1;
    app.canvas.ds.offset = [120 - node.pos[0], 160 - node.pos[1]];
    app.canvas.setDirty(true, true);
}"""
"""JavaScript function that shows the sampler at its own size, at the left of the window, and the picture beside it."""

SAMPLER: FloatRect = {"x": 110, "y": 112, "width": 330, "height": 660}
"""The sampler in that window."""

TEXT = f"({NODE.format('ParallelSampler')}.widgets.find(w => w.name === '$$node-text-preview')?.value ?? '')"
"""JavaScript expression of the sampler's text."""

TAB: FloatRect = {"x": 59, "y": 40, "width": 312, "height": 680}
"""The upper part of the tab in that window."""

KILLED: FloatRect = {"x": 105, "y": 40, "width": 1170, "height": 800}
"""The graph in that window, with the message beside it."""


def open_sprites(page: Page, devices: str, *, nodes2: bool = False) -> None:
    """Open the template that needs no GPU on these devices."""
    for name, value in {"Comfy.VueNodes.Enabled": nodes2, **QUIET}.items():
        page.evaluate(SET, [name, value])
    page.set_viewport_size(SIZE)
    open_graph(page, SPRITES)
    page.evaluate(f"{NODE.format('ParallelPlan')}.widgets.find(w => w.name === 'devices').value = '{devices}'")
    page.evaluate(f"{NODE.format('ParallelSampler')}.widgets.find(w => w.name === 'steps').value = {STEPS}")
    page.evaluate(AT_SAMPLER)
    dismiss(page)


def queue(page: Page) -> None:
    """Press Run with a new seed."""
    page.evaluate(f"{NODE.format('ParallelSampler')}.widgets.find(w => w.name === 'seed').value = Date.now() % 1e6")
    page.get_by_test_id("queue-button").click()


def wait_for_text(page: Page, text: str) -> None:
    """Wait until the sampler shows a text that matches a regular expression."""
    page.wait_for_function(f"/{text}/.test({TEXT})", polling=POLLING)


def shot(page: Page, clip: FloatRect | None = None) -> Image.Image:
    """Return a picture of the window, or of a part of it."""
    return Image.open(io.BytesIO(page.screenshot(clip=clip)))


def first_run(page: Page, comfyui: ComfyUI) -> dict[str, Image.Image]:
    """Return the sampler while workers start, at two steps and at the end, and the end beside the picture."""
    open_sprites(page, "cpu:2")
    queue(page)
    moments = []
    for text in ("^Starting 2 workers, [2-9]", "^Step [12][0-9] of", "^Step [45][0-9] of"):
        wait_for_text(page, text)
        moments.append(shot(page, SAMPLER))
    wait_for_text(page, "a step on 2 workers")
    page.wait_for_timeout(1000)  # until the picture is drawn
    moments.append(shot(page, SAMPLER))
    return {"first-run": beside(moments), "run-on-the-node": shot(page, {**SAMPLER, "width": 735})}


def panel(page: Page, comfyui: ComfyUI) -> dict[str, Image.Image]:
    """Return the tab during a run on four workers, after a worker was killed and at the doctor's findings, and then the graph."""
    open_sprites(page, "cpu:4")
    queue(page)
    wait_for_text(page, "a step on 4 workers")
    open_tab(page)
    queue(page)
    wait_for_text(page, "^Step 2[0-9] of")
    columns = [tab(page, "memory")]
    max(comfyui.children(), key=lambda process: process.create_time()).kill()
    expect(page.locator(".pp-on-failure")).to_contain_text("SIGKILL")
    columns.append(tab(page, "failure"))
    page.get_by_role("button", name="Check this machine").first.click()
    expect(page.locator(".pp-on-doctor")).to_contain_text("NCCL")
    columns.append(tab(page, "doctor"))
    toggle_tab(page)
    return {"panel": beside(columns), "killed-worker": shot(page, KILLED)}


def tab(page: Page, section: str) -> Image.Image:
    """Return the tab from a section on."""
    page.evaluate("section => document.querySelector(section).scrollIntoView()", f".pp-on-{section}")
    page.wait_for_timeout(500)  # until it has scrolled
    return shot(page, TAB)


def chinese(page: Page, comfyui: ComfyUI) -> dict[str, Image.Image]:
    """Return a finished run in Chinese and in Nodes 2.0: the tab and the graph."""
    page.request.post(f"{comfyui.url}/settings/Comfy.Locale", data='"zh"')
    page.reload()
    page.wait_for_function(READY, polling=POLLING)
    open_sprites(page, "cpu:2", nodes2=True)
    open_tab(page)
    queue(page)
    wait_for_text(page, "cfg 2")
    page.evaluate(FIT)
    page.wait_for_timeout(1000)  # until messages have come and the graph stands still
    return {"chinese": shot(page)}


def beside(pictures: list[Image.Image]) -> Image.Image:
    """Return pictures side by side in one."""
    width = sum(each.width for each in pictures) + GAP * (len(pictures) - 1)
    whole = Image.new("RGB", (width, max(each.height for each in pictures)), "#3c3c3c")
    left = 0
    for each in pictures:
        whole.paste(each, (left, 0))
        left += each.width + GAP
    return whole


SCENES: Mapping[str, Callable[[Page, ComfyUI], dict[str, Image.Image]]] = {
    each.__name__: each for each in (first_run, panel, chinese)
}


def main() -> None:
    """Take the pictures."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("folder", type=Path, nargs="?", default=REPO / "docs" / "images")
    line.add_argument("--scenes", default=",".join(SCENES), help="scenes, separated by commas (default: all)")
    options = line.parse_args()
    with server("") as comfyui, chromium() as browser, opened(browser, comfyui, PATIENCE) as page:
        expect.set_options(timeout=PATIENCE)
        for scene in options.scenes.split(","):
            for name, picture in SCENES[scene](page, comfyui).items():
                few_colours(picture).save(options.folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
