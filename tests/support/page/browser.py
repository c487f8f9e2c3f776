"""Opens ComfyUI's own page in a real browser, and drives it for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from scripts.comfyui import PACKS, ComfyUI

(PACK,) = PACKS

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 120_000
"""Milliseconds to wait for one thing to appear in the page; other programs may keep all cores busy."""

OPENING = 240_000
"""Milliseconds to wait for the page to open, which takes minutes on a busy machine."""

POLLING = 100
"""Milliseconds between two checks of a condition. The default checks at each frame, which the CPU then draws."""

READY = "window.app?.vueAppReady && app.graph.nodes.length && app.extensionManager.workflow.activeWorkflow"
"""Condition in JavaScript that is true once the page is up with the default graph."""

GREETED = "Parallel.Greeted"
"""The setting with the number of GPUs that the pack's greeting has named; null before the first start."""

SET = "([name, value]) => app.extensionManager.setting.set(name, value)"
"""JavaScript function that sets one of ComfyUI's settings."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser that ends with the block."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, comfyui: ComfyUI, patience: int = PATIENCE) -> Iterator[Page]:
    """Open ComfyUI's page as a new visitor has it, without the greeting. Block requests to any other server.

    The page waits for nothing longer than `patience` milliseconds.
    """
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(patience)
    page.route(lambda url: not url.startswith(comfyui.url), lambda route: route.abort())
    page.request.post(f"{comfyui.url}/settings/Comfy.TutorialCompleted", data="true")
    page.request.post(f"{comfyui.url}/settings/{GREETED}", data="0")
    page.request.post(f"{comfyui.url}/settings/LiteGraph.Canvas.MaximumFps", data="10")  # the CPU draws the frames
    page.goto(comfyui.url, timeout=OPENING)
    page.wait_for_function(READY, polling=POLLING, timeout=OPENING)
    yield page
    page.close()


def press(thing: Locator) -> None:
    """Click a visible element with a single event.

    ComfyUI redraws its lists at any time. A real click is lost if the element is redrawn between press and release.
    """
    expect(thing).to_be_visible()
    thing.dispatch_event("click")


def dismiss(page: Page) -> None:
    """Remove all messages from the screen and wait until they have faded out."""
    page.evaluate("app.extensionManager.toast.removeAll()")
    page.wait_for_function("!document.querySelector('.p-toast-message')", polling=POLLING)


def open_graph(page: Page, name: str) -> None:
    """Open one of the pack's templates without the template browser."""
    load(page, f"/api/workflow_templates/{PACK}/{quote(name)}.json", name)


def load(page: Page, url: str, name: str) -> None:
    """Open a template by its address."""
    page.evaluate(
        """async ([url, name]) => {
            const graph = await (await fetch(url)).json();
            await app.loadGraphData(graph, true, true, name, {openSource: "template"});
        }""",
        [url, name],
    )
