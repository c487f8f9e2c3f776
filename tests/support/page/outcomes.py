"""The outcome of a run that a node shows, and the status that the tab shows."""

from __future__ import annotations

import time
from typing import Any

from scripts.comfyui import ComfyUI, QueuedRun


def outcome(server: ComfyUI, run: QueuedRun, name: str) -> dict[str, Any]:
    _, _, _, extra_data, *_ = server.history(run.prompt_id)["prompt"]
    found: dict[str, Any] = extra_data["parallel"][name]
    return found


def idle(server: ComfyUI) -> dict[str, Any]:
    """Wait until no benchmark, comparison or doctor runs, and return the status."""
    until = time.monotonic() + 600
    while any((status := server.get("/parallel/status"))[name]["doing"] for name in ("bench", "comparison", "doctor")):
        assert time.monotonic() < until, status
        time.sleep(0.1)
    return dict(status)
