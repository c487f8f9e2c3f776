"""The evaluation of a benchmark's events; a record in its file, as a table, and on the page of measured rows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from parallel_backend import markdown
from parallel_backend.bench.client import QueuedRun, StepProgress
from parallel_backend.bench.measure import phases, step_times
from parallel_backend.bench.record import (
    HEAD,
    BenchJob,
    Card,
    Phases,
    Record,
    Side,
    decoded,
    encoded,
    row,
    table,
)
from parallel_backend.clock import seconds_per_step
from parallel_backend.distance import error_of

MEASURED = Path(__file__).parents[2] / "docs" / "measured"


def run() -> QueuedRun:
    """Return a run with the steps of two samplers, the last step reported twice, and a node before and after the samplers."""
    steps = {"high": [(1, 12.0), (2, 13.0)], "low": [(1, 15.0), (2, 16.5), (2, 16.6)], "vae": [(1, 18.0)]}
    return QueuedRun(
        "id",
        "success",
        submitted=10.0,
        ended=19.0,
        started={"text": 10.1, "high": 11.0, "low": 13.1, "vae": 16.7},
        progress=[StepProgress(value, 2, node, time) for node, told in steps.items() for value, time in told],
    )


def test_phases_add_up_to_the_whole_run_and_seconds_per_step_exclude_the_time_between_samplers() -> None:
    found = phases(run(), ["high", "low"])
    assert found == Phases(text=1.0, start=1.0, denoise=4.5, decode=2.5)
    assert found.whole == 9.0
    assert step_times(run(), ["high", "low"]) == [[12.0, 13.0], [15.0, 16.5]]
    assert seconds_per_step(step_times(run(), ["high", "low"])) == 1.25
    assert seconds_per_step([[1.0]]) == 0.0


def test_an_error_is_relative_and_infinite_for_nan_or_another_shape() -> None:
    one = torch.ones(4)
    assert error_of(one * 1.5, one) == pytest.approx(0.5)
    assert error_of(one * float("nan"), one) == float("inf")
    assert error_of(torch.ones(5), one) == float("inf")


TIMES = Phases(1.0, 2.0, 3.0, 4.0)


def record(*sides: Side) -> Record:
    cards = [Card("RTX 4090", 24), Card("RTX 3090", 24), Card("RTX 4090", 24)]
    job = BenchJob("graph", ["a.safetensors"], "1024x1024", 20)
    return Record("2026-11-25", job, cards, "", 8, 1, None, 0, {"comfyui": "0.30.0", "torch": "2.11"}, "abc", [*sides])


SIDES = (
    Side("stock ComfyUI", 0, "", 0.81, TIMES, TIMES, {"cuda:0": 12_000_000_000}),
    Side("0", 1, "1 worker", 0.8, TIMES, TIMES, {"cuda:0": 13_000_000_000}, 0, 2e-7),
    Side("0-1", 2, "ulysses 2", 0.45, TIMES, Phases(0, 0, 5, 1), {"cuda:0": 7_000_000_000}, 1_000_000, 3e-7),
    Side("0-3", 4, failed="out of memory"),
)


def test_a_row_has_the_measured_values_and_marks_failed_sides() -> None:
    found = dict(zip(HEAD, row(record(*SIDES)), strict=True))
    assert found["machine"] == "2 x RTX 4090, RTX 3090"
    times = [found[name] for name in ("stock", "on 1", "on 2", "on 4", "on 8")]
    assert times == ["0.81 s", "0.8 s", "0.45 s", "cannot", ""]
    assert (found["whole job"], found["peak a device"]) == ("10.0 s → 6.0 s", "12.0 GB → 7.00 GB")
    assert (found["sent"], found["error"]) == ("1.00 MB", "3.0e-07")
    interrupted = dict(zip(HEAD, row(record(SIDES[0])), strict=True))
    names = ("stock", "on 1", "whole job", "error")
    assert [interrupted[name] for name in names] == ["0.81 s", "", "10.0 s", ""]


def test_a_table_has_one_line_for_each_side() -> None:
    head, *lines = table(record(*SIDES)).splitlines()
    assert "denoise" in head and len(lines) == len(SIDES)
    assert lines[2].startswith("0-1 (ulysses 2)") and lines[3] == "0-3: out of memory"


def test_a_record_comes_back_from_its_file() -> None:
    whole = record(*SIDES)
    assert decoded(encoded(whole)) == whole
    with pytest.raises(msgspec.DecodeError):
        decoded(b"{}")


def test_each_measured_file_has_its_row_on_the_page() -> None:
    """The page has the row that the command prints."""
    page, files = (MEASURED / "README.md").read_text(encoding="utf-8"), [*MEASURED.glob("*.json")]
    rows = {path: markdown.table(HEAD, [row(decoded(path.read_bytes()))]).splitlines()[-1] for path in files}
    assert rows
    assert [path for path, line in rows.items() if f"{line}\n" not in page] == []
