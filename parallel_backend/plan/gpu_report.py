"""The report of a visit to a machine with GPUs: a line of JSON for each check that `scripts/gpu.sh` made there."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from ..errors import Refused

FILE = "lines.jsonl"
"""The file's name in the folder of a report, and in an archive of it."""


BEGINNING = "versions"
"""The name of the line with which rank 0 begins a list, also where the line has failed to tell the versions."""


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that a list of checks ran with, as the README's table has them, and the day, as 2026-11-24."""

    comfyui: str
    torch: str
    python: str
    day: str


class ReportLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a report.

    Attributes:
        checks: the name of the list.
        device: the name of the card, or "cpu".
        verdict: PASS, FAIL or INFO.
        name: of what was checked or measured.
        text: what was found, in words.
        figures: what was found, in numbers, in the units of a `Device` (FLOP/s, bytes/s, bytes, seconds).
        versions: on the line that is called BEGINNING.
        end: true on the line with which rank 0 ends the list, whatever its checks came to.
        seconds: since the list began.
    """

    checks: str
    rank: int
    device: str
    verdict: str
    name: str
    text: str
    figures: Mapping[str, float] = {}
    versions: Versions | None = None
    end: bool = False
    seconds: float = 0.0


def lines_of(report: Path) -> list[ReportLine]:
    """Return the lines of a report.

    Args:
        report: the file of lines, or the folder or the tar archive that has it.

    Raises:
        Refused: the report cannot be read, holds no line, or holds one that is cut off or none of a report.
    """
    way_out = f"copy the report again, and name its {FILE}, or the folder or the archive that holds it."
    try:
        content = _content(report)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Refused(f"the report {report} cannot be read ({error}): {way_out}") from None
    lines = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            lines.append(msgspec.json.decode(line, type=ReportLine))
        except msgspec.DecodeError as error:
            raise Refused(
                f"line {number} of the report {report} is cut off, or none of a report ({error}): {way_out}"
            ) from None
    if not lines:
        raise Refused(f"the report {report} has no lines: {way_out}")
    return lines


def _content(report: Path) -> bytes:
    if report.is_dir() or not tarfile.is_tarfile(report):
        return (report / FILE if report.is_dir() else report).read_bytes()
    with tarfile.open(report) as archive:
        members = [member for member in archive if member.isfile() and PurePosixPath(member.name).name == FILE]
        files = [file for member in members if (file := archive.extractfile(member))]
        if len(files) != 1:
            raise tarfile.TarError(f"it holds {len(files)} files called {FILE}")
        return files[0].read()


def device_of(lines: Sequence[ReportLine]) -> str:
    """Return the name of the one card that a report is of, or "cpu".

    Raises:
        Refused: the report is of several.
    """
    devices = dict.fromkeys(line.device for line in lines)
    if len(devices) > 1:
        raise Refused(f"the report is of {' and '.join(devices)}: make a file of the lines of one card, and name that.")
    return next(iter(devices))
