"""Every sentence that the page shows in ComfyUI's language is in locales/, word for word as the code says it.

No other sentence of the product matches one of their patterns.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from parallel_backend.doctor import examine
from parallel_backend.host.runs.outcome import Outcome, amount, in_words
from parallel_backend.host.workers.causes import REMEDIES
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.choose import best, streamed
from parallel_backend.plan.predict.known_machines import profile
from parallel_backend.plan.predict.profiles import DenoiseJob
from scripts.comfyui import REPO
from tests.doctor.machines import DERIVED, FAULTS, GOOD
from tests.plan.jobs import FLUX, JOB, plan, plans, with_memory
from tests.refusals.sentences import GAP, sentences, strings
from tests.support.sentences import TYPES, VALUE, WORDS, known, parts, pattern

ALONE = "One device alone would be faster for this job: choose devices 0 in Parallel Plan."
NOT_COMPILED = "The blocks are not compiled: compile on has no effect on single model calls or with model patches."
SLOW = "Slower path: one model call at a time, because the workers do not support X. Choose Y for the fast path."

SAMPLES = {
    "number": "2.50 GB",
    "version": "2.11.0+cu130",
    "device": "cuda:1",
    "moment": "2026-11-28 14:03",
    "path": "/dev/shm",
    "class": "FluxSchnell",
    "degrees": "cfg 2 x ulysses 4",
    "plan": "2 workers (cuda:0 … cuda:1): ulysses 2",
}
"""A value of each type."""

TEXT = "use ring 1 x ulysses 2, or 0 (automatic) for all of them"
"""A value without a type: the end of an earlier refusal, whose words matched a pattern for numbers."""

TRANSLATED = [*WORDS["lines"], *WORDS["sentences"]]

LEFT_OUT = [
    "3 of the LoRA's changes have no effect, as with ComfyUI's own loader, which never patches a.scale, and 2 more.",
    "1 of the LoRA's changes do not fit the model, and ComfyUI leaves them out: ERROR lora a.weight shape '[6]' is invalid.",
]


@pytest.mark.parametrize(
    "change",
    [
        {"warnings": [ALONE, SLOW]},
        {"warnings": LEFT_OUT},
        {"gain_is": "measured", "alone": 0.08, "alone_at": time.time()},
        {"gain_is": "measured", "alone": 12.34, "alone_at": 1e9},
        {"seconds_a_step": 0.0},
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
    for weights in ("replicated", "streamed"):
        requested_plan = plans(devices, weights=weights)
        machine = with_memory(profile(card), limit)
        why = best(requested_plan, FLUX, job, machine, approximate, fallback=streamed(requested_plan)).why
        assert known(why, "sentences"), why
        whole = weights == "streamed" or limit > 40e9 or (approximate and devices > 1)
        assert ("because replicated weights do not fit" in why) == (not whole)


def test_the_doctors_lines_and_remedies_are_known() -> None:
    described = ({"allocator": "cudaMallocAsync"}, {"open_files": -1}, {"under_windows": True}, {"derived": (DERIVED,)})
    machines = [dataclasses.replace(GOOD, **change) for change in ({}, *described, *(fault[0] for fault in FAULTS))]
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


def test_each_translated_sentence_matches_its_own_pattern_only() -> None:
    types = {name: kind for kind, entry in TYPES.items() for name in entry["names"]}
    assert SAMPLES.keys() == TYPES.keys()
    assert not types.keys() - {name for english in TRANSLATED for name in VALUE.findall(english)}
    for english in TRANSLATED:
        text = VALUE.sub(lambda value: SAMPLES[types[value[1]]] if value[1] in types else TEXT, english)
        assert [other for other in TRANSLATED if pattern(other).fullmatch(text)] == [english], text


def test_no_other_sentence_of_the_product_matches_a_pattern() -> None:
    said = strings() | sentences() | set(in_locales())
    assert len(said) > 3500
    assert accidents(said, TYPES) == set()
    untyped = {english for _, english in accidents([f"{TEXT}."], {})}
    assert "{kind}, {number} of {count}" in untyped  # so the test finds values without a type


def in_locales() -> Iterator[str]:
    """Yield every English text of the page: the pack's words, and those of its nodes, commands and settings."""
    waiting: list[Any] = [json.loads(file.read_text("utf-8")) for file in (REPO / "locales" / "en").glob("*.json")]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield node
        else:
            waiting += node.values() if isinstance(node, dict) else node


def accidents(said: Iterable[str], types: Mapping[str, Mapping[str, Any]]) -> set[tuple[str, str]]:
    """Return each sentence that matches the pattern of another sentence, with that other sentence.

    All gaps of a sentence have the same value. The values are the samples in turn.
    """
    patterns = {english: pattern(english, types) for english in TRANSLATED}
    any_pattern = re.compile("|".join(compiled.pattern for compiled in patterns.values()), re.S)
    shapes = {shape(part) for text in said for part in parts(text) if re.search("[A-Za-z]", part)}
    texts = {(each.replace(GAP, value), each) for each in shapes for value in (*SAMPLES.values(), TEXT)}
    return {
        (text, english)
        for text, own in texts
        if any_pattern.fullmatch(text)
        for english, compiled in patterns.items()
        if compiled.fullmatch(text) and shape(english) != own
    }


def shape(text: str) -> str:
    """Return a sentence with one gap for each value, or for several values in a row."""
    return re.sub(f"{GAP}+", GAP, VALUE.sub(GAP, text))
