"""Machines that one can buy: the cards of `cards.json` with their usual links.

Figures marked "fitted" come from published measurements (docs/measured/plan-predictions.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .cards import cards
from .lookup import looked_up
from .profiles import Level, Profile

GIGA = 1e9
MICRO = 1e-6

# Two GPUs share a root port, and two pairs a socket. The port of a socket is the link to the other socket.
# Their bandwidth is fitted on the L40's rows.
PCIE4 = (
    Level(2, 22 * GIGA, 60 * MICRO),
    Level(4, 22 * GIGA, 60 * MICRO),
    Level(8, 22 * GIGA, 70 * MICRO),
)

PCIE5 = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in PCIE4)

# Without peer-to-peer, data is copied through host memory: about two thirds of the bandwidth, and more latency.
HOST_COPY4 = tuple(Level(level.size, level.bandwidth / 1.5, 2 * level.latency) for level in PCIE4)
HOST_COPY5 = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in HOST_COPY4)

NVLINK_LATENCY = 52 * MICRO  # fitted

ETHERNET_200 = Level(1024, 22 * GIGA, 80 * MICRO)  # a 200 Gbit port for each GPU
ETHERNET_100 = Level(1024, 11 * GIGA, 80 * MICRO)  # one 100 Gbit port a node, shared by its GPUs
ETHERNET_10 = Level(1024, 1.1 * GIGA, 150 * MICRO)
INFINIBAND = Level(1024, 8 * 22 * GIGA, 60 * MICRO)  # a 200 Gbit port for each GPU of a node

LINKS: Mapping[str, tuple[Level, ...]] = {
    "host copy over pcie 4": (*HOST_COPY4, ETHERNET_100),
    "host copy over pcie 5": (*HOST_COPY5, ETHERNET_100),
    "pcie 4": (*PCIE4, ETHERNET_100),
    "pcie 5": (*PCIE5, ETHERNET_100),
    "nvlink 2": (Level(8, 100 * GIGA, NVLINK_LATENCY), INFINIBAND),
    "nvlink 3": (Level(8, 200 * GIGA, NVLINK_LATENCY), INFINIBAND),
    "nvlink 4": (Level(8, 300 * GIGA, NVLINK_LATENCY), INFINIBAND),
    "nvlink 5": (Level(8, 600 * GIGA, NVLINK_LATENCY), INFINIBAND),
    "ethernet 200": (ETHERNET_200,),
}
"""The levels between cards, innermost first, by the name of a card's usual links."""

OVERLAP = 0.63
"""The fraction of a transfer that overlaps with compute on links that are not NVLink (fitted)."""

OTHER_NETWORKS = {"a100-100gbit": ("a100", ETHERNET_100), "a100-10gbit": ("a100", ETHERNET_10)}
"""Cards with NVLink whose nodes have a slower network: the card and the network by the machine's name."""


def _profiles() -> dict[str, Profile]:
    """Return the machines by name."""
    found = {
        name: Profile(
            name,
            card.device,
            LINKS[card.links],
            overlap=1.0 if card.links.startswith("nvlink") else OVERLAP,
            compares_compiled=True,
        )
        for name, card in cards().items()
    }
    for name, (card, network) in OTHER_NETWORKS.items():
        machine = found[card]
        found[name] = replace(machine, name=name, levels=(*machine.levels[:-1], network))
    return found


def profile(name: str) -> Profile:
    """Return a machine with one kind of card, by name. Raise Refused as `looked_up` does."""
    return looked_up("card", name, _profiles())


def profile_names() -> list[str]:
    """Return the names that `profile` knows."""
    return list(_profiles())


def linked(machine: Profile, bandwidth: float) -> Profile:
    """Return the machine with every card on one link of `bandwidth` bytes/s in each direction."""
    return replace(machine, levels=(Level(1024, bandwidth, machine.levels[0].latency),))
