"""The routes of the sidebar tab: the workers' state, the last run, and actions."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from scripts.comfyui import ComfyUI
from tests.support.graphs.flux import Graph, ksampler_graph, parallel, step_by_step
from tests.support.page.outcomes import idle
from tests.support.server import NARROW, NARROW_DEV

READ = ("status", "run")
ACTIONS = ("free", "stop", "measure", "doctor", "models", "compare", "bench")
WORKERS = 2
PROMISE = 1.0
"""Largest number of seconds until a route answers while a job runs."""


def job(seed: int, steps: int = 4, *, model: str = NARROW, devices: str = f"cpu:{WORKERS}") -> Graph:
    return parallel(ksampler_graph(model, width=64, height=64, steps=steps, seed=seed), devices)


def get(server: ComfyUI, name: str) -> Any:
    return server.get(f"/parallel/{name}")


def post(server: ComfyUI, name: str, body: object = None, **headers: str) -> requests.Response:
    return requests.post(f"{server.url}/parallel/{name}", json=body, headers=headers, timeout=60)


def test_the_last_run_has_its_plan_its_alternatives_and_a_timeline_of_every_rank(comfyui: ComfyUI) -> None:
    steps = 6
    comfyui.queue(job(151, steps)).check()
    run = get(comfyui, "run")
    assert (run["kind"], run["model"], run["steps"]) == ("sampling", f"{NARROW}.safetensors", steps)
    assert run["plan"].startswith(f"{WORKERS} workers")
    decision = run["decision"]
    (chosen,) = [each for each in decision["alternatives"] if each["chosen"]]
    assert chosen["plan"] in run["plan"]
    assert len(decision["alternatives"]) > 1
    assert all(each["seconds"] > 0 and each["memory"] > 0 for each in (*decision["alternatives"], decision["single"]))
    assert decision["single"]["devices"] == 1
    assert [rank["rank"] for rank in run["ranks"]] == list(range(WORKERS))
    timeline = run["timeline"]
    assert len(timeline["steps"]) == steps
    for rank, cost in zip(timeline["ranks"], run["ranks"], strict=True):
        phases = dict(rank["phases"])
        assert "sampling" in phases
        assert len(rank["waiting"]) == len(rank["sending"]) == timeline["bins"]
        assert all(a + b <= 1000 + 2 for a, b in zip(rank["waiting"], rank["sending"], strict=True))
        away = sum(rank["waiting"] + rank["sending"]) / 1000 * timeline["width"]
        assert away >= 0.9 * cost["waiting"] - timeline["width"]  # the rank also waits while it loads and connects
        assert cost["sent"]


def test_the_status_lists_the_models_of_every_rank_until_they_are_freed(comfyui: ComfyUI) -> None:
    comfyui.queue(job(152, 1, model=NARROW_DEV)).check()
    (group,) = [each for each in get(comfyui, "status")["workers"]["groups"] if len(each["ranks"]) == WORKERS]
    assert group["state"] == "ready"
    assert [rank["device"] for rank in group["ranks"]] == ["cpu"] * WORKERS
    for rank in group["ranks"]:
        assert f"{NARROW_DEV}.safetensors" in {held["model"] for held in rank["held"] if held["nbytes"]}
    assert post(comfyui, "free").status_code == 200
    groups = get(comfyui, "status")["workers"]["groups"]
    assert not [held for group in groups for rank in group["ranks"] for held in rank["held"]]
    assert post(comfyui, "measure").status_code == 200
    assert post(comfyui, "stop").status_code == 200
    assert get(comfyui, "status")["workers"]["groups"] == []
    answer = post(comfyui, "measure")
    assert (answer.status_code, "run a graph first" in answer.json()["said"]) == (409, True)
    assert comfyui.queue(job(153, 1, model=NARROW_DEV)).status == "success"


def test_a_step_by_step_run_is_reported_from_its_first_model_call_to_its_last(comfyui: ComfyUI) -> None:
    for seed in (157, 158):  # the second run is no part of the first
        comfyui.queue(step_by_step(job(seed, 6))).check()
        run = get(comfyui, "run")
        assert (run["kind"], run["steps"], run["calls"]) == ("model calls one at a time", 0, 6)
        timeline = run["timeline"]
        assert len(timeline["steps"]) == 6
        assert timeline["steps"] == sorted(timeline["steps"])
        for rank, cost in zip(timeline["ranks"], run["ranks"], strict=True):
            assert rank["seconds"] > timeline["steps"][-1]
            assert rank["seconds"] >= cost["seconds"] > 0
            assert len(rank["waiting"]) == timeline["bins"] <= 256


def test_routes_answer_while_a_job_runs_and_actions_are_refused_meanwhile(comfyui: ComfyUI) -> None:
    graph = parallel(ksampler_graph("tiny-schnell", width=256, height=256, steps=400, seed=154), "cpu:2")
    seen: list[tuple[str, float, Any]] = []

    def ask(progress: Any) -> None:
        if progress.value != 2:
            return
        for name in (*READ, *ACTIONS):
            started = time.perf_counter()
            answer = get(comfyui, name) if name in READ else post(comfyui, name)
            seen.append((name, time.perf_counter() - started, answer))
        comfyui.interrupt()

    comfyui.queue(graph, on_progress=ask, timeout=300)
    answers = {name: answer for name, _, answer in seen}
    assert {name: seconds for name, seconds, _ in seen if seconds > PROMISE} == {}
    (running,) = [group for group in answers["status"]["workers"]["groups"] if group["state"] == "running"]
    assert {rank["phase"] for rank in running["ranks"]} == {"sampling"}
    assert all(rank["step"] >= 1 for rank in running["ranks"])
    assert {name: answers[name].status_code for name in ACTIONS} == dict.fromkeys(ACTIONS, 409)
    busy = "the workers are busy: wait until they are done, or cancel the run."
    assert answers["free"].json()["said"] == busy


def test_the_last_denoise_is_timed_on_its_plan_and_on_one_device(comfyui: ComfyUI) -> None:
    """Request several timings at the same moment: only one begins, and it ends with the times of both."""

    def compared() -> Any:
        assert post(comfyui, "compare").status_code == 200
        return idle(comfyui)["comparison"]

    def said_of(name: str) -> str:
        body = {"graph": {"1": {"class_type": "KSampler", "inputs": {}}}} if name == "bench" else None
        return str(post(comfyui, name, body, **{"X-Together": "3"}).json()["said"])

    # the refused run comes first: the comparison leaves one worker, which the last run uses
    comfyui.queue(job(157, 1)).check()
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(said_of, ("compare", "bench", "compare")))
    assert sum("a run is going on: " in said for said in together) == 2, together
    idle(comfyui)
    assert "had one step" in compared()["said"]
    comfyui.queue(job(155, 8)).check()
    comparison = compared()
    result = comparison["result"]
    assert (comparison["said"], result["steps"], result["of"]) == ("", 6, 8)
    assert get(comfyui, "run")["plan"].endswith(result["plan"])
    assert min(result[name] for name in ("seconds", "alone")) > 0
    assert result["predicted"] == result["predicted_alone"] == 0, "on the CPU"
    assert get(comfyui, "run")["steps"] == 8  # the comparison does not replace the last run
    comfyui.queue(job(156, devices="cpu:1")).check()
    assert "on one device" in compared()["said"]
