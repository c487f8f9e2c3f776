"""ComfyUI's own page in a real browser: how it is opened, and what tests do in it."""

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
PATIENCE = 30_000
"""Milliseconds for one thing to appear in the page."""

OPENING = 240_000
"""Milliseconds for the whole page to come up, which is minutes of work where other programs run."""

POLLING = 100
"""Milliseconds between two looks, where one waits; the default is each frame, which the CPU then draws."""

READY = "window.app?.vueAppReady && app.graph.nodes.length && app.extensionManager.workflow.activeWorkflow"
"""The page is up, with the default graph."""

SET = "([name, value]) => app.extensionManager.setting.set(name, value)"
"""Sets one of ComfyUI's settings."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser, which ends with the block."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, comfyui: ComfyUI, patience: int = PATIENCE) -> Iterator[Page]:
    """ComfyUI's page as a new visitor has it, but without the greeting; nothing is fetched from anywhere else.

    Nothing in it is waited for longer than `patience`, in milliseconds.
    """
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(patience)
    page.route(lambda url: not url.startswith(comfyui.url), lambda route: route.abort())
    page.request.post(f"{comfyui.url}/settings/Comfy.TutorialCompleted", data="true")
    page.request.post(f"{comfyui.url}/settings/LiteGraph.Canvas.MaximumFps", data="10")  # drawn by the CPU
    page.goto(comfyui.url, timeout=OPENING)
    page.wait_for_function(READY, polling=POLLING, timeout=OPENING)
    yield page
    page.close()


def press(thing: Locator) -> None:
    """Click what is to be seen, in one turn of the page.

    ComfyUI draws its lists anew at any time, and one that is drawn anew between press and release of a mouse button
    loses the click.
    """
    expect(thing).to_be_visible()
    thing.dispatch_event("click")


def dismiss(page: Page) -> None:
    """Take all messages off the screen."""
    page.evaluate("app.extensionManager.toast.removeAll()")
    page.wait_for_function("!document.querySelector('.p-toast-message')", polling=POLLING)  # they fade out


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
