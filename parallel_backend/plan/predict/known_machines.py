"""Machines that one can buy: the cards of `cards.json`, their usual links, and the software on them.

Figures marked "fitted" come from one- and two-GPU rows of published measurements. `benchmarks/plan_predictions.py --fit`
computes them again.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import Refused
from .cards import cards
from .profiles import CHUNK, PATCHED, RING, RING_HOP, ULYSSES, Level, Profile, Software

GIGA = 1e9
MICRO = 1e-6

# This project's code. The operations of its blocks are part of the models. Host times were measured on one CPU core with tiny
# tensors. FLUX's blocks take 0.8 of the host time of diffusers' for 0.38 of the operations (docs/measured/dry-run.md). Ring's
# added operations take 0.7 each.
EAGER = Software(
    ulysses=ULYSSES,
    chunk=CHUNK,
    ring=RING,
    ring_hop=RING_HOP,
    patched=PATCHED,
    all_to_alls=2,
    passes=157,
    merge_bytes=50,
    hop=99 * MICRO,
    launch=2.1,
    added_launch=0.7,
)

# torch.compile fuses the operations between matmuls, attention and collectives, and starts each in 7 µs, without Python.
FUSED_PASSES, FUSED_LAUNCH = 8, 0.2

# The compiler does not look into the attention operator, which includes all operations that Ulysses and Ring add.
COMPILED = replace(EAGER, passes=FUSED_PASSES, launch=FUSED_LAUNCH)

FUSING = {"inductor": COMPILED}
"""The compiled software, by torch.compile's backend. Other backends, such as cudagraphs, fuse nothing."""

# xDiT's code around diffusers' modules, for which the host time was fitted. The numbers of attention's operations come from its
# source, with four operations per all-to-all. Its merge of partial attention is TorchScript and counts as one operation.
XDIT_EAGER = replace(
    EAGER, ulysses=16, chunk=0, ring=11, ring_hop=9, patched=0, all_to_alls=4, launch=1.0, added_launch=1.0
)

XDIT_COMPILED = replace(XDIT_EAGER, passes=FUSED_PASSES, merge_bytes=30, launch=FUSED_LAUNCH, added_launch=FUSED_LAUNCH)

NVLINK4 = Level(8, 300 * GIGA, 52 * MICRO)
NVLINK5 = Level(8, 600 * GIGA, 52 * MICRO)
NVLINK2 = Level(8, 100 * GIGA, 52 * MICRO)
NVLINK3 = Level(8, 200 * GIGA, 52 * MICRO)
INFINIBAND = Level(1024, 8 * 22 * GIGA, 60 * MICRO)  # a 200 Gbit port for each GPU of a node

# Two GPUs share a root port, and two pairs a socket. The port of a socket is the link to the other socket.
PCIE4 = (
    Level(2, 9.4 * GIGA, 60 * MICRO),
    Level(4, 9.4 * GIGA, 60 * MICRO),
    Level(8, 9.4 * GIGA, 70 * MICRO),
)

PCIE5 = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in PCIE4)

# Without peer-to-peer, data is copied through host memory: half the bandwidth, and more latency.
HOST_COPY = tuple(Level(level.size, level.bandwidth / 2, 2 * level.latency) for level in PCIE4)
HOST_COPY5 = tuple(replace(level, bandwidth=2 * level.bandwidth) for level in HOST_COPY)  # PCIe 5

PCIE_OVERLAP = 0.63  # fitted

ETHERNET_100 = Level(1024, 11 * GIGA, 80 * MICRO)  # one 100 Gbit port a node, shared by its GPUs
ETHERNET_10 = Level(1024, 1.1 * GIGA, 150 * MICRO)


def _profiles() -> dict[str, Profile]:
    def pcie(card: str, levels: tuple[Level, ...] = PCIE4) -> Profile:
        return Profile(card, cards()[card].device, (*levels, ETHERNET_100), PCIE_OVERLAP, EAGER, compiled=COMPILED)

    def nvlink(card: str, link: Level, network: Level = INFINIBAND, over: str = "") -> Profile:
        return Profile(card + over, cards()[card].device, (link, network), 1.0, EAGER, compiled=COMPILED)

    profiles = (
        pcie("3090", HOST_COPY),
        pcie("4090", HOST_COPY),
        pcie("5060-ti", HOST_COPY),  # eight lanes
        pcie("5080", HOST_COPY5),
        pcie("5090", HOST_COPY5),
        pcie("pro-5000", PCIE5),
        pcie("pro-6000", PCIE5),
        pcie("a6000"),
        pcie("l4"),
        pcie("l20"),
        pcie("l40"),
        pcie("l40s"),
        nvlink("v100", NVLINK2),
        nvlink("a100", NVLINK3),
        nvlink("h100", NVLINK4),
        nvlink("h200", NVLINK4),
        nvlink("b200", NVLINK5),
        nvlink("a100", NVLINK3, ETHERNET_100, over="-100gbit"),
        nvlink("a100", NVLINK3, ETHERNET_10, over="-10gbit"),
    )
    return {profile.name: profile for profile in profiles}


def software(compiler: str) -> Software:
    """Return this project's software with blocks compiled by a backend of torch.compile; eager if `compiler` is empty."""
    return FUSING.get(compiler, EAGER)


def profile(name: str) -> Profile:
    """Return a machine with one kind of card, by name.

    Raises:
        Refused: the name is unknown.
    """
    known = _profiles()
    if name not in known:
        raise Refused(f"the card {name!r} is unknown: use {', '.join(known)}.")
    return known[name]


def profile_names() -> list[str]:
    """Return the names that `profile` knows."""
    return list(_profiles())


def linked(machine: Profile, bandwidth: float) -> Profile:
    """Return the machine with every card on one link of `bandwidth` bytes/s in each direction."""
    return replace(machine, levels=(Level(1024, bandwidth, machine.levels[0].latency),))
