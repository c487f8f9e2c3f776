"""Every sentence that the page shows in ComfyUI's language is in locales/, word for word as the code says it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from parallel_backend.doctor import examine
from parallel_backend.host.runs.outcome import Outcome, amount, in_words
from parallel_backend.host.workers.causes import REMEDIES
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.choose import best
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.profiles import DenoiseJob
from tests.doctor.machines import DERIVED, FAULTS, GOOD
from tests.plan.jobs import FLUX, JOB, plan, plans, with_memory
from tests.support.sentences import known

ALONE = "One device alone would be faster for this job: choose devices 0 in Parallel Plan."
NOT_COMPILED = "The blocks are not compiled: compile on has no effect on single model calls or with model patches."
SLOW = "Slower path: one model call at a time, because the workers do not support X. Choose Y for the fast path."

LEFT_OUT = [
    "3 of the LoRA's changes have no effect, as with ComfyUI's own loader, which never patches a.scale, and 2 more.",
    "1 of the LoRA's changes do not fit the model, and ComfyUI leaves them out: ERROR lora a.weight shape '[6]' is invalid.",
]


@pytest.mark.parametrize(
    "change",
    [
        {"warnings": [ALONE, SLOW]},
        {"warnings": LEFT_OUT},
        {"gain_is": "measured", "seconds_a_step": 0.0},
        {"gain": None, "gain_is": "", "sent": 0, "starting": 36.7},
        {"compiling": 74.2, "warnings": [NOT_COMPILED]},
    ],
)
def test_lines_of_an_outcome_are_known(change: dict[str, object]) -> None:
    usual = Outcome(plan(cfg=2).describe(), "", 3.5, 20, 0.12, {"cpu": 1 << 30}, 0.2, 1 << 20, 0.6, "predicted", [])
    for line in in_words(msgspec.structs.replace(usual, **change)).splitlines():
        assert known(line, "lines"), line


def test_bytes_are_written_as_in_the_tab() -> None:
    """tests/web/panel.test.js has the same values for web/panel/units.js."""
    said = [amount(count) for count in (0, 999, 1000, 1234, 99960, 5e6, 6.13e9, 23.8e9, 999.6e9)]
    assert said == ["0 B", "999 B", "1.00 kB", "1.23 kB", "100 kB", "5.00 MB", "6.13 GB", "23.8 GB", "1.00 TB"]


@pytest.mark.parametrize(
    "found",
    [
        plan(),
        plan(cfg=2, weights="streamed"),
        plan(ulysses=2, weights="sharded", exchange="fp8"),
        plan(pipefusion=2),
        msgspec.structs.replace(plan(ulysses=2), head_chunks=3),
        msgspec.structs.replace(plan(cfg=2), batch_shares=(100, 33)),
    ],
    ids=ResolvedPlan.describe,
)
def test_a_plans_description_is_known(found: ResolvedPlan) -> None:
    assert known(found.describe(), "lines")


@pytest.mark.parametrize(
    ("card", "job", "limit"),
    [
        ("h100", JOB, 80e9),
        ("h100", JOB, 20e9),
        ("4090", dataclasses.replace(JOB, image_tokens=64), 80e9),
        ("4090", DenoiseJob(image_tokens=4096, text_tokens=512), 80e9),
    ],
)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("approximate", [False, True])
def test_reasons_for_a_plan_are_known(
    card: str, job: DenoiseJob, limit: float, devices: int, approximate: bool
) -> None:
    requested_plan = plans(devices, **({"weights": "streamed"} if limit < 40e9 else {}))
    why = best(requested_plan, FLUX, job, with_memory(profile(card), limit), approximate).why
    assert known(why, "sentences"), why


def test_the_doctors_lines_and_remedies_are_known() -> None:
    machines = [GOOD, *(dataclasses.replace(GOOD, **change) for change, *_ in FAULTS)]
    machines += [dataclasses.replace(GOOD, allocator="cudaMallocAsync"), dataclasses.replace(GOOD, open_files=-1)]
    machines.append(dataclasses.replace(GOOD, under_windows=True))
    machines.append(dataclasses.replace(GOOD, derived=(DERIVED,)))
    told = {finding for machine in machines for finding in examine(machine)}
    texts = {finding.text for finding in told} | {finding.remedy for finding in told} | set(REMEDIES.values())
    as_they_are = {
        "",
        GOOD.nccl,
        GOOD.versions["flash-attn"],
        *(change.get("measured", [GOOD.measured[0]])[0].error for change, *_ in FAULTS),
    }
    without_dots = (
        text.replace("  .", "") for text in texts - as_they_are
    )  # of the table of P2P, which end no sentence
    unknown = sorted(text for text in without_dots if not known(text, "lines", "sentences"))
    assert unknown == []
