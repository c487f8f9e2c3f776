"""What workers get of ComfyUI's environment."""

from __future__ import annotations

import pytest

from parallel_backend.host.launcher import worker_environment


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("backend:cudaMallocAsync", ""),
        ("expandable_segments:True,backend:cudaMallocAsync", "expandable_segments:True"),
        ("backend:cudaMallocAsync,expandable_segments:True", "expandable_segments:True"),
        ("max_split_size_mb:512, backend : cudaMallocAsync,roundup:1", "max_split_size_mb:512,roundup:1"),
        ("roundup_power2_divisions:[256:1,512:2],backend:native", "roundup_power2_divisions:[256:1,512:2]"),
        ("expandable_segments:True", "expandable_segments:True"),
    ],
)
def test_the_users_allocator_settings_stay_and_comfyuis_backend_does_not(monkeypatch, name, ours, theirs):
    """ComfyUI appends its backend to what the user has set."""
    monkeypatch.setenv(name, ours)
    assert worker_environment().get(name, "") == theirs
