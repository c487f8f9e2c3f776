"""Facts about GPUs, read from outputs of the driver's tool."""

from __future__ import annotations

import pytest

from parallel_backend.gpus import MEBIBYTE, DriverReport, ask_driver, parse

ANSWER = """\
GPU-8d3f2c5e-6f0b-2f7b-63c1-1f2f1b0b7c11, 23420, Enabled, 97, 71
GPU-1b9c1f60-0f55-9a7c-2d5e-0c5b5a1f2e22, 24117, Disabled, 0, 38
GPU-77f1d8f5-7a2b-3d64-8a9f-9b0f6c1d3e33, [N/A], [N/A], [N/A], [N/A]
"""
"""An output in the tool's form."""


UUID = "GPU-2ac434d3-1aca-57a0-597d-1d2effdba9f3"


@pytest.mark.parametrize(
    ("fields", "report"),
    [
        pytest.param("23420, Enabled, 97, 71", DriverReport(23420 * MEBIBYTE, True, 97, 71), id="all known"),
        pytest.param("[N/A], [N/A], [N/A], [N/A]", DriverReport(None, False, None, None), id="none known"),
        pytest.param("40536, Disabled, [N/A], 33", DriverReport(40536 * MEBIBYTE, False, None, 33), id="parts (MIG)"),
        pytest.param(
            "[Insufficient Permissions], [Insufficient Permissions], [N/A], 47",
            DriverReport(None, False, None, 47),
            id="parts (MIG) in a container",
        ),
        pytest.param(
            "[Unknown Error], Enabled, [GPU requires reset], [GPU is lost]",
            DriverReport(None, True, None, None),
            id="a fault",
        ),
        pytest.param("0, Disabled, 0, 0", DriverReport(0, False, 0, 0), id="nothing free"),
    ],
)
def test_memory_display_load_and_temperature_are_read_by_uuid_and_missing_ones_are_none(
    fields: str, report: DriverReport
) -> None:
    assert parse(f"{UUID}, {fields}\n") == parse(f"{UUID},{fields.replace(', ', ',')}\r\n") == {UUID: report}


@pytest.mark.parametrize(
    "line",
    [
        "Unable to determine the device handle for GPU 0000:05:00.0: GPU is lost.  Reboot the system to recover this GPU",
        "No devices were found",
        'Field "display_active" is not a valid field to query.',
        "",
    ],
)
def test_an_error_line_does_not_affect_other_gpus(line: str) -> None:
    assert parse(f"{line}\n") == {} and len(parse(ANSWER)) == 3
    assert parse(f"{ANSWER}{line}\n") == parse(f"{line}\n{ANSWER}") == parse(ANSWER)


def test_without_a_driver_there_are_no_reports(tmp_path):
    assert ask_driver((str(tmp_path / "nvidia-smi"),)) == {}
    assert ask_driver(("false",)) == {}
