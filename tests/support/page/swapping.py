"""The page's workflow as it is queued, saved and undone, and the tab that swaps loaders."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

WORKFLOWS = "app.extensionManager.workflow"
TRACKER = f"{WORKFLOWS}.activeWorkflow.changeTracker"
STATE = "JSON.parse(JSON.stringify(app.rootGraph.serialize()))"
PROMPT = "app.graphToPrompt().then(({output}) => JSON.parse(JSON.stringify(output)))"


def tab(page: Page) -> Any:
    """Return the part of the tab with the loaders. Open the tab if it is closed."""
    if page.locator(".pp-panel").count() == 0:
        page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")
    return page.locator(".pp-on-loaders")
