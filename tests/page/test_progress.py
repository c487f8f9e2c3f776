"""Reports of a run: a line on the node while it runs, its outcome, and the outcome in ComfyUI's history."""

from __future__ import annotations

import re

import pytest

from parallel_backend.host.runs.outcome import moment
from scripts.comfyui import ComfyUI, QueuedRun
from tests.support.graphs.flux import Graph, insert_after_model, ksampler_graph, node, parallel
from tests.support.page.outcomes import outcome
from tests.support.server import NARROW
from tests.vae.comfy_vaes import save_image_vae

STEP = re.compile(r"Step (\d) of 4( · \d+\.\d\d s a step( · \d+ s left)?)?")


def job(seed: int, devices: str = "cpu:2", steps: int = 4) -> Graph:
    return parallel(ksampler_graph(NARROW, width=64, height=64, steps=steps, cfg=2.0, seed=seed), devices)


def told(run: QueuedRun, name: str) -> list[str]:
    return [each.text for each in run.texts if each.node == name]


@pytest.fixture(scope="module")
def runs(comfyui: ComfyUI) -> list[QueuedRun]:
    """Run the same job on one worker and then on two."""
    return [comfyui.queue(job(4110, devices), timeout=300).check() for devices in ("cpu:1", "cpu:2")]


def test_the_node_shows_its_workers_its_steps_and_the_outcome(comfyui: ComfyUI, runs: list[QueuedRun]) -> None:
    _, run = runs
    texts = told(run, "sampler")
    assert texts[:2] == ["Preparing", "Starting 2 workers, 0 s"]
    steps = [STEP.fullmatch(text)[1] for text in texts if text.startswith("Step")]  # type: ignore[index]
    assert steps == sorted(steps) and {steps[0], steps[-1]} == {"1", "4"}, "a line appears at most every half second"
    assert re.match(r"\d+\.\d s, \d+\.\d\d s a step on 2 workers \(cpu\): \w+ 2\.\n.+ one device.+\.\nPeak ", texts[-1])
    assert "s a step" in texts[-2] and "s left" not in texts[-2], "after the last step nothing is left"
    assert len(set(texts)) == len(texts), "nothing is said twice"
    assert {event.max for event in run.progress} == {4}, "the bar is for steps alone"
    assert outcome(comfyui, run, "sampler")["starting"] > 0, "counted apart"


def test_the_history_has_the_outcome_of_a_run(comfyui: ComfyUI, runs: list[QueuedRun]) -> None:
    """Check runs of KSampler. test_contents::test_sprites_template_runs_from_the_page checks a run of Parallel Sampler."""
    one, two = runs
    alone = outcome(comfyui, one, "sampler")
    assert (alone["gain"], alone["sent"]) == (None, 0)

    found = outcome(comfyui, two, "sampler")
    assert found["plan"].startswith("2 workers (cpu): ")
    assert found["steps"] == 4
    assert 0 < found["seconds_a_step"] < found["seconds"]
    assert found["peak"]["cpu"] > alone["peak"]["cpu"], "two workers on one device"
    assert found["sent"] > 0
    assert 0 <= found["waiting"] < 1
    assert found["gain_is"] == "measured", "the same job has run on one device"
    assert found["gain"] == pytest.approx(alone["seconds_a_step"] / found["seconds_a_step"])
    assert found["alone"] == alone["seconds_a_step"]
    messages = dict(comfyui.history(one.prompt_id)["status"]["messages"])
    begun, ended = (messages[name]["timestamp"] / 1e3 for name in ("execution_start", "execution_success"))
    assert begun < found["alone_at"] <= ended, "that of the run on one device"
    (gain,) = [line for line in told(two, "sampler")[-1].splitlines() if "as fast as" in line]
    said = r"([\d.]+)x as fast as one device: ([\d.]+) s a step in this run, ([\d.]+) s on one device"
    numbers = re.search(said, gain)
    assert numbers, gain
    factor, now, before = map(float, numbers.groups())
    assert factor == pytest.approx(before / now, rel=0.02), "both numbers are shown"
    assert gain.endswith(f"in the run of {moment(found['alone_at'])}.")
    assert found["why"] == "", "a reason by predicted times, which the CPU has none of"


def test_the_node_warns_of_a_slower_path(comfyui: ComfyUI) -> None:
    run = comfyui.queue(insert_after_model(job(4120), "Mahiro"), timeout=300).check()
    found = outcome(comfyui, run, "sampler")
    slower = [warning for warning in found["warnings"] if warning.startswith("Slower path")]
    assert slower, found
    assert "Choose a graph without it" in slower[0]
    assert f"⚠ {slower[0]}" in told(run, "sampler")[-1]
    assert found["sent"] > 0, "of all its model calls"


def test_a_run_of_fast_steps_shows_two_lines_a_second_and_a_cancelled_run_its_last_step(comfyui: ComfyUI) -> None:
    """A page that draws a line for each fast step falls behind, and then handles Cancel seconds later."""
    graph = job(4130, steps=1000)
    run = comfyui.queue(graph, on_progress=lambda step: step.value == 40 and comfyui.interrupt(), timeout=300)
    assert run.status == "interrupted"
    assert re.fullmatch(r"Cancelled after \d+ of 1000", run.texts[-1].text)
    lines = [text for text in run.texts if text.text.startswith("Step ")]
    seconds = run.progress[-1].time - run.progress[0].time
    assert 1 <= len(lines) <= 2 + seconds / 0.5, (len(lines), seconds)
    left = r"Step \d+ of 1000 · \d+\.\d\d s a step · \d+ (s|min) left"
    assert all(re.fullmatch(left, line.text) for line in lines[1:]), lines


def test_a_decoder_and_an_encoder_show_their_progress(comfyui: ComfyUI) -> None:
    save_image_vae(comfyui.base_dir / "models" / "vae" / "told.safetensors")
    graph = {
        "image": node("EmptyImage", width=32, height=32, batch_size=2, color=255),
        "plan": node("ParallelPlan", devices="cpu:2"),
        "vae": node("LoadParallelVAE", vae_name="told.safetensors", plan=["plan", 0]),
        "latent": node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
        "pixels": node("VAEDecode", samples=["latent", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["pixels", 0], filename_prefix="told"),
    }
    run = comfyui.queue(graph, timeout=300).check()
    assert told(run, "latent")[0] == "Encoding"
    assert told(run, "pixels")[0] == "Decoding"
    assert "Decoding 2 of 2" in "\n".join(told(run, "pixels"))
    assert outcome(comfyui, run, "pixels")["plan"] == "2 workers (cpu): ring 2"


def test_a_refusal_in_the_middle_of_a_graph_appears_on_its_node(comfyui: ComfyUI) -> None:
    graph = job(4140)
    graph["plan"]["inputs"]["data"] = 2  # more than the batch, which the loader does not know
    run = comfyui.queue(graph, timeout=300)
    assert run.error is not None
    assert (run.error.exception_type, run.error.node_id) == ("PlanRefused", "sampler")
    assert told(run, "sampler")[-1] == f"Failed: {run.error.exception_message}"
