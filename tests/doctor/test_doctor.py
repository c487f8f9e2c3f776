"""The doctor: this machine as it is, and machines with each known fault, faked in the doctor's observations."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from parallel_backend.doctor import FindingStatus, examine
from parallel_backend.doctor.findings import failed, table
from parallel_backend.doctor.observations import gpus_of_the_driver
from parallel_backend.worker.memory.rank_memory import KEPT_UNDER_WINDOWS
from tests.doctor.machines import DERIVED, EQUAL, FAULTS, GOOD, OTHER, OTHER_CUDA
from tests.support.selection import thorough


def test_a_good_machine_has_only_ok_findings():
    findings = examine(GOOD)
    assert {finding.status for finding in findings} == {FindingStatus.OK}
    assert not any(finding.remedy for finding in findings)
    assert not failed(findings)


@pytest.mark.parametrize(("change", "name", "status", "remedy"), FAULTS)
def test_each_fault_is_found_and_has_a_remedy(change, name, status, remedy):
    findings = examine(dataclasses.replace(GOOD, **change))
    (wrong,) = [finding for finding in findings if finding.status is not FindingStatus.OK]
    assert (wrong.name, wrong.status) == (name, status)
    assert remedy in wrong.remedy
    assert failed(findings) == (status is FindingStatus.FAILURE)
    assert remedy in table(findings)


PART = dataclasses.replace(GOOD.gpus[0], free=None)


@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        ({"allocator": "backend:cudaMallocAsync"}, "allocator", ".*the workers leave it out.*"),
        ({"under_windows": True}, "WSL2", f".*{KEPT_UNDER_WINDOWS / 1e9:.0f} GB.*"),
        ({"gpus": (PART, PART)}, "cuda:0", r"NVIDIA H100, 80\.0 GiB, free memory not known"),
        ({"verdicts": (OTHER, EQUAL)}, "ComfyUI's guidance", r".*comfy\.samplers\.cfg_function.*"),
    ],
)
def test_what_is_no_fault_is_ok_and_described(change, name, text):
    findings = examine(dataclasses.replace(GOOD, **change))
    assert {finding.status for finding in findings} == {FindingStatus.OK}
    (found,) = [finding for finding in findings if finding.name == name]
    assert re.fullmatch(text, found.text)


@pytest.mark.parametrize(
    ("files", "gpus"),
    [
        ([], 0),
        (["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"], 2),
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], 1),
        (["dev/dxg"], 0),
    ],
    ids=["none", "two GPUs", "WSL2", "WSL2 with another maker's GPU"],
)
def test_the_drivers_gpus_are_counted(tmp_path, files, gpus):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert gpus_of_the_driver(tmp_path) == gpus


# the quick run has each of these faults, faked, in test_each_fault_is_found_and_has_a_remedy, and this machine's findings in
# page/test_routes
@thorough
def test_faults_of_this_machine_are_found(tmp_path):
    """The faults are a small disk, few open files, ComfyUI's allocator, and packages that declare other versions."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("namespaces are not permitted here")
    for package, version in {"diffusers": "0.30.0", "flash_attn": "1.0.9", "torchaudio": "2.11.0"}.items():
        folder = tmp_path / "packages" / f"{package}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (tmp_path / "packages" / "torchaudio.py").write_text(f"raise RuntimeError('{OTHER_CUDA}. PyTorch has CUDA 13.2.')")
    disk = Path(tempfile.mkdtemp(prefix="disk-"))  # a short path, because a socket's path is limited
    command = 'mount -t tmpfs -o size=1m none "$1" && ulimit -n 512 && exec "$2" -m "$3"'
    variables = {
        "TMPDIR": str(disk),
        "PYTHONPATH": str(tmp_path / "packages"),
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    }
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", command, "sh", str(disk), sys.executable, "parallel_backend.doctor"],
        cwd=Path(__file__).parents[2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1
    said = re.sub(r"\s+", " ", ran.stdout)
    for finding in (
        "warning diffusers 0.30.0; CogVideoX and PixArt need 0.35 to 0.42, other models do not need it -> Run pip install",
        f"warning torchaudio 2.11.0 cannot be imported: {OTHER_CUDA} -> ComfyUI 0.30 to 0.33 do not start with this torchaudio",
        "warning flash-attn 1.0.9; 2.6 or newer is supported -> The flash-attn package does not fit",
        f"failure temporary folder {disk}: 0.00 GiB free -> The disk with the temporary folder is full",
        "warning open files 512 at most -> The limit of open files is reached",
        "ok allocator ComfyUI uses cudaMallocAsync; the workers leave it out",
        "ok 2 workers, cpu",
    ):
        assert finding in said, ran.stdout
    disk.rmdir()


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no GPU")
def test_the_doctor_measures_the_gpus_of_this_machine():
    from parallel_backend.doctor.observations import look

    facts = look()
    assert len(facts.gpus) == torch.cuda.device_count()
    assert all(gpu.free is not None and 0 < gpu.free < gpu.memory for gpu in facts.gpus)
    assert all(measured.machine is not None for measured in facts.measured)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="no GPU")
def test_the_doctor_opens_no_gpu():
    look = "import torch; from parallel_backend.doctor import look; gpus = look().gpus"
    opened = "not gpus or any(torch._C._cuda_hasPrimaryContext(index) for index in range(len(gpus)))"
    code = f"{look}; exit({opened})"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_derived_classes_are_listed_with_the_result_of_their_proof() -> None:
    facts = dataclasses.replace(GOOD, derived=(DERIVED,))
    assert [each.text for each in examine(facts) if each.name == "NewModel"] == [
        "in ComfyUI 0.46.0 the pack worked out how to split 2 kinds of calls: ulysses 2 1.0e-07, ring 3 2.0e-07",
        "in ComfyUI 0.46.0 it runs unsharded, because its blocks take turns",
    ]
