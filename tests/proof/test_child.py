"""The child that proves: a process of its own with limits, which leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from parallel_backend.doctor.findings import FindingStatus
from parallel_backend.doctor.models import diagnose_models
from parallel_backend.host.proofs import COMMAND, Child, Prover
from parallel_backend.models.comfyui.proof.request import ProofRequest
from parallel_backend.models.comfyui.small.kinds import KINDS
from tests.support.selection import thorough

FOLDER = os.environ["COMFYUI_PATH"]
WAN = ProofRequest("WAN21_T2V", "wan, text")
PATIENCE = 600.0
"""Seconds for what the child does at low priority beside other tests."""


def children() -> set[int]:
    """Compared by `<=`: one that an earlier test is just ending may go meanwhile."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_class_and_one_that_is_not_there_are_answered_and_nothing_is_left() -> None:
    before = children()
    other = ProofRequest("WAN21_T2V", "wan, text", "comfy.ldm.wan.model.AnotherModel")
    gone = ProofRequest("NoSuchModel", "wan, text")
    answers = [*Prover(FOLDER, [WAN, other, gone], seconds=PATIENCE).answers()]
    right, unlike, missing = (watched.answer for watched in answers)
    assert right.failure == "" and right.worst[1] <= 1e-5
    assert 50 << 20 < answers[0].memory < 2 << 30
    assert unlike.failure == "this pack has no small comfy.ldm.wan.model.AnotherModel"
    assert missing.failure.startswith("AttributeError:")
    assert children() <= before


@pytest.mark.parametrize(
    ("limits", "failure"),
    [
        pytest.param({"seconds": 0.5}, "it took longer than 0 s", marks=thorough),
        ({"memory": 30 << 20}, "it took more than 0 GiB of memory"),
    ],
)
def test_a_child_over_a_limit_is_ended(limits: dict[str, float], failure: str) -> None:
    before = children()
    prover = Prover(FOLDER, [WAN, WAN], **({"seconds": PATIENCE} | limits))  # type: ignore[arg-type]
    (watched,) = prover.answers()
    assert watched.answer.failure == failure
    assert children() <= before


def test_a_child_that_fails_says_so() -> None:
    (watched,) = Prover("/no/such/folder", [WAN], seconds=PATIENCE).answers()
    assert watched.answer.failure == "its process ended with code 1"


def test_a_child_is_ended_when_it_is_no_longer_wanted() -> None:
    before = children()
    assert [*Prover(FOLDER, [WAN], seconds=PATIENCE).answers(lambda: True)] == []
    assert children() <= before


def test_a_pause_of_the_asker_costs_the_child_no_time() -> None:
    """The child answers after it; the limit is shorter than the pause."""
    child = Child(FOLDER, ["timeit", "-n", "1", "-r", "1", "-s", "import time", "time.sleep(5)"], 1, 3.5, 2 << 30)
    subprocess.Popen(["sh", "-c", 'sleep 0.3; kill -STOP "$0"; sleep 4; kill -CONT "$0"', str(os.getpid())])
    (line,) = child.lines()
    assert line.failure == ""
    assert b"sec per loop" in line.text


@thorough
def test_a_child_ends_with_whoever_asked_it() -> None:
    """However that ends."""
    asks = (
        "import sys, time; from parallel_backend.host.proofs import Prover; from parallel_backend.models.comfyui.proof.request "
        "import Asked; prover = Prover(sys.argv[1], [Asked('WAN21_T2V', 'wan, text')] * 99, 600.0); "
        "print(prover._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", asks, FOLDER], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        child = psutil.Process(int(asker.stdout.readline()))
        wait_for(lambda: COMMAND in " ".join(child.cmdline()) and child.num_threads() > 1)
        asker.send_signal(signal.SIGKILL)
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=thorough) for kind in KINDS])
def test_every_declared_class_is_right(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all its inputs, by the doctor, within the limits."""
    (finding,) = diagnose_models(FOLDER, kinds=[kind])
    print(f"{finding.name}: {finding.text}")
    assert finding.status is FindingStatus.OK, finding
