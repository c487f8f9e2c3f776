"""The doctor's lines of model classes: the result of each class, in words that the page translates."""

from __future__ import annotations

import os
import runpy
import sys

import pytest

from parallel_backend.doctor.findings import FindingStatus
from parallel_backend.doctor.models import finding_of
from parallel_backend.host.proofs import Watched
from parallel_backend.models.comfyui.proof.request import ProofReply, ProofRequest
from tests.support.sentences import known

ASKED = ProofRequest("WAN21_T2V", "wan, text"), ProofRequest("WAN21_T2V", "wan, references behind")
RIGHT = ProofReply({"ulysses 2": 2e-7, "ring 3": 3e-7}, 1.5)
REFUSED = ProofReply({}, 1.0, "its block calls attention more than 2 times", refused=True)
WRONG = ProofReply({"ulysses 2": 2e-7, "ring 3": 0.0234}, 1.5)
NONE = ProofReply({}, 60.0, "it took longer than 60 s")


@pytest.mark.parametrize(
    ("answers", "status", "text"),
    [
        ((RIGHT, RIGHT), FindingStatus.OK, "2 inputs, 3.0 s, 300 MiB, at most 3.0e-07 off"),
        (
            (RIGHT, WRONG),
            FindingStatus.FAILURE,
            "wan, references behind: 2.3e-02 off under ring 3; 2 inputs, 3.0 s, 300 MiB",
        ),
        (
            (RIGHT, REFUSED),
            FindingStatus.FAILURE,
            "wan, references behind: its block calls attention more than 2 times; 2 inputs, 2.5 s, 300 MiB",
        ),
        ((WRONG, NONE), FindingStatus.FAILURE, "wan, text: 2.3e-02 off under ring 3; 2 inputs, 61.5 s, 300 MiB"),
        ((NONE, RIGHT), FindingStatus.WARNING, "wan, text: it took longer than 60 s; 2 inputs, 61.5 s, 300 MiB"),
    ],
)
def test_each_class_has_one_line_with_the_result_of_its_proofs(
    answers: tuple[ProofReply, ProofReply], status: FindingStatus, text: str
) -> None:
    made = [
        (asked, Watched(answer, size << 20)) for asked, answer, size in zip(ASKED, answers, (300, 200), strict=True)
    ]
    finding = finding_of("WAN21_T2V", made)
    assert (finding.name, finding.status, finding.text) == ("WAN21_T2V", status, text)
    assert bool(finding.remedy) == (status is not FindingStatus.OK)
    assert all(known(each, "sentences") for each in (finding.text, finding.remedy) if each)


def test_a_folder_that_is_no_comfyui_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "parallel_backend.doctor.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["doctor", "--models", "--comfyui", os.devnull])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("parallel_backend.doctor", run_name="__main__")
    assert "/dev/null is not ComfyUI's folder: name it with --comfyui" in capsys.readouterr().err
