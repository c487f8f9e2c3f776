"""Tiny Krea 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.tiny.family import HEADS, Tiny, layer_settings


def _krea2(_: Any, operations: Any) -> Any:
    from comfy.ldm.krea2.model import SingleStreamDiT

    return SingleStreamDiT(
        features=HEADS * 128,
        txtdim=40,
        heads=HEADS,
        kvheads=1,
        multiplier=4,
        layers=3,
        txtlayers=2,
        **layer_settings(operations),
    )


TINY: Mapping[str, Tiny] = {
    "krea2": Tiny(_krea2, (16, 1, 9, 14), 80),
}
