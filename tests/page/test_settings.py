"""Settings > Parallel: the devices of loaders without a Parallel Plan, in the page and in queued, saved and exported graphs."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from playwright.sync_api import Page, Route, expect

from parallel_backend.host.runs.outcome import amount
from scripts.comfyui import ComfyUI
from tests.refusals.of_flux import small
from tests.support.graphs.flux import Graph, node, parallel, unplanned
from tests.support.page.browser import POLLING, SET, dismiss, open_graph
from tests.support.page.contents import BADGES, SHOWN, SPRITES
from tests.support.page.swapping import PROMPT, STATE, TRACKER, tab
from tests.support.selection import thorough

pytestmark = thorough

DEVICES, PRESET = "Parallel.Devices", "Parallel.Preset"
USUAL = {DEVICES: "auto", PRESET: "automatic"}


def plan_of(comfyui: ComfyUI, graph: Graph) -> str:
    """Return the plan on which a graph's sampler ran."""
    run = comfyui.queue(graph, timeout=300).check()
    told: str = comfyui.history(run.prompt_id)["prompt"][3]["parallel"]["sampler"]["plan"]
    return told


def test_a_loader_without_a_plan_runs_on_the_settings_devices_and_a_plan_overrides_them(comfyui: ComfyUI) -> None:
    graph = unplanned(small(steps=1), devices="cpu:2", preset="smallest memory")
    assert re.fullmatch(r"2 workers \(cpu\): .+, weights streamed", plan_of(comfyui, graph))
    again = comfyui.queue(graph, timeout=300).check()
    assert "model" in again.cached
    graph["model"]["inputs"]["devices"] = "cpu:1"
    other = comfyui.queue(graph, timeout=300).check()
    assert "model" not in other.cached, "another setting is another MODEL"
    graph["plan"] = node("ParallelPlan", devices="cpu:2")
    graph["model"]["inputs"]["plan"] = ["plan", 0]
    assert re.fullmatch(r"2 workers \(cpu\): \w+ 2", plan_of(comfyui, graph))


@pytest.fixture(autouse=True)
def _usual(page: Page) -> Iterator[None]:
    """Restore the usual settings after each test, so that a test that fails changes no other."""
    yield
    for name, value in USUAL.items():
        page.evaluate(SET, [name, value])


@pytest.fixture
def chosen(page: Page) -> None:
    """Set two workers on the CPU and the smallest memory."""
    for name, value in {DEVICES: "cpu:2", PRESET: "smallest memory"}.items():
        page.evaluate(SET, [name, value])


def without_plan(page: Page) -> None:
    """Open the sprites' template and remove its plan."""
    open_graph(page, SPRITES)
    page.evaluate("app.graph.remove(app.graph.nodes.find(n => n.type === 'ParallelPlan'))")


def loader_in(prompt: Graph) -> dict[str, Any]:
    (found,) = [each["inputs"] for each in prompt.values() if each["class_type"].startswith("LoadParallel")]
    return found  # type: ignore[no-any-return]


@pytest.mark.usefixtures("chosen")
def test_graphs_without_a_plan_are_queued_exported_and_saved_with_the_settings(page: Page) -> None:
    open_graph(page, SPRITES)
    assert not {"devices", "preset"} & loader_in(page.evaluate(PROMPT)).keys(), "the plan counts"
    assert "parallel" not in page.evaluate(STATE)["extra"]
    without_plan(page)
    prompt, saved = page.evaluate(PROMPT), page.evaluate(STATE)
    now = {"devices": "cpu:2", "preset": "smallest memory"}
    assert loader_in(prompt).items() >= now.items()
    assert saved["extra"]["parallel"] == now
    (kept,) = [each["widgets_values"] for each in saved["nodes"] if each["type"].startswith("LoadParallel")]
    assert len(kept) == 2, "they are not the node's"
    for name, value in USUAL.items():
        page.evaluate(SET, [name, value])
    page.evaluate("state => app.loadGraphData(state, true, true, 'saved')", saved)
    assert not {"devices", "preset"} & loader_in(page.evaluate(PROMPT)).keys(), "what is set now counts"
    assert "parallel" not in page.evaluate(STATE)["extra"]


def test_no_renderer_shows_the_settings_on_the_loader(page: Page) -> None:
    open_graph(page, SPRITES)
    loader = "app.graph.nodes.find(n => n.type.startsWith('LoadParallel'))"
    assert page.evaluate(f"{loader}.inputs.map(i => i.name)") == ["plan", "unet_name", "weight_dtype"]
    assert page.evaluate(f"{loader}.widgets.filter(w => !w.hidden).map(w => w.name)") == ["unet_name", "weight_dtype"]
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", True])
    drawn = page.locator(f'[data-node-id="{page.evaluate(f"{loader}.id")}"]')
    expect(drawn).to_contain_text("weight_dtype")
    expect(drawn).not_to_contain_text("preset")
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])


GPU = {"name": "NVIDIA GeForce RTX 4090", "total": 24e9, "free": 20e9, "load": 97, "temperature": 71}
GPUS = [GPU | {"device": f"cuda:{index}"} for index in range(3)]


@pytest.fixture
def three_gpus(page: Page) -> Iterator[None]:
    """Replace the server's status in the page by that of a machine with three GPUs."""

    def answer(route: Route) -> None:
        status = route.fetch().json() if not told else told[0]
        told[:] = [status]
        cpu = [each for each in status["memory"] if each["device"] == "cpu"]
        route.fulfill(json={**status, "memory": [*GPUS, *cpu]})

    told: list[dict[str, Any]] = []
    page.evaluate("""() => {
        window.toldAt = Date.now();
        window.toldOf ??= app.api.addEventListener("parallel.status", () => { window.toldAt = Date.now(); }) ?? true;
    }""")
    page.route("**/parallel/status", answer)
    quiet = "Date.now() - window.toldAt > 10_000"  # the server sends its status for a minute after the last request
    page.wait_for_function(quiet, timeout=150_000, polling=POLLING)
    yield
    page.unroute("**/parallel/status")


@pytest.mark.usefixtures("three_gpus")
def test_the_tabs_ticks_set_the_devices_and_a_strip_shows_the_gpus_during_a_run(page: Page) -> None:
    without_plan(page)
    tab(page)
    memory = page.locator(".pp-on-memory")
    ticks = memory.get_by_role("checkbox")
    expect(ticks).to_have_count(3)
    expect(memory).to_contain_text("faster together (auto)")
    for number, devices, disabled in ((1, "0,2", []), (0, "2", [2]), (1, "1,2", []), (0, "auto", [])):
        ticks.nth(number).dispatch_event("click")
        page.wait_for_function(f"app.extensionManager.setting.get({DEVICES!r}) === {devices!r}", polling=POLLING)
        expect(memory).to_contain_text("(auto)" if devices == "auto" else f"devices {devices} ")
        assert [index for index in range(3) if ticks.nth(index).is_disabled()] == disabled
        assert loader_in(page.evaluate(PROMPT)).get("devices", "auto") == devices
    page.evaluate(SET, [DEVICES, "cpu:2"])
    expect(memory).to_contain_text("a loader uses devices cpu:2")
    assert [ticks.nth(index).is_checked() for index in range(3)] == [False] * 3
    page.evaluate(SET, [DEVICES, "auto"])
    tell = "name => app.api.dispatchEvent(new CustomEvent(name, {detail: {prompt_id: ''}}))"
    strip = page.locator(".pp-strip")
    for wanted in (True, False):
        page.evaluate(SET, ["Parallel.Strip", wanted])
        page.evaluate(tell, "execution_start")
        if wanted:
            texts = [f"cuda:{index} 97 % · 4.00 GB of 24.0 GB · 71 °C" for index in range(3)]
            expect(strip.locator(".pp-gpu")).to_have_text(texts)
            page.evaluate(tell, "execution_success")
        expect(strip).to_have_count(0)
    page.evaluate(tell, "execution_success")
    page.evaluate(SET, ["Parallel.Strip", True])


def test_the_loader_shows_the_expected_gain_and_memory_before_a_run(page: Page) -> None:
    open_graph(page, SPRITES)
    line = r"^2 workers: \d+\.\d MB each"
    page.wait_for_function(SHOWN, arg=[BADGES, line], polling=POLLING)
    tab(page)
    expect(page.locator(".pp-on-loaders")).to_contain_text(
        re.compile(r"Load Parallel FLUX, sprites-flux-schnell: 2 workers: ")
    )
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", True])
    drawn = page.locator(
        f'[data-node-id="{page.evaluate("app.graph.nodes.find(n => n.type.startsWith(`LoadParallel`)).id")}"]'
    )
    expect(drawn).to_contain_text("MB each")
    page.evaluate(SET, ["Comfy.VueNodes.Enabled", False])
    page.evaluate(
        "app.graph.nodes.find(n => n.type === 'ParallelPlan').widgets.find(w => w.name === 'devices').value = '7'"
    )
    page.evaluate(f"{TRACKER}.captureCanvasState()")
    page.wait_for_function(SHOWN, arg=[BADGES, "This plan cannot run"], polling=POLLING)
    expect(page.locator(".pp-on-loaders")).to_contain_text("asks for GPU 7")
    page.evaluate("app.loadGraphData({nodes: [], links: [], version: 0.4}, true, true, 'empty')")
    expect(page.locator(".pp-on-loaders")).not_to_contain_text("asks for GPU 7")


def test_the_loader_says_that_a_run_starts_workers_until_they_have_started(page: Page) -> None:
    open_graph(page, SPRITES)
    page.evaluate(
        "app.graph.nodes.find(n => n.type === 'ParallelPlan').widgets.find(w => w.name === 'devices').value = 'cpu:3'"
    )
    page.evaluate(f"{TRACKER}.captureCanvasState()")
    line = r"^3 workers: \d+\.\d MB each"
    page.wait_for_function(SHOWN, arg=[BADGES, f"{line}; workers not started$"], polling=POLLING)
    tab(page)
    expect(page.locator(".pp-on-loaders")).to_contain_text(re.compile(f"{line[1:]}; the first run starts workers"))
    page.get_by_test_id("queue-button").click()
    page.wait_for_function(SHOWN, arg=[BADGES, f"{line}$"], timeout=300_000, polling=POLLING)
    expect(page.locator(".pp-on-loaders")).not_to_contain_text("starts workers")


def test_the_expectation_before_a_run_equals_the_runs_prediction(comfyui: ComfyUI) -> None:
    """No similar job has run before. Without known prompts, the expectation is that of longer ones.

    The memory stands for the whole job, because no times are predicted on the CPU.
    """
    measuring, graph = (parallel(small(width=size, height=size)) for size in (64, 208))
    comfyui.queue(measuring, timeout=300).check()
    asked = {
        "kind": "LoadParallelFlux",
        "file": graph["model"]["inputs"]["unet_name"],
        "plan": {"devices": "cpu:2"},
        "width": 208,
        "height": 208,
        "steps": 2,
        "two_sided": True,
    }
    prompts = [graph[side]["inputs"]["conditioning"] for side in ("positive", "negative")]

    def said(**more: object) -> str:
        answer = requests.post(f"{comfyui.url}/parallel/expectation", json=asked | more, timeout=60)
        return str(answer.json()["sign"])

    exact, longer = said(prompts=prompts), said()
    comfyui.queue(graph, timeout=300).check()
    alternatives = comfyui.get("/parallel/run")["decision"]["alternatives"]
    (memory,) = [each["memory"] for each in alternatives if each["chosen"]]
    assert exact == f"2 workers: {amount(memory)} each"
    (need,) = re.findall(r"^2 workers: ([\d.]+) MB each$", longer)
    assert float(need) > memory / 1e6


def test_a_device_that_is_gone_gives_one_sentence_and_a_link(page: Page) -> None:
    dismiss(page)
    without_plan(page)
    before = page.evaluate(PROMPT)
    page.evaluate(SET, [DEVICES, "5"])
    page.get_by_test_id("queue-button").click()
    expect(page.locator(".p-toast-detail")).to_contain_text("devices are those of Settings > Parallel.")
    link = page.locator(".p-toast-detail a")
    expect(link).to_have_text("What to do")
    address, _, entry = (link.get_attribute("href") or "").partition("#")
    answer = page.request.get(address)
    assert answer.ok
    (item,) = re.findall(rf'<li id="{entry}">(.*?)</li>', answer.text(), re.DOTALL)
    assert "devices are those of Settings" in html.unescape(item)
    dismiss(page)
    page.evaluate(SET, [DEVICES, "auto"])
    assert page.evaluate(PROMPT) == before
