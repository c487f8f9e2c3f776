"""Write the figures that a visit to a card measured into the card's profile. Figures that were not measured keep their values."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from .. import markdown
from ..errors import Refused
from .gpu_report import ReportLine, device_of, lines_of
from .predict.cards import CARDS, FIGURES, CardProfile, card_of, cards, read_cards, write_cards

DIGITS = 4
"""Significant digits that a measured figure keeps."""

UNITS = {
    "matmul": (1e12, "TFLOP/s"),
    "attention": (1e12, "TFLOP/s"),
    "bandwidth": (1e12, "TB/s"),
    "memory": (1e9, "GB"),
    "launch": (1e-6, "µs"),
    "context": (1e9, "GB"),
    "connection": (1e9, "GB"),
    "host_bandwidth": (1e9, "GB/s"),
    "fp8": (1e12, "TFLOP/s"),
    "int8": (1e12, "TOP/s"),
    "nvfp4": (1e12, "TFLOP/s"),
}
"""The unit in which the table shows each figure: its size in the units of the file of cards, and its name."""


def measured(lines: Sequence[ReportLine]) -> dict[str, float]:
    """Return the median of each figure of a card's profile over all lines that have it, whatever their verdict.

    Raises:
        Refused: the lines have no such figure, or a figure that is not above zero.
    """
    values = {name: [line.figures[name] for line in lines if name in line.figures] for name in FIGURES}
    wrong = [f"{name} {value:g}" for name, numbers in values.items() for value in numbers if value <= 0]
    if wrong:
        raise Refused(f"the report has figures of zero or less ({', '.join(wrong)}): remove their lines from it.")
    medians = {name: float(f"{statistics.median(numbers):.{DIGITS}g}") for name, numbers in values.items() if numbers}
    if not medians:
        raise Refused(
            f"the report has none of the figures {', '.join(FIGURES)}: run scripts/gpu.sh one shares on the card, "
            "and use its report."
        )
    return medians


def calibrated(before: CardProfile, figures: Mapping[str, float], origin: str) -> CardProfile:
    """Return a card's profile with new figures.

    Args:
        before: the profile.
        figures: the new figures by name.
        origin: the card on which they were measured, and when.
    """
    return msgspec.structs.replace(before, **figures, measured={**before.measured, **dict.fromkeys(figures, origin)})


def card_for(device: str, named: str | None) -> str:
    """Return the name of the card whose profile a report updates.

    Args:
        device: the driver's name of the card.
        named: the card that the user names, if any.

    Raises:
        Refused: the user names no card, and the driver's name is not that of a known card.
    """
    card = named or card_of(device)
    if card is None:
        raise Refused(
            f"the report is from {device}, which is an unknown card: choose one with --card ({', '.join(cards())})."
        )
    return card


def origin_of(lines: Sequence[ReportLine], device: str) -> str:
    """Return the origin of a report's figures in words: the card, the version of torch and the day."""
    versions = [line.versions for line in lines if line.versions]
    return f"{device}, torch {versions[-1].torch}, {versions[-1].day}" if versions else device


def table(before: CardProfile, figures: Mapping[str, float], lines: Sequence[ReportLine]) -> str:
    """Return a Markdown table with a row for each figure: its old value, its new value, and the number of lines with it."""

    def row(name: str) -> tuple[str, ...]:
        old = getattr(before, name)
        count = sum(name in line.figures for line in lines)
        return name, _amount(name, old), _amount(name, figures.get(name, old)), str(count) if count else "unchanged"

    return markdown.table(("figure", "before", "now", "lines"), map(row, FIGURES))


def _amount(name: str, value: float) -> str:
    unit, symbol = UNITS[name]
    return f"{value / unit:.4g} {symbol}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    line = argparse.ArgumentParser(prog="python -m parallel_backend.plan.calibrate", description=__doc__)
    line.add_argument("report", type=Path, help="the lines.jsonl of a report, or a folder or archive that contains it")
    line.add_argument("--card", choices=list(cards()), help="the card to update (default: the card in the report)")
    line.add_argument(
        "--into", type=Path, default=CARDS, help="the file of cards to update (default: the cost model's own)"
    )
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the profile and print the changes. Return the exit code: 0, or 2 if the report gives no profile."""
    options = parser().parse_args(arguments)
    try:
        lines = lines_of(options.report)
        device = device_of(lines)
        card = card_for(device, options.card)
        figures = measured(lines)
        known = {**cards(), **(read_cards(options.into) if options.into.exists() else {})}
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    origin = origin_of(lines, device)
    write_cards(options.into, {**known, card: calibrated(known[card], figures, origin)})
    print(f"{card}, measured on {origin}:\n\n{table(known[card], figures, lines)}\nWritten to {options.into}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
