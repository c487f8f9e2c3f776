"""The sidebar tab in ComfyUI's own page, in a real browser, at the size of a small screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from parallel_backend.models.comfyui.small.kinds import KINDS
from parallel_backend.worker.process.environment import FAULT_FILE
from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import ksampler_graph, parallel
from tests.support.page.browser import open_graph
from tests.support.page.contents import SPRITES
from tests.support.page.contrasts import CONTRASTS, LEGIBLE, VISIBLE
from tests.support.page.swapping import STATE
from tests.support.selection import thorough

WORKERS = 4
SMALL = {"width": 1280, "height": 720}


@pytest.fixture(scope="module")
def panel(page: Page) -> Locator:
    """Open the tab and provide its panel."""
    page.set_viewport_size(SMALL)
    page.evaluate("app.extensionManager.command.execute('Workspace.ToggleSidebarTab.parallel')")
    return page.locator(".pp-panel")


def section(panel: Locator, name: str) -> Locator:
    return panel.locator(f".pp-on-{name}")


def press(panel: Locator, name: str) -> None:
    """Press a button of the panel once it is enabled; the panel may be redrawn at any time."""
    thing = panel.get_by_role("button", name=name, exact=True)
    expect(thing).to_be_enabled()
    thing.dispatch_event("click")


def test_the_panel_shows_a_run_while_it_is_active_and_afterwards(panel: Locator, comfyui: ComfyUI) -> None:
    graph = parallel(ksampler_graph("tiny-schnell", width=256, height=256, steps=30, seed=161), f"cpu:{WORKERS}")
    prompt = comfyui.submit(graph)
    workers = section(panel, "workers")
    sampling = workers.locator(".pp-worker", has_text=re.compile(r"sampling, step \d"))
    expect(sampling).to_have_count(WORKERS, timeout=180_000)  # after the workers have started
    for name in ("Free memory", "Stop workers", "Check this machine", "Prove models"):
        expect(panel.get_by_role("button", name=name, exact=True)).to_be_disabled()
    comfyui.wait(prompt).check()
    run = section(panel, "last-run")
    expect(run).to_contain_text(f"{WORKERS} workers (cpu)")
    expect(run).to_contain_text("for 30 steps")
    rows = run.locator("svg.pp-row")
    expect(rows).to_have_count(WORKERS)
    for row in rows.all():
        expect(row).to_have_attribute("aria-label", re.compile(r"on cpu: .*computing .*waiting "))
        assert len(row.locator(".pp-computing").get_attribute("d") or "") > 100
    expect(section(panel, "plans")).to_contain_text("No times are predicted for this plan")
    expect(panel).not_to_contain_text(re.compile(r"s predicted"))
    expect(workers.locator(".pp-models", has_text="tiny-schnell.safetensors")).to_have_count(WORKERS)


def test_predicted_times_are_shown_on_gpus_alone(page: Page, panel: Locator, comfyui: ComfyUI) -> None:
    """The page receives a run on the CPU as if it had been on GPUs."""

    def answer(route: Route) -> None:
        run = route.fetch().json()
        for rank in run["ranks"]:
            rank["device"] = f"cuda:{rank['rank']}"
        route.fulfill(json=run)

    plans, last = section(panel, "plans"), section(panel, "last-run")
    for seed, shown in ((164, 1), (170, 0)):
        if shown:
            page.route("**/parallel/run", answer)
        graph = parallel(ksampler_graph("tiny-schnell", steps=3 + shown, seed=seed), "cpu:2")
        comfyui.queue(graph, timeout=300).check()
        expect(last).to_contain_text(f"for {3 + shown} steps")
        expect(plans.locator("tr.pp-chosen")).to_have_count(shown)
        expect(last.get_by_text(re.compile(r"s predicted"))).to_have_count(shown)
        page.unroute("**/parallel/run")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_texts_are_readable_in_both_themes(page: Page, panel: Locator, theme: str) -> None:
    expect(section(panel, "last-run").locator("svg.pp-row").first).to_be_visible()
    set_palette = "name => app.extensionManager.setting.set('Comfy.ColorPalette', name)"
    page.evaluate(set_palette, theme)
    expect(page.locator("html.dark-theme, body.dark-theme")).to_have_count(int(theme == "dark"))
    found = panel.evaluate(CONTRASTS)
    assert len(found) > 40
    least = {what: VISIBLE if what.startswith("pp-") else LEGIBLE for what, _ in found}
    hidden = {what: round(contrast, 1) for what, contrast in found if contrast < least[what]}
    page.evaluate(set_palette, "dark")
    assert hidden == {}
    assert panel.evaluate("panel => panel.scrollWidth - panel.clientWidth") == 0, "no content is wider than the panel"


@thorough
def test_a_run_of_16_ranks_fits_in_half_a_small_screen(panel: Locator, comfyui: ComfyUI) -> None:
    graph = parallel(ksampler_graph("tiny-schnell", width=256, height=256, steps=6, seed=165), "cpu:16")
    comfyui.queue(graph, timeout=500).check()
    rows = section(panel, "last-run").locator("svg.pp-row")
    expect(rows).to_have_count(16)
    top, bottom = rows.first.bounding_box(), rows.last.bounding_box()
    assert top and bottom
    assert bottom["y"] + bottom["height"] - top["y"] < 300, "half of a small screen"
    assert all(len(row.locator(".pp-computing").get_attribute("d") or "") > 20 for row in rows.all())
    assert panel.evaluate("panel => panel.scrollWidth - panel.clientWidth") == 0


def test_buttons_free_the_memory_and_stop_the_workers(panel: Locator) -> None:
    workers = section(panel, "workers")
    press(panel, "Free memory")
    expect(workers.locator(".pp-models", has_text=re.compile("^tiny"))).to_have_count(0)
    press(panel, "Stop workers")
    expect(workers).to_contain_text("No workers are running")
    press(panel, "Measure again")
    expect(section(panel, "plans")).to_contain_text("run a graph first")


# the quick run has the doctor's findings in ComfyUI in test_routes, and the panel's sentence of findings in web/panel.test.js
@thorough
def test_the_doctor_shows_its_progress_and_then_its_findings(panel: Locator) -> None:
    doctor = section(panel, "doctor")
    press(panel, "Check this machine")
    expect(doctor.locator(".pp-progress")).to_contain_text("2 workers on cpu")
    expect(doctor.locator(".pp-progress")).to_have_count(0, timeout=120_000)  # earlier findings stay visible until then
    expect(doctor.locator(".pp-finding", has_text="2 workers, cpu")).to_contain_text("all-to-all")
    remedies = doctor.locator(".pp-warning-line")
    assert remedies.count() == remedies.locator(".pp-remedy").count()


@thorough
def test_a_button_proves_all_declared_models(panel: Locator) -> None:
    """The button proves all declared models, which takes minutes."""
    doctor = section(panel, "doctor")
    press(panel, "Prove models")
    expect(doctor.locator(".pp-progress")).to_contain_text(f"of {len(KINDS)}")
    expect(panel.get_by_role("button", name="Check this machine", exact=True)).to_be_disabled()
    expect(doctor.locator(".pp-progress")).to_have_count(0, timeout=3_600_000)
    expect(doctor.locator(".pp-finding")).to_have_count(len(KINDS))
    expect(doctor.locator(".pp-ok-line")).to_have_count(len(KINDS))
    expect(doctor.locator(".pp-finding", has_text="WAN21_T2V")).to_contain_text("2 inputs")


def test_the_last_run_is_the_cancelled_one(panel: Locator, comfyui: ComfyUI) -> None:
    """No failure of an earlier run is shown as the last run's, and no earlier result without its time."""
    comfyui.queue(parallel(ksampler_graph("tiny-schnell", seed=166), "cpu:2"), timeout=300).check()
    Path(comfyui.env[FAULT_FILE]).write_text("rank=1,phase=sampling,step=1,kind=raise")
    comfyui.queue(parallel(ksampler_graph("tiny-schnell", seed=167), "cpu:2"), timeout=300)
    failure, last = section(panel, "failure"), section(panel, "last-run")
    expect(failure).to_contain_text("The last run failed")
    expect(last.locator("p").first).to_have_text(re.compile(r"^Failed, at \d+:\d\d"))
    graph = parallel(ksampler_graph("tiny-schnell", steps=1000, seed=168), "cpu:2")
    run = comfyui.queue(graph, on_progress=lambda step: step.value == 3 and comfyui.interrupt(), timeout=300)
    assert run.status == "interrupted"
    expect(last.locator("p").first).to_have_text(re.compile(r"^Cancelled after \d+ of 1000, at \d+:\d\d"))
    expect(panel.get_by_role("button", name="Measure again")).to_be_enabled()  # the run has ended
    expect(failure).to_be_hidden()
    expect(last.locator("p").nth(1)).to_have_text(re.compile(r"^The last run with a result ended at \d+:\d\d"))
    comfyui.queue(parallel(ksampler_graph("tiny-schnell", steps=5, seed=169), "cpu:2"), timeout=300).check()
    expect(last.locator("p").first).to_contain_text("tiny-schnell.safetensors, sampling")
    expect(last).to_contain_text("for 5 steps")


def test_sections_about_a_run_of_another_workflow_say_so(page: Page, panel: Locator) -> None:
    """The page queues the demo; then another workflow opens, and the demo again."""
    note = "This run was of another workflow than the open one."
    last, plans = section(panel, "last-run"), section(panel, "plans")
    open_graph(page, SPRITES)
    page.get_by_test_id("queue-button").click()
    expect(last).to_contain_text("sprites-flux-schnell.safetensors", timeout=180_000)
    demo = page.evaluate(STATE)
    for state, count in (({"nodes": [], "links": [], "version": 0.4}, 1), (demo, 0)):
        page.evaluate("state => app.loadGraphData(state, true, true, 'another')", state)
        for about in (last, plans):
            expect(about.get_by_text(note)).to_have_count(count)


# the quick run shows a worker's death in test_contents::test_the_screen_shows_the_sentence_of_a_workers_failure
@thorough
def test_after_a_workers_death_the_doctor_is_offered_until_a_run_succeeds(panel: Locator, comfyui: ComfyUI) -> None:
    failure = section(panel, "failure")
    prompt = comfyui.submit(parallel(ksampler_graph("tiny-schnell", steps=1000, seed=162), "cpu:2"))
    expect(panel.locator(".pp-doing", has_text="sampling")).to_have_count(2, timeout=180_000)
    newest = max(comfyui.children(), key=lambda process: process.create_time())
    newest.kill()
    assert comfyui.wait(prompt).status == "error"
    expect(failure).to_contain_text("was killed by SIGKILL")
    expect(failure.get_by_role("button", name="Check this machine")).to_be_enabled()
    comfyui.queue(parallel(ksampler_graph("tiny-schnell", seed=163), "cpu:2")).check()
    expect(failure).to_be_hidden()


def test_the_panel_reports_a_server_that_is_gone_and_recovers_when_it_is_back(page: Page, panel: Locator) -> None:
    page.context.set_offline(True)
    page.evaluate("app.api.dispatchEvent(new CustomEvent('reconnecting'))")
    expect(section(panel, "problem")).to_contain_text("does not answer")
    page.context.set_offline(False)
    expect(section(panel, "problem")).to_be_hidden()
