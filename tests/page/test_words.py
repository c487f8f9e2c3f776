"""The pack's words in ComfyUI's languages: the server provides them, and the page shows them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, expect

from scripts.comfyui import REPO, ComfyUI
from tests.support.graphs.flux import ksampler_graph, parallel
from tests.support.page.browser import opened

LANGUAGES = ("en", "zh")


def words(language: str, file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPO / "locales" / language / file).read_text(encoding="utf-8"))
    return found


def in_english(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node in the form of locales/en, from ComfyUI's description of the node."""
    given = node["input"].get("required", {}) | node["input"].get("optional", {})
    outputs = zip(node["output_name"], node["output_tooltips"], strict=True)
    slots = {str(index): {"name": name, "tooltip": tooltip} for index, (name, tooltip) in enumerate(outputs)}
    return {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": {name: {"name": name, "tooltip": options["tooltip"]} for name, (_, options) in given.items()},
    } | ({"outputs": slots} if slots else {})


def test_the_english_words_equal_those_of_the_nodes(info: dict[str, dict[str, Any]]) -> None:
    assert words("en", "nodeDefs.json") == {name: in_english(node) for name, node in info.items()}


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_server_provides_the_words_of_each_language(comfyui: ComfyUI, language: str) -> None:
    found = comfyui.get("/i18n")[language]
    assert found["parallel"] == words(language, "main.json")["parallel"]
    assert found["nodeCategories"]["Parallel"] == words(language, "main.json")["nodeCategories"]["Parallel"]
    assert found["nodeDefs"].items() >= words(language, "nodeDefs.json").items()
    assert found["commands"].items() >= words(language, "commands.json").items()
    assert found["settings"].items() >= words(language, "settings.json").items()


def test_the_page_is_chinese_when_comfyui_is(chromium: Browser, comfyui: ComfyUI) -> None:
    """Nodes, the tab and the title of a refusal are Chinese; the refusal's sentence is the backend's own."""
    set_language(comfyui, "zh")
    try:
        with opened(chromium, comfyui) as page:
            assert page.evaluate("LiteGraph.createNode('ParallelPlan').title") == "并行方案"
            toggle = "app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')"
            page.evaluate(toggle)
            panel = page.locator(".pp-panel")
            for key in ("section.memory", "section.workers", "workers.stop", "doctor.check"):
                said = words("zh", "main.json")["parallel"]["texts"][key]
                expect(panel.get_by_text(said, exact=True)).to_be_visible()
            assert "Workers" not in panel.inner_text()
            refused = parallel(ksampler_graph("tiny-schnell", seed=7100), "cpu:2", ulysses=3)
            page.evaluate("output => app.api.queuePrompt(0, {output, workflow: {}})", refused)
            toast = page.locator(".p-toast-message")
            expect(toast).to_contain_text("这个方案无法运行")
            expect(toast).to_contain_text("3 workers were asked for (ulysses 3), but 2 devices are there")
    finally:
        set_language(comfyui, "en")


def set_language(comfyui: ComfyUI, code: str) -> None:
    """Set the language of all pages that open from now on."""
    requests.post(f"{comfyui.url}/settings/Comfy.Locale", json=code, timeout=60).raise_for_status()
