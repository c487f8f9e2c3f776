"""The file of cards, and the command that writes a card's profile from a visit's measurements on the card."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallel_backend.errors import Refused
from parallel_backend.plan.calibrate import UNITS, main
from parallel_backend.plan.gpu_report import BEGINNING, FILE, ReportLine, Versions
from parallel_backend.plan.predict.cards import CARDS, FIGURES, QUANTISED, cards, read_cards, write_cards
from parallel_backend.plan.predict.known_machines import profile, profile_names

Capture = pytest.CaptureFixture[str]

H100 = "NVIDIA H100 80GB HBM3"
ORIGIN = f"{H100}, torch 2.11.0, 2026-11-27"


def said(name: str = "a rate", device: str = H100, verdict: str = "INFO", **figures: float) -> ReportLine:
    return ReportLine("shares", 0, device, verdict, name, "as measured", figures)


def begun(device: str = H100) -> ReportLine:
    versions = Versions("0.30.0", "2.11.0", "3.12", "2026-11-27")
    return ReportLine("shares", 0, device, "INFO", BEGINNING, "", versions=versions)


VISIT = (
    begun(),
    said("FLUX.1-dev", matmul=6.1e14),
    said("Qwen-Image", matmul=5.9e14, seconds=0.2),
    said("Wan 14B", matmul=7.7e14),
    said("a copy", bandwidth=2.718281828e12),
    said("the context", verdict="FAIL", context=9.5e8),
    said("nothing measured", verdict="PASS"),
)


def report(folder: Path, lines: tuple[ReportLine, ...] = VISIT) -> Path:
    file = folder / FILE
    file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return file


def test_a_visits_figures_become_the_cards_profile_and_the_others_stay(tmp_path: Path, capsys: Capture) -> None:
    into = tmp_path / "cards.json"
    assert main([str(report(tmp_path)), "--into", str(into)]) == 0
    found, before = read_cards(into), cards()
    h100 = found["h100"]
    assert (h100.matmul, h100.bandwidth, h100.context) == (6.1e14, 2.718e12, 9.5e8)
    assert h100.measured == dict.fromkeys(("matmul", "bandwidth", "context"), ORIGIN)
    for kept in set(FIGURES) - h100.measured.keys() | {"source"}:
        assert getattr(h100, kept) == getattr(before["h100"], kept)
    assert list(found) == list(before) and {name for name in found if found[name] != before[name]} == {"h100"}
    text = capsys.readouterr().out
    assert f"h100, measured on {ORIGIN}:\n" in text
    assert "| matmul | 790 TFLOP/s | 610 TFLOP/s | 3 |\n" in text
    assert "| attention | 600 TFLOP/s | 600 TFLOP/s | unchanged |\n" in text
    assert "| memory | 80 GB | 80 GB | unchanged |\n" in text
    assert "| int8 | 1160 TOP/s | 1160 TOP/s | unchanged |\n" in text
    assert "| launch | 43 µs | 43 µs | unchanged |\n" in text


def test_a_second_visit_changes_only_what_it_measured(tmp_path: Path) -> None:
    into, later = tmp_path / "cards.json", "NVIDIA GeForce RTX 4090"
    for lines in (VISIT, (said(matmul=6e14),), (said(device=later, attention=1.5e14),)):
        assert main([str(report(tmp_path, lines)), "--into", str(into)]) == 0
    found = read_cards(into)
    assert found["h100"].measured == {"matmul": H100, "bandwidth": ORIGIN, "context": ORIGIN}
    assert (found["h100"].matmul, found["4090"].attention) == (6e14, 1.5e14)


def test_a_report_its_folder_and_its_archive_give_the_same_profile(tmp_path: Path) -> None:
    folder = tmp_path / "gpu-report"
    folder.mkdir()
    file = report(folder)
    with tarfile.open(tmp_path / "report.tar.gz", "w:gz") as archive:
        archive.add(folder, "gpu-report")
    written = []
    for each in (file, folder, tmp_path / "report.tar.gz"):
        assert main([str(each), "--into", str(tmp_path / "cards.json")]) == 0
        written.append((tmp_path / "cards.json").read_bytes())
    assert len(written) == 3 and len({*written}) == 1


def test_a_rehearsal_on_the_cpu_counts_for_the_named_card(tmp_path: Path) -> None:
    file, into = report(tmp_path, (begun("cpu"), said(device="cpu", matmul=1e11))), tmp_path / "cards.json"
    assert main([str(file), "--card", "l4", "--into", str(into)]) == 0
    assert read_cards(into)["l4"].measured == {"matmul": "cpu, torch 2.11.0, 2026-11-27"}


REFUSED: Mapping[str, tuple[tuple[ReportLine, ...], str]] = {
    "two cards": (
        (said(matmul=1e14), said(device="NVIDIA L4", matmul=1e14)),
        f"has lines of several cards ({H100}, NVIDIA L4): copy the lines",
    ),
    "no figure": (
        (begun(), said(seconds=0.2)),
        "has none of the figures matmul, attention, bandwidth, memory, launch, context",
    ),
    "no line": ((), "has no lines: copy the report again"),
    "another card": (
        (said(device="NVIDIA H100 PCIe", matmul=1.0),),
        "NVIDIA H100 PCIe, which is an unknown card: choose one with",
    ),
    "the CPU": (
        (said(device="cpu", matmul=1e11),),
        "is from cpu, which is an unknown card: choose one with --card (3090, ",
    ),
    "zero": ((said(matmul=0.0),), r"figures of zero or less (matmul 0): remove their lines from it."),
    "not a number": ((said(matmul=float("nan")),), "line 1 of the report "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_report_that_makes_no_profile_is_refused(case: str, tmp_path: Path, capsys: Capture) -> None:
    lines, sentence = REFUSED[case]
    into = tmp_path / "cards.json"
    assert main([str(report(tmp_path, lines)), "--into", str(into)]) == 2
    told = capsys.readouterr()
    assert sentence in told.err and not told.out and not into.exists()


def test_a_report_that_was_cut_off_or_damaged_is_refused(tmp_path: Path, capsys: Capture) -> None:
    file = report(tmp_path)
    with tarfile.open(tmp_path / "report.tar.gz", "w:gz") as archive:
        archive.add(file, f"one/{FILE}")
        archive.add(file, f"two/{FILE}")
    whole = (tmp_path / "report.tar.gz").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / FILE).write_bytes(file.read_bytes().replace(b"FLUX", b"FL\xff\xff"))
    file.write_bytes(file.read_bytes()[:-20])
    (tmp_path / "empty").mkdir()
    for name, sentence in {
        "damaged": "line 2 of the report ",
        FILE: f"line {len(VISIT)} of the report {file} is incomplete, or is not a line of a report (",
        "cut.tar.gz": "cut.tar.gz ",
        "report.tar.gz": f"report.tar.gz cannot be read (it contains 2 files named {FILE}): copy the report again, and",
        "empty": "empty cannot be read ([Errno 2] ",
        "nowhere": "nowhere cannot be read ([Errno 2] ",
    }.items():
        assert main([str(tmp_path / name), "--into", str(tmp_path / "cards.json")]) == 2, name
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"matmul": None}, {"source": None}, {"source": ""}, {"memory": 0}, {"speed": 1.0}, {"launch": "fast"}]
)
def test_a_file_of_cards_is_read_strictly(change: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "cards.json"
    found = json.loads(CARDS.read_text(encoding="utf-8"))
    found["h100"] = {name: value for name, value in (found["h100"] | change).items() if value is not None}
    file.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(
        Refused, match=r"cards\.json cannot be read as a file of cards \(.+\): use a copy of cards\.json"
    ):
        read_cards(file)
    file.write_bytes(file.read_bytes().replace(b"h100", b"h\xff"))
    with pytest.raises(Refused, match=r"cards\.json cannot be read as a file of cards"):
        read_cards(file)
    before = file.read_bytes()
    assert main([str(report(tmp_path)), "--into", str(file)]) == 2
    assert "cannot be read as a file of cards (" in capsys.readouterr().err and file.read_bytes() == before


def test_each_card_has_all_figures_an_origin_and_a_machine(tmp_path: Path) -> None:
    """The file of cards is as the command writes it, so that a calibration changes only the lines of its card."""
    write_cards(tmp_path / "cards.json", cards())
    assert (tmp_path / "cards.json").read_bytes() == CARDS.read_bytes()
    assert len(cards()) >= 17 and cards().keys() <= {*profile_names()} and UNITS.keys() == {*FIGURES}
    for name, card in cards().items():
        assert set(FIGURES) >= card.measured.keys(), name
        assert not any(origin.startswith("cpu") for origin in card.measured.values()), "a rehearsal's figures"
        device = profile(name).device
        rates = {figure: device.quantised.get(dtype, 0.0) for dtype, figure in QUANTISED.items()}
        others = {figure: getattr(device, figure) for figure in FIGURES if figure not in rates}
        assert {**rates, **others} == {figure: getattr(card, figure) for figure in FIGURES}
