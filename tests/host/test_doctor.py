"""The doctor's route in ComfyUI."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import requests
import torch

from scripts.comfyui import ComfyUI


def ask(comfyui: ComfyUI, name: str) -> requests.Response:
    """Request the doctor with this name in the Host header."""
    host = f"{name}:{urlsplit(comfyui.url).port}"
    return requests.get(f"{comfyui.url}/parallel/doctor", headers={"Host": host}, timeout=300)


def test_simultaneous_requests_get_the_findings_of_one_doctor_run(comfyui: ComfyUI):
    names = ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", socket.gethostname()]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(comfyui, name), names))
    assert [answer.status_code for answer in answers] == [200] * len(names)
    assert len({answer.text for answer in answers}) == 1  # measured values differ from run to run
    findings = {finding["name"]: finding for finding in answers[0].json()}
    assert findings["torch"]["text"].startswith(torch.__version__.split("+")[0])
    assert findings["2 workers, cpu"]["status"] == "ok"
    assert "all-to-all through gloo" in findings["2 workers, cpu"]["text"]


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "256.1.1.1"])
def test_a_page_whose_own_name_resolves_to_this_machine_is_refused(comfyui: ComfyUI, name: str):
    answer = ask(comfyui, name)
    assert answer.status_code == 403
    assert answer.text.startswith(f"'{name}:")
