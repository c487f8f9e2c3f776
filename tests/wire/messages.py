"""Messages with tensors, as sent and damaged."""

from __future__ import annotations

import random

import torch

from parallel_backend.diffusion import FlowSettings, ModelSpec, PromptSpec
from parallel_backend.wire.frames import PREFIX
from parallel_backend.wire.to_worker import SampleRequest
from tests.support.plans import cpu_plan

SAMPLE = SampleRequest(
    request=3,
    model=ModelSpec("comfyui", "/models/a.safetensors", 1, 2, "float32"),
    plan=cpu_plan(ulysses=2),
    compute_dtype="bfloat16",
    sampling=FlowSettings(1.0, 1.0),
    cfg=2.0,
    positive=[PromptSpec({"context": "prompt.positive.0.c_crossattn"}, strength=1.0, start=0.9)],
    negative=None,
)
TENSORS = {
    "x": torch.randn(1, 16, 3, 5),
    "half": torch.randn(7).half(),
    "brain": torch.randn(2, 3).bfloat16(),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
    "bytes": torch.arange(5, dtype=torch.uint8),
}
EXTREMES = (
    b"\x00",
    b"\xff",
    b"\x80",
    b"\xc0",
    b"\xc1",
    b"\xdd" + b"\xff" * 4,
    b"\xdf" + b"\xff" * 4,
    b"\xcf" + b"\xff" * 8,
)


def mutated(frame: bytes, draw: random.Random) -> bytes:
    """Return a frame or a file's header with bytes changed, doubled, inserted or removed. Its integers are often wrong."""
    data = bytearray(frame)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data))
        match draw.randrange(8):
            case 0:
                data[at] ^= 1 << draw.randrange(8)
            case 1:
                data[at] = draw.randrange(256)
            case 2:
                data[at:at] = draw.choice(EXTREMES)
            case 3:
                del data[at : at + draw.randint(1, 8)]
            case 4:
                data += data[at:]
            case 5:
                data[at : at + 1] = draw.choice(EXTREMES)
            case 6:
                start = draw.choice((6, 8, 12))
                size = {6: 2, 8: 4, 12: 8}[start]
                data[start : start + size] = draw.choice((b"\x00", b"\xff", draw.randbytes(1))) * size
            case 7:
                data[at : at + 8] = draw.choice((0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)).to_bytes(
                    8, "little"
                )
        if len(data) < PREFIX.size:
            data += bytes(PREFIX.size)
    return bytes(data)
