"""A dozen prompts of the soak (benchmarks/soak.py) with random models, sizes, texts, samplers and plans: none fails."""

from __future__ import annotations

import psutil
import requests

from benchmarks.soak import PROBE_EVERY, TOLERANCE, fill_families, held_by, shared_memory, soak
from tests.support.selection import thorough


@thorough
def test_random_prompts_give_pictures_and_leave_no_process_and_no_shared_memory(comfyui):
    fill_families(comfyui)
    report = soak(comfyui, prompts=12, seed=1, most_workers=2)
    assert report.failures == []
    assert len(report.probes) == 1 + 12 // PROBE_EVERY
    assert all(error <= TOLERANCE for error in report.probes)
    assert {held.processes for held in report.held} == {0}
    assert {held.shared for held in report.held} == {report.held[0].shared}
    assert requests.post(f"{comfyui.url}/parallel/stop", timeout=60).ok
    assert held_by(comfyui, workers=0).processes == 0
    left = [psutil.Process(comfyui.process.pid), *comfyui.children()]
    assert sum(shared_memory(process, waiting=True) for process in left) == report.held[0].shared
