"""Which diffusers is installed, and which the models need that are made of its modules. Nothing of it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from ...errors import Refused

OLDEST = (0, 35)
NEWEST = (0, 42)
SUPPORTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
NEEDED = f"CogVideoX and PixArt need diffusers {SUPPORTED}"
REMEDY = "run pip install -r requirements.txt in the pack's folder with ComfyUI's Python"


def of_diffusers(imports: Iterable[str]) -> bool:
    """Whether a kind of model or autoencoder is made of diffusers' modules, by what it imports."""
    return any(module.partition(".")[0] == "diffusers" for module in imports)


def check_diffusers() -> None:
    """Raises Refused where this Python has no diffusers, or one out of range."""
    if not in_range(installed := own_diffusers()):
        raise Refused(f"{NEEDED}, and {installed or 'none'} is installed: {REMEDY}.")


def own_diffusers() -> str:
    """The installed version; empty for none."""
    try:
        return version("diffusers")
    except PackageNotFoundError:
        return ""


def in_range(installed: str) -> bool:
    """Whether a version is supported; none is not."""
    return OLDEST <= tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) <= NEWEST
