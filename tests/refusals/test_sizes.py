"""A latent whose size does not fit the model, or the inputs next to the latent, is refused before the workers get a request."""

from __future__ import annotations

import re

import pytest

from scripts.comfyui import ComfyUI
from tests.refusals.of_flux import assert_one_sentence
from tests.refusals.wrong_sizes import wrong_sizes
from tests.support.graphs.comfyui import graph_of, save_families, spread

SAME_SENTENCE = ("kandinsky, odd", "hunyuan, odd", "vace, larger", "vace, a picture")
"""Cases for --all, because others have the same sentence."""


def test_sizes_that_do_not_fit_are_refused_and_the_workers_stay(pytestconfig: pytest.Config, comfyui: ComfyUI) -> None:
    """ComfyUI itself fails with each of these sizes, which --all shows."""
    save_families(comfyui, "wan")
    comfyui.queue(spread(graph_of("wan", steps=1)), timeout=300).check()
    workers = pids(comfyui)
    assert len(workers) == 2
    said = {}
    for name, graph, expected in wrong_sizes(comfyui):
        if name in SAME_SENTENCE and not pytestconfig.getoption("all"):
            continue
        run = comfyui.queue(spread(graph, strict=False), timeout=300)
        message = run.error.exception_message if run.error else run.status
        if not re.match(expected, message) or pids(comfyui) != workers:
            said[name] = message
        elif run.error:
            assert_one_sentence(message)
        if pytestconfig.getoption("all"):
            assert comfyui.queue(graph, timeout=300).status == "error", f"ComfyUI can do it: {name}"
    assert said == {}


def pids(server: ComfyUI) -> set[int]:
    """Return the process ids of the workers."""
    return {child.pid for child in server.children() if child.name().startswith("parallel-rank")}
