"""Environment variables that workers inherit from ComfyUI."""

from __future__ import annotations

import msgspec
import pytest

from parallel_backend.host.workers.launcher import group_environment, wants_kernels_early, worker_environment
from tests.support.plans import cpu_plan


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
    """ComfyUI appends its backend to the user's settings."""
    monkeypatch.setenv(name, ours)
    assert worker_environment().get(name, "") == theirs


@pytest.mark.parametrize(
    ("devices", "degrees", "early"),
    [
        ("cuda:0 cuda:1", {"pipefusion": 2}, True),
        ("cuda:0 cuda:1", {"ulysses": 2}, False),
        ("cuda:0 cuda:0", {"pipefusion": 2}, False),  # gloo's sends do not use the GPU
        ("cpu cpu", {"pipefusion": 2}, False),
    ],
)
def test_stages_on_separate_gpus_load_kernels_at_start(devices, degrees, early):
    plan = msgspec.structs.replace(cpu_plan(**degrees), devices=tuple(devices.split()))
    assert wants_kernels_early(plan) == early


def test_kernels_are_loaded_early_unless_the_user_sets_the_variable(monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    assert "CUDA_MODULE_LOADING" not in group_environment(2, kernels_early=False)
    assert group_environment(2, kernels_early=True)["CUDA_MODULE_LOADING"] == "EAGER"
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert group_environment(2, kernels_early=True)["CUDA_MODULE_LOADING"] == "LAZY"
