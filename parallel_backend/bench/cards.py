"""Checks that this machine's GPUs are free to be measured, and finds the facts about the machine for the record."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Collection, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..comfyui_folder import comfyui_version
from ..gpus import Gpu, GpuProcess, ask_holders
from ..host.runs.outcome import amount
from ..identity import code_digest
from .graphs import NotMeasured

MOST = 1_000_000_000
"""Largest number of bytes of a GPU that other processes may hold: a display, or a ComfyUI that has nothing loaded."""

PACK = Path(__file__).parents[2]
"""Folder of this pack."""


def check_free(
    gpus: Sequence[Gpu],
    indices: Collection[int],
    holders: Sequence[GpuProcess] | None = None,
    own: Collection[int] = (),
) -> None:
    """Raise NotMeasured if another process holds more than MOST of a GPU that is to be measured. The message names it.

    Args:
        indices: indices of the GPUs that are to be measured.
        holders: the processes on all GPUs. By default these are the processes that the driver shows.
        own: ids of processes that may hold any amount. If the driver does not show them, as in a container, memory of unnamed
            processes may be theirs.
    """
    holders = ask_holders() if holders is None else holders
    for index in indices:
        gpu = gpus[index]
        mine = [holder for holder in holders if holder.uuid == gpu.uuid]
        for holder in mine:
            if holder.used_bytes is not None and holder.used_bytes > MOST and holder.process not in own:
                raise NotMeasured(
                    f"Process {holder.process} ({holder.name}) holds {amount(holder.used_bytes)} of GPU {index} ({gpu.name}): "
                    f"end it, or measure other GPUs with --devices."
                )
        if own and not any(holder.process in own for holder in mine):
            continue
        used = 0 if gpu.free is None else gpu.memory - gpu.free
        if used > MOST and used > sum(holder.used_bytes or 0 for holder in mine) + MOST:
            raise NotMeasured(
                f"{amount(used)} of GPU {index} ({gpu.name}) are in use by a process that the driver does not name: end it, or "
                "measure other GPUs with --devices."
            )


def processor() -> str:
    """Return the name of the computer's processor, or an empty string if it is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def versions(comfyui: Path) -> dict[str, str]:
    """Return the versions of all software that may affect a result, where it is installed."""
    installed = {
        "comfyui": comfyui_version(str(comfyui)),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "driver": driver(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for package in ("flash-attn", "sageattention", "diffusers", "comfy-kitchen"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            pass
    return {name: value for name, value in installed.items() if value}


def driver(root: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver; empty if its module is not loaded."""
    try:
        fields = root.read_text(encoding="utf-8").split()
    except OSError:
        return ""
    return next((field for field in fields if field[0].isdigit() and "." in field), "")


def commit(pack: Path = PACK) -> str:
    """Return the pack's commit, followed by a + if files differ from it. Without git, return the digest of the code."""
    short_hash = _git(pack, "log", "-1", "--format=%h")
    if not short_hash:
        return f"code {code_digest()}"
    return short_hash + ("+" if _git(pack, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str:
    if not (folder / ".git").exists():  # or git finds the checkout of a ComfyUI around the pack
        return ""
    try:
        ran = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip()
