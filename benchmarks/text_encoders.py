"""Counts the bytes of a text encoder that each rank reads, holds and sends, with the blocks divided over ranks.

    COMFYUI_PATH=... python -m benchmarks.text_encoders >docs/measured/text-encoders.md

ComfyUI's small text encoders at their own sizes, with random weights, read from their files by the worker's code on gloo ranks.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel_backend import markdown
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.diffusion import ModelSpec, TextEncoderFiles
from parallel_backend.weights.adapters.merging import Keep
from parallel_backend.weights.loading.reading import Neighbours, Watch
from parallel_backend.worker.requests.text_encoding import TextEncoderPart
from tests.support.comfy_oracle import comfy_on_path
from tests.support.ranks import run_ranks
from tests.support.tiny.text_encoders import save_text_encoder

CPU = torch.device("cpu")

TYPES = {"clip-l": "stable_diffusion", "t5-base": "stable_audio", "qwen3-0.6b": "qwen_image"}
"""The type to load each text encoder with."""

PROMPT = "a fox jumps over a lazy dog, oil on canvas, evening light over the river and the bridge behind the mill"

PAGE = """\
# What each rank reads, holds and sends of a text encoder

`python -m benchmarks.text_encoders` counts these bytes on gloo ranks of the CPU, which read ComfyUI's small encoders at their own
sizes. All figures are MB, by rank. *Read*: one rank reads each byte of the file from the disk. All ranks hold the bytes
outside the blocks, and get them from that rank or from the system's page cache. *Sent for a prompt*: the results of its blocks,
to every other rank. T5's file is in fp32, and ComfyUI holds it in half of the bytes. The memory of large encoders on your cards:
[text encoders](../guide/text-encoders.md).

"""


def counted(path: Path, kind: str, ranks: int, rank: int) -> tuple[int, int, int, int]:
    """Read an encoder's part and encode a prompt. A collective.

    Returns:
        The bytes that are this rank's to read from the file, that it holds, and that it has sent for the prompt; and the
        number of the prompt's tokens.
    """
    import comfy.sd

    meter, bytes_read = Meter(), [0]
    group = dist.group.WORLD if ranks > 1 else None
    watch = Watch(lambda: False, lambda done, total: None, bytes_read.append)
    spec = ModelSpec("comfyui text encoder", str(path), 0, 0, "float32", text=TextEncoderFiles(kind))
    axis, everyone = (Communicator(name, group, CPU, False, meter) for name in ("text", "loading"))
    keep = Keep(lambda nbytes: True, lambda flag: flag)
    part = TextEncoderPart(spec, CPU, axis, Neighbours(everyone, (0,) * ranks), watch, keep)
    part.fill()
    loading = sum(meter.sent.values())
    clip = comfy.sd.load_clip([str(path)], clip_type=getattr(comfy.sd.CLIPType, kind.upper()))
    tokens = clip.tokenize(PROMPT)
    encoder: Any = part.module
    with torch.no_grad(), part.blocks.decisions:
        encoder.encode_token_weights(tokens)
    length = max(len(chunk) for chunks in tokens.values() for chunk in chunks)
    return sum(bytes_read), part.store.nbytes, sum(meter.sent.values()) - loading, length


def main() -> None:
    """Print the page."""
    comfy_on_path()
    head = ("encoder", "file", "ranks", "read", "held", "sent for a prompt", "tokens")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, kind in TYPES.items():
            path = Path(folder) / f"{name}.safetensors"
            save_text_encoder(path, name)
            for ranks in (1, 2, 3):
                found = run_ranks(ranks, functools.partial(counted, path, kind, ranks))
                figures = [", ".join(f"{nbytes / 1e6:.1f}" for nbytes in column) for column in zip(*found, strict=True)]
                size = f"{path.stat().st_size / 1e6:.1f}"
                rows.append((name, size, str(ranks), *figures[:-1], str(found[0][-1])))
    print(PAGE + markdown.table(head, rows), end="")


if __name__ == "__main__":
    main()
