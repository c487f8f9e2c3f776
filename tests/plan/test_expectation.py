"""The estimate of a run before any worker runs is the prediction that later chooses the plan."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import msgspec
import pytest

from parallel_backend.errors import PlanRefused
from parallel_backend.host.planning.devices import DeviceMemory
from parallel_backend.host.planning.planner import Planner
from parallel_backend.host.runs.expectation import Expected, expect, in_words
from parallel_backend.host.runs.outcome import predicted_gain
from parallel_backend.plan import Workload
from parallel_backend.plan.predict.cards import card_of
from parallel_backend.plan.predict.measure import BlockTimes
from parallel_backend.plan.predict.profiles import DenoiseJob
from tests.plan.jobs import FLUX, TOTAL, question
from tests.support.plans import MEASURED
from tests.support.sentences import known


def two(name: str = "NVIDIA GeForce RTX 4090", free: float | None = TOTAL) -> list[DeviceMemory]:
    bytes_free = None if free is None else int(free)
    gpus = [DeviceMemory(f"cuda:{index}", name, int(TOTAL), bytes_free) for index in range(2)]
    return [*gpus, DeviceMemory("cpu", "", 128 << 30, 64 << 30)]


@pytest.mark.parametrize("requested_plan", [{}, {"ring": 2}, {"weights": "sharded"}, {"devices": "0"}])
def test_the_estimate_equals_the_planners_choice_on_the_measured_machine(requested_plan: dict[str, object]) -> None:
    asked = question(**requested_plan)
    times = BlockTimes(((1.0, 1.0),) * 2, (FLUX.double_blocks, FLUX.single_blocks))
    each = (TOTAL,) * (1 if requested_plan.get("devices") else 2)
    choice = Planner().choose(asked, lambda _: each, lambda _: MEASURED, lambda _: times).choice
    expected = expect(asked, two(), lambda _: MEASURED)
    (chosen,) = (entry for entry in choice.ranking if entry.plan == choice.plan)
    assert expected.devices == choice.plan.devices
    assert expected.memory == chosen.breakdown.memory
    assert expected.gain == ((predicted_gain(choice),) * 2 if len(each) > 1 else None)


def test_without_a_measurement_a_card_is_known_by_its_name_and_the_cpu_has_no_gain() -> None:
    expected = expect(question(), two(), lambda _: None)
    assert expected.gain is not None and 1.0 < expected.gain[0] == expected.gain[1] <= 2.0
    unknown = expect(question(), two("A card of next year"), lambda _: None)
    assert unknown.gain is None and unknown.memory == pytest.approx(expected.memory)
    measured = expect(question(devices="cpu:2"), two(), lambda _: MEASURED)
    assert (measured.devices, measured.gain) == (("cpu", "cpu"), None) and measured.memory > 0


@pytest.mark.parametrize(("link", "warns"), [(MEASURED.link_bandwidth, False), (1e6, True)])
def test_the_log_has_the_ranking_on_gpus_and_says_when_one_is_faster(
    caplog: pytest.LogCaptureFixture, link: float, warns: bool
) -> None:
    caplog.set_level(logging.INFO)
    machine = msgspec.structs.replace(MEASURED, link_bandwidth=link)
    times = BlockTimes(((1.0, 1.0),) * 2, (FLUX.double_blocks, FLUX.single_blocks))
    chosen = Planner().choose(question(), lambda _: (TOTAL,) * 2, lambda _: machine, lambda _: times).choice
    for degrees in ("ulysses 2", "ring 2"):
        assert re.search(rf"{degrees} +\d+\.\d", caplog.text), caplog.text
    assert f"Chosen: {chosen.plan.describe()}." in caplog.text
    faster = "one device alone is faster for this job: choose devices 0 in Parallel Plan"
    assert (faster in caplog.text) == warns


def test_an_unknown_text_length_gives_a_range() -> None:
    """A picture of few tokens gains more from several devices with a long text than with a short one."""
    long, short = (
        expect(question(DenoiseJob(image_tokens=64, text_tokens=text)), two(), lambda _: MEASURED) for text in (512, 16)
    )
    assert long.gain is not None and short.gain is not None and short.gain[0] < long.gain[0]
    both = Expected(long.devices, (short.gain[0], long.gain[1]), max(long.memory, short.memory))
    assert long.or_else(short) == short.or_else(long) == both
    assert long.or_else(replace(short, gain=None)).gain is None


def test_a_plan_that_cannot_run_is_refused_before_the_run() -> None:
    assert expect(question(), two(free=1e10), lambda _: MEASURED).memory < 1e10  # the weights are streamed
    with pytest.raises(PlanRefused, match=r"Not enough GPU memory: .* and each has 2\.00 GB free"):
        expect(question(), two(free=2e9), lambda _: MEASURED)
    with pytest.raises(PlanRefused, match=r"each may use 1\.00 GB \(memory_limit 1\)"):
        expect(question(memory_limit=1.0), two(free=None), lambda _: MEASURED)
    with pytest.raises(PlanRefused, match="asks for GPU 5"):
        expect(question(devices="5"), two(), lambda _: MEASURED)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA GeForce RTX 4090 D", "4090-d"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 5060 Ti", "5060-ti"),
        ("NVIDIA GeForce RTX 5060", None),
        ("NVIDIA RTX PRO 5000 Blackwell", "pro-5000"),
        ("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-ada"),
        ("Quadro RTX 6000", None),
        ("NVIDIA GB10", "spark"),
        ("NVIDIA GB200", None),
        ("NVIDIA L40S", "l40s"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H200 NVL", None),
        ("", None),
    ],
)
def test_a_card_is_known_by_the_drivers_name_and_not_by_a_similar_one(name: str, card: str | None) -> None:
    assert card_of(name) == card


@pytest.mark.parametrize(
    ("devices", "gain", "line"),
    [
        (("cuda:0", "cuda:1"), (1.93, 1.93), "2 GPUs: about 1.9x, 21.6 GB each"),
        (("cuda:0", "cuda:1"), (1.74, 1.93), "2 GPUs: 1.7x to 1.9x, 21.6 GB each"),
        (("cuda:0", "cuda:1"), None, "2 GPUs: 21.6 GB each"),
        (("cuda:3",), None, "1 GPU: 21.6 GB"),
        (("cpu",) * 2, None, "2 workers: 21.6 GB each"),
        (("cpu",), None, "1 worker: 21.6 GB"),
    ],
)
def test_the_estimate_is_a_line_that_the_page_can_translate(
    devices: tuple[str, ...], gain: tuple[float, float] | None, line: str
) -> None:
    expected = Expected(devices, gain, 21.6e9)
    assert in_words(expected) == line
    assert known(line, "sentences")
    brief = in_words(expected, brief=True)
    assert brief == (line.partition(",")[0] if gain else line)
    assert known(brief, "sentences") or devices[0] == "cpu"  # only a machine with GPUs shows it
    for before_workers in ("the first run starts workers", "workers not started"):
        assert known(f"{line}; {before_workers}", "sentences")


def test_the_estimate_of_an_unsharded_model_has_only_its_weights() -> None:
    """Workers measure the memory of a forward."""
    asked = replace(question(), shape=replace(FLUX, unsharded=True), workload=Workload(2, False, 1))
    assert expect(asked, two(), lambda _: MEASURED) == Expected(("cuda:0", "cuda:1"), None, 2.0 * FLUX.parameters)
