"""The memory of text encoders whose blocks are divided over GPUs, and the encoders that the plan command knows by name.

`tests/plan/test_text_encoders.py` counts the parameters of ComfyUI's own classes again.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from ...layout import parts_by_size
from .lookup import looked_up
from .profiles import Device

TEXT_ENCODERS = Path(__file__).with_name("known_text_encoders.json")


class KnownTextEncoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text encoder.

    Attributes:
        name: the encoder's name for users.
        of: a model that uses the encoder.
        blocks: for each list of blocks, the number of blocks and the parameters of one block.
        others: parameters outside the blocks, which every GPU holds.
    """

    name: str
    of: str
    blocks: tuple[tuple[int, int], ...]
    others: int

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.others + sum(number * size for number, size in self.blocks)

    def parameters_by_rank(self, ranks: int) -> list[int]:
        """Return the parameters that each rank holds."""
        found = [self.others] * ranks
        for number, size in self.blocks:
            for owner in parts_by_size((size,) * number, ranks):
                found[owner] += size
        return found

    def needed(self, ranks: int, weight_bytes: float, device: Device) -> float:
        """Return the bytes that the fullest rank needs of its device for its weights and as a process."""
        return max(self.parameters_by_rank(ranks)) * weight_bytes + device.context


@functools.cache
def _text_encoders() -> dict[str, KnownTextEncoder]:
    encoders = msgspec.json.decode(TEXT_ENCODERS.read_bytes(), type=list[KnownTextEncoder])
    return {encoder.name: encoder for encoder in encoders}


def known_text_encoder(name: str) -> KnownTextEncoder:
    """Return a text encoder by name. Raise Refused as `looked_up` does."""
    return looked_up("text encoder", name, _text_encoders())


def text_encoder_names() -> list[str]:
    """Return the names that `known_text_encoder` knows."""
    return list(_text_encoders())
