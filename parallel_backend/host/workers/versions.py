"""The oldest torch that the pack supports, and the checks of versions that must be the same on all ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...errors import Refused
from ...identity import code_digest
from ...models.comfyui.content.files import changed_since, imported, other_file
from ...models.diffusers.diffusers_family import NEEDED, in_range
from ...wire.to_host import RankFacts

OLDEST_TORCH = (2, 6)
"""Oldest version of torch that the pack supports. Older versions have not been tried."""

TORCH_REMEDY = "update ComfyUI's torch"


def dotted(parts: tuple[int, ...]) -> str:
    """Return a version with dots, such as `2.6` for (2, 6)."""
    return ".".join(map(str, parts))


def check_torch(installed: str = str(torch.__version__)) -> None:
    """Raise Refused if a version of torch, by default this process's, is too old for the workers."""
    if _major_minor(installed) < OLDEST_TORCH:
        raise Refused(
            f"torch {installed} is installed and the workers need {dotted(OLDEST_TORCH)} or newer: {TORCH_REMEDY}."
        )


def check_members_diffusers(members: Sequence[RankFacts]) -> None:
    """Raise Refused if ranks that load a diffusers model have different versions of diffusers, or a version out of range."""
    _check_equal(members, {"diffusers": "diffusers"})
    if not in_range(members[0].diffusers):
        raise Refused(
            f"{NEEDED}, and the workers on {members[0].host} have {members[0].diffusers or 'none'}: run pip install -r "
            "requirements.txt in the pack's folder on all machines, and start the workers again."
        )


def check_members(members: Sequence[RankFacts]) -> None:
    """Raise Refused if a rank differs from rank 0, or the workers from this process. The message names the rank's host.

    The version of diffusers counts only for its models (`check_members_diffusers`).
    """
    first = members[0]
    if first.code != code_digest():
        raise Refused(
            f"the workers on {first.host} run another version of this pack ({first.code}) than ComfyUI ({code_digest()}): "
            "install the same version of the pack on both, and restart both."
        )
    _check_equal(members, {"code": "the pack's code", "torch": "torch", "comfyui": "ComfyUI"})
    ours = own_comfyui_version()
    if first.comfyui and ours and first.comfyui != ours:
        raise Refused(
            f"the workers on {first.host} have ComfyUI {first.comfyui} and this one is {ours}: install the same version on all "
            "machines and start the workers again."
        )
    _check_files(members)


def _check_files(members: Sequence[RankFacts]) -> None:
    """Raise Refused if ranks have other files of ComfyUI's than this process has imported. Equal versions may hide that.

    Raise Refused too if these files have changed on disk since this process imported them.
    """
    module = sys.modules.get("comfyui_version")
    if module is None or not any(member.comfyui_files for member in members):
        return
    folder = Path(str(module.__file__)).parent
    ours = imported(folder)
    if changed := changed_since(ours, folder):
        raise Refused(
            f"ComfyUI's files have changed since it was started ({changed[0]}): restart ComfyUI, so that it and its workers "
            "run the same."
        )
    by_files = {member.comfyui_files: (rank, member.host) for rank, member in reversed([*enumerate(members)])}
    for files, (rank, host) in by_files.items():
        if files and (path := other_file(ours, folder, files)):
            raise Refused(
                f"worker {rank} on {host} has another {path} than this ComfyUI, though both are {own_comfyui_version()}: "
                "install the same ComfyUI on all machines, and restart both."
            )


def _check_equal(members: Sequence[RankFacts], names: Mapping[str, str]) -> None:
    """Raise Refused if a rank's facts differ from rank 0's. `names` maps the compared facts to the users' names for them."""
    first = members[0]
    for rank, member in enumerate(members):
        for what, name in names.items():
            theirs, ours = getattr(member, what), getattr(first, what)
            if theirs != ours:
                raise Refused(
                    f"worker {rank} on {member.host} has {name} {theirs or '(none)'} and worker 0 on {first.host} "
                    f"{ours or '(none)'}: install the same version on all machines and start the workers again."
                )


def own_comfyui_version() -> str:
    """Return the version of the ComfyUI that this process is, or an empty string in another process."""
    module = sys.modules.get("comfyui_version")
    return "" if module is None else str(module.__version__)


def _major_minor(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
