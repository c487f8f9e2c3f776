"""Makes the README's film and the guide's picture of a run, in Chromium: a stock workflow, its loader's menu, Run, the timeline.

Run from the repository root, with ComfyUI's folder and a Chromium:

    COMFYUI_PATH=... CHROMIUM=... python -m benchmarks.page_film [FOLDER]

It writes FOLDER/run.gif and FOLDER/timeline.png (default: docs/images). The workers run on the CPU. This script sets the time
of each frame, so that the film has the same length on any machine.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, ViewportSize, expect

from benchmarks.page_pictures import PATIENCE, SPRITES, open_tab, server
from scripts.comfyui import REPO, ComfyUI
from tests.support.page.browser import POLLING, SET, chromium, dismiss, open_graph, opened

SIZE: ViewportSize = {"width": 1100, "height": 640}
COLOURS = 96
WORKERS = 2
"""Workers in the film: two cores run so many."""

RUNNING, MOST = 7000, 20
"""Milliseconds of the film for the run itself, and its largest number of frames."""

RANKS, WIDE = 4, 760
"""Workers in the picture, and its width in pixels."""

TIMELINE = ".pp-on-last-run > div > :nth-child(2)"
"""Selector of the timeline in the tab."""

QUIET = {"Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasInfo": False}
"""Settings of ComfyUI that clear the view."""

LOADER = "app.graph.nodes.find(node => /UNETLoader|LoadParallelDiffusionModel/.test(node.type))"

STOCK = """() => {
    for (const node of app.graph.nodes.filter(node => /Markdown|ParallelPlan/.test(node.type))) app.graph.remove(node);
    app.canvas.ds.scale = 0.66;
    app.canvas.ds.offset = [-291, 150];
    app.canvas.setDirty(true, true);
}"""
"""JavaScript function that leaves only the nodes of a stock workflow, all of them in view."""

TITLE = f"""() => {{
    const [x, y] = {LOADER}.pos, {{left, top}} = app.canvas.canvas.getBoundingClientRect();
    const {{scale, offset}} = app.canvas.ds;
    return [left + (x + 90 + offset[0]) * scale, top + (y - 15 + offset[1]) * scale];
}}"""
"""JavaScript function that returns the position of the loader's title in the window."""

ALONE = """([part, width]) => {
    const frame = document.createElement("div");
    frame.className = "pp-panel dark-theme";
    frame.id = "pp-alone";
    frame.style.cssText = `position:fixed;inset:0 auto auto 0;z-index:99999;width:${width}px;background:#171718;overflow:hidden`;
    frame.append(document.querySelector(part).cloneNode(true));
    frame.querySelector(".pp-whole")?.remove();
    document.body.append(frame);
    frame.style.height = `${Math.floor(frame.getBoundingClientRect().height)}px`;
}"""
"""JavaScript function that shows a part of the tab alone, with the given width."""


@dataclass
class Film:
    """Pictures of a page, with the milliseconds that each is shown."""

    page: Page
    frames: list[Image.Image] = field(default_factory=list)
    durations: list[int] = field(default_factory=list)

    def take(self, milliseconds: int) -> None:
        """Take one picture of the page now."""
        self.add([self.page.screenshot()], milliseconds)

    def add(self, pictures: Sequence[bytes], milliseconds: int) -> None:
        """Add pictures that share the given milliseconds. Of many pictures, keep some at even intervals."""
        every = -(-len(pictures) // MOST)
        chosen = pictures[::every]
        for each in chosen:
            self.frames.append(few_colours(Image.open(io.BytesIO(each))))
            self.durations.append(milliseconds // len(chosen))

    def save(self, path: Path) -> None:
        """Save the film as a GIF that repeats."""
        first, *others = self.frames
        first.save(path, save_all=True, append_images=others, duration=self.durations, loop=0, optimize=True)


def few_colours(picture: Image.Image) -> Image.Image:
    """Return a picture with few colours, which takes a third of the bytes."""
    return picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


def shoot(page: Page, path: Path) -> None:
    """Film a stock workflow up to the timeline of its run on several workers."""
    page.set_viewport_size(SIZE)
    for name, value in {"Parallel.Devices": f"cpu:{WORKERS}", **QUIET}.items():
        page.evaluate(SET, [name, value])
    open_graph(page, SPRITES)
    page.evaluate("app.extensionManager.command.execute('Parallel.BackToOneGPU')")
    page.wait_for_function(f"{LOADER}.type === 'UNETLoader'", polling=POLLING)
    page.evaluate(STOCK)
    dismiss(page)
    film = Film(page)
    page.wait_for_timeout(500)
    film.take(2500)
    x, y = page.evaluate(TITLE)
    page.mouse.click(x, y, button="right")
    choice = page.get_by_text("Use all GPUs", exact=True).last
    expect(choice).to_be_visible()
    choice.hover()
    film.take(2500)
    choice.click()
    page.wait_for_function(f"{LOADER}.type === 'LoadParallelDiffusionModel'", polling=POLLING)
    expect(page.locator(".p-toast-message")).to_be_visible()
    page.wait_for_function(f"{LOADER}.badges.length > 1", polling=POLLING)
    page.wait_for_timeout(1000)
    film.take(2500)
    dismiss(page)
    button = page.get_by_test_id("queue-button")
    button.hover()
    film.take(1000)
    button.click()
    done = "app.graph.nodes.find(node => node.type === 'SaveImage').imgs?.length"
    going = []
    while not page.evaluate(done):
        going.append(page.screenshot())
    film.add(going, RUNNING)
    page.wait_for_timeout(500)
    film.take(3000)
    open_tab(page)
    rows = page.locator(".pp-on-last-run svg.pp-row")
    expect(rows).to_have_count(WORKERS)
    page.locator(".pp-on-last-run").scroll_into_view_if_needed()
    page.evaluate("document.querySelector('.pp-on-last-run').scrollIntoView()")
    film.take(4500)
    film.save(path)


def photograph(page: Page, path: Path) -> None:
    """Take the picture of a run's timeline: workers over seconds."""
    expect(page.locator(".pp-on-last-run svg.pp-row")).to_have_count(RANKS)
    page.evaluate(ALONE, [TIMELINE, WIDE])
    page.locator("#pp-alone").screenshot(path=path)


def run(comfyui: ComfyUI, workers: int) -> None:
    """Draw a picture on so many workers, so that they have started and the next run is not their first."""
    graph = json.loads((REPO / "scripts" / "sprites_parallel_api.json").read_text(encoding="utf-8"))
    graph["plan"]["inputs"]["devices"] = f"cpu:{workers}"
    graph["sampler"]["inputs"]["seed"] += workers
    comfyui.queue(graph, timeout=PATIENCE).check()


def main() -> None:
    """Make the film and the picture."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("folder", type=Path, nargs="?", default=REPO / "docs" / "images")
    folder = line.parse_args().folder
    with server("") as comfyui, chromium() as browser, opened(browser, comfyui) as page:
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        run(comfyui, WORKERS)
        shoot(page, folder / "run.gif")
        run(comfyui, RANKS)
        photograph(page, folder / "timeline.png")


if __name__ == "__main__":
    main()
