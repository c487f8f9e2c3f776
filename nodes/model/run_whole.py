"""A model whose spread forward is proved wrong in this ComfyUI, as one that one worker runs whole, by ComfyUI's own forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ...parallel_backend.models import FAMILIES
from ...parallel_backend.models.comfyui.whole_family import NAME
from ...parallel_backend.weights.files.checkpoint import read_header
from .proofs import AnotherResult
from .remote_model import RemoteModel


def whole_instead(remote: RemoteModel, skeleton: Any, fault: AnotherResult) -> RemoteModel:
    """The same file's model, run whole where the plan has one worker.

    Args:
        skeleton: the diffusion model, on the meta device.
        fault: the verdict of the proof, which is raised where that cannot be: workers would share a forward, or the class has
            its text prepared by its weights.
    """
    prepares = hasattr(skeleton, "preprocess_text_embeds")
    if len(remote.devices) > 1 or prepares:
        raise fault
    family = FAMILIES[NAME]
    _, config = family.inspect(read_header(remote.spec.path))
    spec = msgspec.structs.replace(remote.spec, family=NAME)
    return replace(remote, family=family, config=config, spec=spec, unspread=fault.unspread)
