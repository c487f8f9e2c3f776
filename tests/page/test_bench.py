"""The tab's benchmark in a running ComfyUI: its jobs are prompts, and leave nothing but their record."""

from __future__ import annotations

import time
from typing import Any

import pytest
import requests
from playwright.sync_api import Page, expect

from parallel_backend.bench.graphs import FOLDER
from parallel_backend.bench.record import STOCK, decoded
from scripts.comfyui import ComfyUI, Graph
from tests.support.graphs.flux import ksampler_graph, parallel
from tests.support.page.browser import POLLING
from tests.support.page.outcomes import idle
from tests.support.selection import thorough
from tests.support.sentences import known

TOLERANCE = 1e-5
PATIENCE = 600


def begin(server: ComfyUI, **asked: Any) -> requests.Response:
    return requests.post(f"{server.url}/parallel/bench", json=asked, timeout=60)


def begin_when_idle(server: ComfyUI, **asked: Any) -> requests.Response:
    """Ask for a benchmark until no run of an earlier test is active in this ComfyUI, and return the answer."""
    until = time.monotonic() + PATIENCE
    while "a run is going on" in (answer := begin(server, **asked)).text:
        assert time.monotonic() < until, server.get("/parallel/status")
        time.sleep(0.2)
    return answer


def status(server: ComfyUI) -> Any:
    return server.get("/parallel/status")["bench"]


def job(seed: int, steps: int = 4) -> Graph:
    """Return a graph with this pack's loader, and a latent of its own that it saves."""
    return parallel(ksampler_graph("narrow-schnell", width=64, height=64, steps=steps, seed=seed), "cpu:2")


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        ({"1": {"class_type": "KSampler"}}, "the body is not a graph in ComfyUI's API format: send one."),
        (
            {**job(1), "model": {"class_type": "UNETLoader", "inputs": {"unet_name": "none.safetensors"}}},
            "The graph's model cannot run on several GPUs: ",
        ),
    ],
)
def test_a_graph_that_cannot_be_measured_is_refused_before_any_work(comfyui: ComfyUI, graph: Graph, said: str) -> None:
    answer = begin_when_idle(comfyui, graph=graph, name="wrong")
    assert answer.status_code == 409
    assert said in answer.json()["said"]
    assert status(comfyui)["doing"] == ""


@thorough
def test_a_benchmark_runs_as_prompts_of_this_comfyui_and_leaves_only_its_record(comfyui: ComfyUI) -> None:
    before = sorted(comfyui.output_dir.rglob("*.latent"))
    history = set(comfyui.get("/history"))
    assert begin_when_idle(comfyui, graph=job(171), name="a job").status_code == 200
    assert begin(comfyui, graph=job(171)).status_code == 409
    queued, doing, until = set(), set(), time.monotonic() + PATIENCE
    while (bench := status(comfyui))["doing"]:
        doing.add(bench["doing"])
        queued |= {each[1] for jobs in comfyui.get("/queue").values() for each in jobs}
        assert time.monotonic() < until, bench
        time.sleep(0.05)
    assert (bench["said"], [side["name"] for side in bench["sides"]]) == ("", [STOCK, "cpu:1", "cpu:2"])
    assert len(queued) == 2 * len(bench["sides"])
    assert len(doing) > 4 and not [text for text in doing if not known(text, "sentences")]
    record = decoded((comfyui.output_dir / FOLDER / bench["file"]).read_bytes())
    assert (record.job.graph, record.job.files, record.job.size) == ("a job", ["narrow-schnell.safetensors"], "64x64")
    for side, shown in zip(record.sides, bench["sides"], strict=True):
        assert not side.failed and side.step == shown["step"] > 0
        assert shown["peak"] == side.peak["cpu"]
    assert all(side.error is not None and side.error <= TOLERANCE for side in record.sides[1:])
    assert record.sides[2].sent > 0 and record.links is not None
    assert bench["row"].startswith("| ") and "narrow-schnell.safetensors, 64x64, 4 steps" in bench["row"]
    assert sorted(comfyui.output_dir.rglob("*.latent")) == before
    assert set(comfyui.get("/history")) == history
    shown = requests.get(f"{comfyui.url}/view?filename={bench['file']}&subfolder={FOLDER}&type=output", timeout=60)
    assert decoded(shown.content) == record


@thorough
def test_a_prompt_of_the_user_ends_a_benchmark_and_keeps_its_results(comfyui: ComfyUI) -> None:
    assert begin_when_idle(comfyui, graph=job(172)).status_code == 200
    until = time.monotonic() + PATIENCE
    while not status(comfyui)["sides"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert comfyui.queue(job(173), timeout=PATIENCE).status == "success"
    bench = idle(comfyui)["bench"]
    assert bench["said"] == "ended early, because a run was queued."
    assert known(bench["said"], "sentences")
    assert bench["sides"][0]["name"] == STOCK and len(bench["sides"]) < 3
    assert (comfyui.output_dir / FOLDER / bench["file"]).is_file()


@thorough
def test_the_button_measures_the_open_workflow_and_comfyuis_cancel_ends_the_benchmark(
    page: Page, comfyui: ComfyUI
) -> None:
    page.evaluate("graph => app.loadApiJson(graph, 'mine')", job(174, steps=20))
    name = "app.extensionManager.workflow.activeWorkflow?.filename"
    page.wait_for_function(f"{name} === 'mine'", polling=POLLING)  # the workflow gets this name only after it is open
    page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")
    bench = page.locator(".pp-panel .pp-on-bench")
    button = bench.get_by_role("button", name="Measure this workflow", exact=True)
    expect(button).to_be_enabled()
    button.dispatch_event("click")
    expect(bench.locator(".pp-progress")).to_contain_text("stock ComfyUI", timeout=PATIENCE * 1000)
    expect(button).to_be_disabled()
    expect(bench.locator("tbody tr")).to_have_count(1, timeout=PATIENCE * 1000)
    expect(bench.locator(".pp-progress")).to_contain_text("cpu:1, first", timeout=PATIENCE * 1000)
    page.evaluate("app.extensionManager.command.execute('Comfy.Interrupt')")
    expect(bench.locator(".pp-note").first).to_have_text("ended early, because it was cancelled.", timeout=60_000)
    expect(bench.locator("tbody tr")).to_have_count(1)
    expect(button).to_be_enabled()
    assert page.locator(".pp-panel").evaluate("panel => panel.scrollWidth - panel.clientWidth") == 0
    page.context.grant_permissions(["clipboard-read"])
    bench.get_by_role("button", name="Copy the row", exact=True).click()
    row = page.evaluate("navigator.clipboard.readText()")
    assert row == status(comfyui)["row"] and "narrow-schnell.safetensors, 64x64, 20 steps" in row
    with page.expect_download() as download:
        bench.locator("a").dispatch_event("click")
    assert decoded(download.value.path().read_bytes()).job.graph == "mine"
