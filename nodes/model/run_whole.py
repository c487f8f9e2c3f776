"""A model whose spread forward is proved wrong in this ComfyUI, as one that runs whole, by ComfyUI's own forward.

On several workers it is then as one of a class that nobody declared: how to spread it is derived anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ...parallel_backend.models.comfyui.whole_family import NAME
from ...parallel_backend.models.families import FAMILIES
from ...parallel_backend.weights.files.checkpoint import read_header
from .proofs import AnotherResult
from .remote_model import RemoteModel
from .undeclared import PREPARES_TEXT, SpreadBy, Undeclared, may_be_derived


def whole_instead(
    remote: RemoteModel, skeleton: Any, mismatch: AnotherResult, spread_by: SpreadBy
) -> tuple[RemoteModel, Undeclared | None]:
    """Return the same file's model, run unsharded. If the plan has several workers, also return how it may be
    parallelised later.

    Args:
        skeleton: the diffusion model, on the meta device.
        mismatch: the verdict of the proof, raised where the model cannot run whole: the class prepares its text by its
            weights, or several workers would share a forward of a class that cannot be derived.
    """
    if hasattr(skeleton, PREPARES_TEXT):
        raise mismatch
    family = FAMILIES[NAME]
    _, config = family.inspect(read_header(remote.spec.path))
    spec = msgspec.structs.replace(remote.spec, family=NAME)
    whole = replace(remote, family=family, config=config, spec=spec, unspread=mismatch.unspread)
    if len(remote.devices) < 2:
        return whole, None
    if not may_be_derived(config):
        raise mismatch
    whole = replace(whole, unspread=f"{config.kind} runs whole for now: {mismatch.split}.")
    return whole, Undeclared(whole, spread_by, mismatch.split)
