"""The child process that proves classes: it has limits, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from parallel_backend.doctor.findings import FindingStatus
from parallel_backend.doctor.models import diagnose_models
from parallel_backend.host.proofs import COMMAND, Child, Prover
from parallel_backend.models.comfyui.proof.request import ProofRequest
from parallel_backend.models.comfyui.small.kinds import KINDS
from tests.support.faulty import wait_until
from tests.support.selection import thorough

FOLDER = os.environ["COMFYUI_PATH"]
WAN = ProofRequest("WAN21_T2V", "wan, text")
PATIENCE = 600.0
"""Seconds to wait for the child, which has low priority next to other tests."""


def children() -> set[int]:
    """Return the ids of this process's descendants. Compare with `<=`, as one of an earlier test may still be ending."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


# proof/test_node::test_a_class_is_proved_once_reported_once_and_kept has this child's answers, and the next test its end.
@thorough
def test_existing_and_missing_classes_are_answered_and_no_process_is_left() -> None:
    before = children()
    other = ProofRequest("WAN21_T2V", "wan, text", "comfy.ldm.wan.model.AnotherModel")
    gone = ProofRequest("NoSuchModel", "wan, text")
    answers = [*Prover(FOLDER, [WAN, other, gone], seconds=PATIENCE).answers()]
    right, unlike, missing = (watched.answer for watched in answers)
    assert right.failure == "" and right.worst[1] <= 1e-5
    assert 50 << 20 < answers[0].memory < 2 << 30
    assert unlike.failure == "this pack has no test model of comfy.ldm.wan.model.AnotherModel"
    assert missing.failure.startswith("AttributeError:")
    assert children() <= before


@pytest.mark.parametrize(
    ("limits", "cancelled", "failures"),
    [
        pytest.param({"seconds": 0.5}, False, ["it took longer than 0 s"], marks=thorough),
        ({"memory": 30 << 20}, False, ["it took more than 0 GiB of memory"]),
        ({}, True, []),
    ],
)
def test_a_child_over_a_limit_and_a_cancelled_one_are_ended(
    limits: dict[str, float], cancelled: bool, failures: list[str]
) -> None:
    before = children()
    prover = Prover(FOLDER, [WAN, WAN], **({"seconds": PATIENCE} | limits))  # type: ignore[arg-type]
    assert [watched.answer.failure for watched in prover.answers(lambda: cancelled)] == failures
    assert children() <= before


def test_a_pause_of_the_parent_costs_the_child_no_time() -> None:
    """The child answers after the parent's pause, which is longer than the limit."""
    child = Child(FOLDER, ["timeit", "-n", "1", "-r", "1", "-s", "import time", "time.sleep(5)"], 1, 3.5, 2 << 30)
    subprocess.Popen(["sh", "-c", 'sleep 0.3; kill -STOP "$0"; sleep 4; kill -CONT "$0"', str(os.getpid())])
    (line,) = child.lines()
    assert line.failure == ""
    assert b"sec per loop" in line.text


@thorough
def test_a_child_ends_with_its_parent() -> None:
    """The parent is killed by SIGKILL."""
    asks = (
        "import sys, time; from parallel_backend.host.proofs import Prover; from parallel_backend.models.comfyui.proof.request "
        "import ProofRequest; prover = Prover(sys.argv[1], [ProofRequest('WAN21_T2V', 'wan, text')] * 99, 600.0); "
        "print(prover._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", asks, FOLDER], stdout=subprocess.PIPE, text=True) as asker:
        assert asker.stdout is not None
        child = psutil.Process(int(asker.stdout.readline()))
        wait_until(lambda: COMMAND in " ".join(child.cmdline()) and child.num_threads() > 1, PATIENCE)
        asker.send_signal(signal.SIGKILL)
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, PATIENCE)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=thorough) for kind in KINDS])
def test_the_doctor_proves_every_declared_class(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All inputs of the class are tried, within the limits."""
    (finding,) = diagnose_models(FOLDER, kinds=[kind])
    print(f"{finding.name}: {finding.text}")
    assert finding.status is FindingStatus.OK, finding
