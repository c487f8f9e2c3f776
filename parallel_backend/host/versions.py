"""The versions of torch and diffusers that the pack supports, stated once; and what must be the same on all ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from ..errors import Refused
from ..identity import code_digest
from ..wire.messages import Facts

OLDEST_TORCH = (2, 6)
"""Older ones have not been tried."""

OLDEST_DIFFUSERS = (0, 35)
NEWEST_DIFFUSERS = (0, 42)
REMEDY = "run pip install -r requirements.txt in the pack's folder with ComfyUI's Python"
TORCH_REMEDY = "update ComfyUI's torch"


def check_versions() -> None:
    """Raises Refused where torch is too old here, or diffusers missing or outside the supported range."""
    check_torch(str(torch.__version__))
    try:
        found = version("diffusers")
    except PackageNotFoundError:
        raise Refused(f"diffusers is not installed and {supported()} is needed: {REMEDY}.") from None
    if not in_range(found):
        raise Refused(f"diffusers {found} is installed and {supported()} is supported: {REMEDY}.")


def check_torch(found: str) -> None:
    """Raises Refused for a version of torch that is too old for the workers."""
    if _major_minor(found) < OLDEST_TORCH:
        raise Refused(
            f"torch {found} is installed and the workers need {dotted(OLDEST_TORCH)} or newer: {TORCH_REMEDY}."
        )


def check_members(members: Sequence[Facts]) -> None:
    """Raises Refused where a rank differs from rank 0, or the workers from this process; it is named with its host."""
    first = members[0]
    if first.code != code_digest():
        raise Refused(
            f"the workers on {first.host} run another version of this pack ({first.code}) than ComfyUI ({code_digest()}): "
            "install the same version of the pack on both, and restart both."
        )
    for rank, member in enumerate(members):
        for what in ("code", "torch", "diffusers", "comfyui"):
            theirs, ours = getattr(member, what), getattr(first, what)
            if theirs != ours:
                name = {"code": "the pack's code", "comfyui": "ComfyUI"}.get(what, what)
                raise Refused(
                    f"worker {rank} on {member.host} has {name} {theirs or '(none)'} and worker 0 on {first.host} "
                    f"{ours or '(none)'}: install the same version on all machines and start the workers again."
                )
    ours = own_comfyui_version()
    if first.comfyui and ours and first.comfyui != ours:
        raise Refused(
            f"the workers on {first.host} have ComfyUI {first.comfyui} and this one is {ours}: install the same version on all "
            "machines and start the workers again."
        )
    if not in_range(first.diffusers):
        raise Refused(
            f"the workers on {first.host} have diffusers {first.diffusers or '(none)'} and {supported()} is "
            "supported: run pip install -r requirements.txt in the pack's folder on all machines."
        )


def own_comfyui_version() -> str:
    """The version of the ComfyUI that this process is; empty in another process."""
    module = sys.modules.get("comfyui_version")
    return "" if module is None else str(module.__version__)


def supported() -> str:
    """The supported range in words."""
    return f"{dotted(OLDEST_DIFFUSERS)} to {dotted(NEWEST_DIFFUSERS)}"


def in_range(found: str) -> bool:
    """Whether a version of diffusers is supported."""
    return OLDEST_DIFFUSERS <= _major_minor(found) <= NEWEST_DIFFUSERS


def dotted(parts: tuple[int, ...]) -> str:
    """`2.6` for (2, 6)."""
    return ".".join(map(str, parts))


def _major_minor(found: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2])
