"""Settings of NCCL in workers, by torch's version."""

from __future__ import annotations

import pytest
from torch.torch_version import TorchVersion

from parallel_backend.worker.process.process_group import nccl_settings

KEEPS = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.6.0+cu124", KEEPS), ("2.7.1", KEEPS), ("2.8.0+cu128", {}), ("2.11.0+cu130", {}), ("2.15.0a0+git1", {})],
)
def test_nccl_releases_buffers_of_collectives_in_every_version_of_torch(version: str, expected: dict[str, str]) -> None:
    assert nccl_settings(TorchVersion(version)) == expected
