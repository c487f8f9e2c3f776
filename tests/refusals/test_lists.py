"""Inputs that a parallel MODEL does not support are refused by name, in one sentence that ends with a remedy; none is ignored."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.comfyui import ComfyUI
from tests.refusals.lists import LISTS
from tests.refusals.of_flux import is_one_sentence, on_one_worker, small
from tests.refusals.wrong_sizes import wrong_sizes
from tests.support.graphs.flux import Graph, parallel, queue_logged, step_by_step
from tests.support.latents import relative_error, saved_latent
from tests.support.selection import thorough


@pytest.fixture(scope="module")
def assert_still_right(comfyui: ComfyUI) -> Callable[[], None]:
    """Provide a function that asserts that an ordinary prompt gives the right latent."""
    graph, turns = small(), itertools.count(1)
    expected = saved_latent(comfyui, comfyui.queue(graph).check())

    def check() -> None:
        # Without PipeFusion the number has no effect; a new one keeps ComfyUI from reusing the result of the run before.
        run = comfyui.queue(parallel(graph, warmup_steps=next(turns)), timeout=300).check()
        assert relative_error(saved_latent(comfyui, run), expected) <= 1e-5

    check()  # starts the workers of the graphs that are refused in the middle of a denoise
    return check


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("plans", dict),
        ("conditionings", dict),
        pytest.param("conditionings", step_by_step, marks=thorough),  # the case above has the same sentences
        ("latents", dict),
        ("nodes", dict),
        ("loras", dict),
        ("files", dict),
        ("stored", dict),
        ("families", dict),
        ("in the middle", dict),
        ("saved prompts", dict),
        ("sizes", dict),
    ],
)
def test_every_graph_of_a_list_is_refused_with_its_sentence_before_a_worker_starts(
    pytestconfig: pytest.Config,
    comfyui: ComfyUI,
    assert_still_right: Callable[[], None],
    name: str,
    way: Callable[[Graph], Graph],
) -> None:
    """Nothing is written, and the next prompt still works. The quick run checks it once a list.

    In faults/test_equal_errors the next request is right after each one that fails in the middle of a denoise.
    """
    wrong, count = [], 0
    for graph, sentence in LISTS[name](comfyui):
        before = files(comfyui)
        run, log = queue_logged(comfyui, way(graph))
        said = run.error.exception_message if run.error else run.status
        wrote, started = files(comfyui) != before, "Parallel: starting" in log
        if not re.match(sentence, said) or not is_one_sentence(said) or wrote or started:
            wrong.append((sentence, said, log))
        if pytestconfig.getoption("all"):
            assert_still_right()
        count += 1
    assert wrong == []
    assert count >= 4
    assert_still_right()


@thorough  # the case "sizes" above has their refusals
def test_comfyui_itself_fails_with_sizes_that_do_not_fit(comfyui: ComfyUI) -> None:
    runs = {name: comfyui.queue(graph, timeout=300).status for name, graph, _ in wrong_sizes(comfyui)}
    assert [name for name, status in runs.items() if status != "error"] == []


def files(server: ComfyUI) -> set[Path]:
    """Return the files that nodes have saved or may load."""
    return {*server.output_dir.rglob("*"), *server.input_dir.rglob("*")}


MISSING = "nowhere.safetensors"
DEGREES = ("data", "cfg", "pipefusion", "ulysses", "ring", "patches", "warmup_steps")


@pytest.mark.parametrize("named", [MISSING, *DEGREES])
def test_a_missing_file_and_a_negative_degree_are_rejected_before_anything_runs(comfyui: ComfyUI, named: str) -> None:
    negative: dict[str, int] = {named: -1}
    graph = on_one_worker(small("nowhere")) if named == MISSING else parallel(small(), "cpu:1", **negative)
    run = comfyui.queue(graph)
    assert run.error is not None
    assert run.status == "rejected"
    assert named in run.error.exception_message
