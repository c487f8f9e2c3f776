"""`python -m parallel_backend.models.comfyui.proof REQUESTS`: prove calls of small models, and print one reply a line.

`parallel_backend.host.proofs` starts this separate process. It imports ComfyUI without packs, and ends when its input closes.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from importlib import import_module
from typing import Any

import msgspec
import torch

from ....errors import Refused
from ..importing import import_comfyui
from ..small import Builder, small, small_with_inputs
from ..small.kinds import cases_of
from .child import NICE, end_with_the_asker
from .prove import prove
from .ranks import RankFailed, in_a_line
from .request import ASKED, ProofReply, ProofRequest, class_name


def main() -> None:
    """Print the reply to each request in turn."""
    os.nice(NICE)
    torch.set_num_threads(1)
    threading.Thread(target=end_with_the_asker, daemon=True).start()
    import_comfyui()
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps ComfyUI's prints out of the replies
    for request in ASKED.decode(sys.argv[1]):
        print(msgspec.json.encode(_answer(request)).decode(), file=answers, flush=True)


def _answer(request: ProofRequest) -> ProofReply:
    begun = time.monotonic()
    try:
        configuration = request.configuration
        if configuration is None:
            configuration = _of_the_class(getattr(import_module("comfy.supported_models"), request.kind))
        builder = Builder(chosen=configuration)
        if request.inputs is None:
            case = small(request.case, builder, request.kind)
        else:
            case = small_with_inputs(cases_of(request.kind, configuration), builder, request.kind, request.inputs)
        if request.model and request.model != class_name(type(case.model)):
            return ProofReply({}, 0.0, f"this pack has no test model of {request.model}")
        errors = prove(case)
    except RankFailed as error:
        kind, _, message = error.line.partition(": ")
        refused = kind == Refused.__name__
        return ProofReply({}, time.monotonic() - begun, message if refused else error.line, refused)
    except Refused as error:
        return ProofReply({}, time.monotonic() - begun, str(error))
    except Exception as error:  # an unknown ComfyUI may raise anything
        return ProofReply({}, time.monotonic() - begun, in_a_line(error))
    return ProofReply(
        {split: error if math.isfinite(error) else None for split, error in errors.items()}, time.monotonic() - begun
    )


def _of_the_class(kind: Any) -> dict[str, Any]:
    """Return the configuration that a class in comfy.supported_models states for all its files, as its model gets it."""
    described = kind({**kind.unet_config, "disable_unet_model_creation": True, "hidden_size": 3072})
    described.get_model({}, "")
    return {name: described.unet_config[name] for name in kind.unet_config}


if __name__ == "__main__":
    main()
