"""The cards that the cost model knows, from `cards.json`: one profile for each, with the origin of its figures.

Rates of matmuls and attention are those of a kernel that runs alone for a short time, measured by others or by a GPU report. A
rate that nobody measured is the data sheet's, times the share that a card of the same generation reaches. Memory speeds are 0.85
of the data sheet's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import Refused
from .profiles import CONTEXT_BYTES, HOST_BANDWIDTH, REACHED, Device

CARDS = Path(__file__).with_name("cards.json")

LAUNCH = 43e-6
"""Seconds of host time per operation, as measured on an H200's computer. It is a property of the computer, not of the card."""

FOR_ALL = re.compile(
    r"nvidia|dgx|geforce|tesla|rtx|blackwell|workstation|server|edition|generation|sxm\d?|hbm\d\w?|\d+gb"
)
"""Words in a GPU's name that do not distinguish cards."""

BY_CHIP = {"gb10": "spark"}
"""Cards by the name of their chip, where the driver names that."""

Amount = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Words = Annotated[str, msgspec.Meta(min_length=1)]


class CardProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A card's figures, with the meanings and units of the attributes of `Device`.

    Attributes:
        fp8: FLOP/s of matmul with weights in fp8; 0 if the card cannot.
        int8: operations/s of matmul with weights in int8; 0 if the card cannot.
        nvfp4: FLOP/s of matmul with weights in NVFP4; 0 if the card cannot.
        reached: less than REACHED for cards whose power limit slows long runs (fitted on A100, H100 and B200).
        links: the usual links between such cards, a key of `known_machines.LINKS`.
        source: the origin of the figures that `measured` does not list.
        measured: for each measured figure, the card, the version of torch and the day.
    """

    matmul: Amount
    attention: Amount
    bandwidth: Amount
    memory: Amount
    launch: Amount = LAUNCH
    context: Amount = CONTEXT_BYTES
    connection: NotNegative = 0.0
    host_bandwidth: Amount = HOST_BANDWIDTH
    fp8: NotNegative = 0.0
    int8: NotNegative = 0.0
    nvfp4: NotNegative = 0.0
    reached: Amount = REACHED
    links: Words
    source: Words
    measured: Mapping[str, Words] = {}

    @property
    def device(self) -> Device:
        """Return the card as a device of the cost model."""
        return Device(
            self.matmul,
            self.attention,
            self.bandwidth,
            self.memory,
            self.launch,
            self.context,
            self.connection,
            self.host_bandwidth,
            reached=self.reached,
            quantised={dtype: rate for dtype, figure in QUANTISED.items() if (rate := getattr(self, figure))},
        )


QUANTISED = {"fp8_fast": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
"""The figures by the dtypes of quantised weights that cards can multiply."""

FIGURES = tuple(
    name for name in CardProfile.__struct_fields__ if name not in ("reached", "links", "source", "measured")
)
"""The names of a card's figures, both in a file of cards and on the lines of a GPU report."""


@functools.cache
def cards() -> Mapping[str, CardProfile]:
    """Return the profiles of all known cards by name."""
    return read_cards(CARDS)


def read_cards(file: Path) -> dict[str, CardProfile]:
    """Return the profiles in a file of cards.

    Raises:
        Refused: the file cannot be read, has an unknown field, or lacks a figure or the source of a card.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, CardProfile])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"{file} cannot be read as a file of cards ({error}): use a copy of {CARDS.name}, or the name of a new file."
        ) from None


def write_cards(file: Path, profiles: Mapping[str, CardProfile]) -> None:
    """Write a file of cards, with numbers in powers of a thousand, such as 594E+12."""
    fields = {
        name: {field: _readable(value) for field, value in msgspec.to_builtins(profile).items()}
        for name, profile in profiles.items()
    }
    file.write_bytes(msgspec.json.format(msgspec.json.encode(fields), indent=2) + b"\n")


def _readable(value: object) -> object:
    exact = isinstance(value, float)
    return msgspec.Raw(Decimal(repr(value)).normalize().to_eng_string().encode()) if exact else value


def card_of(name: str) -> str | None:
    """Return the known card of a GPU, by the driver's name of the GPU; None if the card is not known.

    Any further word in the name means another card. Cards for laptops, with D, Ti or Super, or on PCIe where the known card has
    NVLink, are slower or faster. Parts of a card (MIG) are smaller.
    """
    tokens = re.findall(r"[a-z0-9]+", name.lower())
    card = "-".join(token for token in tokens if not FOR_ALL.fullmatch(token))
    card = BY_CHIP.get(card, card)
    return card if card in cards() else None


def reached_by(names: Iterable[str]) -> float:
    """Return the smallest share of a rate that a model reaches on any of these GPUs, by the driver's names."""
    known = [card_of(name) for name in names]
    return min((cards()[card].reached if card else REACHED for card in known), default=REACHED)


def quantised_rates(names: Iterable[str], matmul: float) -> dict[str, float]:
    """Return the FLOP/s of matmul by the dtype of quantised weights, for GPUs whose bf16 matmul was measured.

    A known card is taken to keep its ratio of a quantised rate to bf16. The slowest GPU counts. Without a known card, or where
    a card does not multiply a dtype, the result lacks it.

    Args:
        names: the driver's names of the GPUs.
        matmul: the measured FLOP/s in bf16.
    """
    devices = [cards()[card].device if card else None for card in map(card_of, names)]
    rates: dict[str, float] = {}
    for dtype in QUANTISED:
        ratios = [device.quantised.get(dtype, 0.0) / device.matmul if device else 0.0 for device in devices]
        if slowest := min(ratios, default=0.0):
            rates[dtype] = matmul * slowest
    return rates
