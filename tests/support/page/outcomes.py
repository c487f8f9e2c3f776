"""Reads the outcome of a run that a node shows."""

from __future__ import annotations

from typing import Any

from scripts.comfyui import ComfyUI, QueuedRun


def outcome(server: ComfyUI, run: QueuedRun, name: str) -> dict[str, Any]:
    _, _, _, extra_data, *_ = server.history(run.prompt_id)["prompt"]
    found: dict[str, Any] = extra_data["parallel"][name]
    return found
