"""What the driver tells of GPUs, read from answers of its tool."""

from __future__ import annotations

from parallel_backend.gpus import MEBIBYTE, DriverReport, ask_driver, parse

ANSWER = """\
GPU-8d3f2c5e-6f0b-2f7b-63c1-1f2f1b0b7c11, 23420, Enabled, 97, 71
GPU-1b9c1f60-0f55-9a7c-2d5e-0c5b5a1f2e22, 24117, Disabled, 0, 38
GPU-77f1d8f5-7a2b-3d64-8a9f-9b0f6c1d3e33, [N/A], [N/A], [N/A], [N/A]
"""
"""In the tool's form; the last as it answers for what a GPU does not have."""


def test_memory_display_load_and_temperature_are_read_by_uuid():
    assert parse(ANSWER) == {
        "GPU-8d3f2c5e-6f0b-2f7b-63c1-1f2f1b0b7c11": DriverReport(23420 * MEBIBYTE, True, 97, 71),
        "GPU-1b9c1f60-0f55-9a7c-2d5e-0c5b5a1f2e22": DriverReport(24117 * MEBIBYTE, False, 0, 38),
        "GPU-77f1d8f5-7a2b-3d64-8a9f-9b0f6c1d3e33": DriverReport(None, False, None, None),
    }


def test_without_a_driver_nothing_is_told(tmp_path):
    assert ask_driver((str(tmp_path / "nvidia-smi"),)) == {}
    assert ask_driver(("false",)) == {}
