"""The doctor through ComfyUI."""

from __future__ import annotations

import requests
import torch

from scripts.comfyui import ComfyUI


def test_the_route_answers_with_the_findings(comfyui: ComfyUI):
    answer = requests.get(f"{comfyui.url}/parallel/doctor", timeout=300)
    assert answer.status_code == 200
    findings = {finding["name"]: finding for finding in answer.json()}
    assert findings["torch"]["text"].startswith(torch.__version__.split("+")[0])
    assert findings["2 workers, cpu"]["status"] == "ok"
    assert "all-to-all through gloo" in findings["2 workers, cpu"]["text"]
