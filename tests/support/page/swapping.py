"""The page's workflow as it is queued, saved and undone, and the tab that swaps loaders."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.support.page.browser import POLLING, dismiss, load, press

WORKFLOWS = "app.extensionManager.workflow"
TRACKER = f"{WORKFLOWS}.activeWorkflow.changeTracker"
CLOSE = f"{WORKFLOWS}.closeWorkflow({WORKFLOWS}.activeWorkflow, {{warnIfUnsaved: false}})"
STATE = "JSON.parse(JSON.stringify(app.rootGraph.serialize()))"
PROMPT = "app.graphToPrompt().then(({output}) => JSON.parse(JSON.stringify(output)))"

FLUX = "flux_dev_full_text_to_image"
"""ComfyUI's template of FLUX.1 dev, whose loaders are in a subgraph that promotes their fields."""

PROMOTED = """() => [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap(graph => graph.nodes)
    .filter(node => node.subgraph).map(node => [node.id, (node.widgets ?? []).map(w => [w.name, String(w.value)])])"""
"""JavaScript for the fields that subgraphs promote from their inside."""

LOOSE = """() => [app.rootGraph, ...app.rootGraph.subgraphs.values()].flatMap(graph => [...graph.links.values()].filter(link => {
    const target = graph.getNodeById(link.target_id), origin = graph.getNodeById(link.origin_id);
    const arrives = link.target_id < 0 || target?.inputs[link.target_slot]?.link === link.id;
    const leaves = link.origin_id < 0 || origin?.outputs[link.origin_slot]?.links?.includes(link.id);
    return !arrives || !leaves;
}).map(link => [link.origin_id, link.origin_slot, link.target_id, link.target_slot]))"""
"""JavaScript for links whose ends do not list them."""


def tab(page: Page) -> Any:
    """Return the part of the tab with the loaders. Open the tab if it is closed."""
    if page.locator(".pp-panel").count() == 0:
        page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")
    return page.locator(".pp-on-loaders")


def open_stock(page: Page, name: str) -> None:
    """Open one of ComfyUI's own templates."""
    load(page, f"/templates/{name}.json", name)
    if page.evaluate("!!app.rootGraph.extra.linearMode"):  # the template opens as an app, which has no tabs
        page.evaluate("app.extensionManager.command.execute('Comfy.ToggleLinear')")
    expect(page.locator(".parallel-tab-button")).to_be_visible()


def reload(page: Page) -> None:
    """Load the open graph anew, as Undo does."""
    page.evaluate(f"state => {TRACKER}.updateState([state], [])", page.evaluate(STATE))


def swap(page: Page, button: str) -> str:
    """Press one of the two buttons and return the message."""
    dismiss(page)
    thing = tab(page).get_by_role("button", name=button, exact=True)
    expect(thing).to_be_enabled()
    press(thing)
    return said(page)


def said(page: Page) -> str:
    """Return the one message. The page reads the text itself, because the message disappears after some seconds."""
    told = "{ const all = document.querySelectorAll('.p-toast-message'); return all.length === 1 && all[0].innerText; }"
    text: str = page.wait_for_function(f"() => {told}", polling=POLLING).json_value()
    dismiss(page)
    return text
