"""The report of a visit to a machine with GPUs: a line of JSON for each check that `scripts/gpu.sh` ran there."""

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
"""The name of the line with which rank 0 begins a list of checks, even if the line lacks the versions after an error."""


class Versions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The versions that a list of checks ran with, as in the table of tested versions, and the day, such as 2026-11-24."""

    comfyui: str
    torch: str
    python: str
    day: str


class ReportLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of a report.

    Attributes:
        checks: the name of the list of checks.
        rank: the rank that wrote the line.
        device: the name of the card, or "cpu".
        verdict: PASS, FAIL or INFO.
        name: the name of the check or measurement.
        text: the result in words.
        figures: the result in numbers, in the units of a `Device` (FLOP/s, bytes/s, bytes, seconds).
        versions: the versions, on the line with the name BEGINNING.
        end: True on the line with which rank 0 ends the list, whatever the results of its checks.
        seconds: seconds since the list began.
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
        Refused: the report cannot be read or has no lines, or a line is cut off or is not a report's line.
    """
    way_out = f"copy the report again, and give the path of its {FILE}, or of a folder or archive that contains it."
    try:
        content = _content(report)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Refused(f"the report {report} cannot be read ({error}): {way_out}") from None
    lines = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            lines.append(msgspec.json.decode(line, type=ReportLine))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(
                f"line {number} of the report {report} is incomplete, or is not a line of a report ({error}): {way_out}"
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
            raise tarfile.TarError(f"it contains {len(files)} files named {FILE}")
        return files[0].read()


def device_of(lines: Sequence[ReportLine]) -> str:
    """Return the name of the one card that a report is about, or "cpu".

    Raises:
        Refused: the report is about several cards.
    """
    devices = dict.fromkeys(line.device for line in lines)
    if len(devices) > 1:
        raise Refused(
            f"the report has lines of several cards ({', '.join(devices)}): copy the lines of one card to a file, "
            "and use that file."
        )
    return next(iter(devices))
