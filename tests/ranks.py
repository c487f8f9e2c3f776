"""Real ranks for tests, as the pack forks them to prove a model."""

from __future__ import annotations

from parallel_backend.models.comfyui.proof.ranks import run_in_turn, run_ranks

__all__ = ["run_in_turn", "run_ranks"]
