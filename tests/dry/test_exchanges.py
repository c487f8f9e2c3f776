"""The order of a rank's operations for attention over ranks: chunks of heads overlap with compute, hops are collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.sequence_parallel import UspLayout, ring_attention, usp_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.layout import SequenceSplit
from parallel_backend.mesh import build_mesh
from tests.support.plans import gpu_plan

from .fake_gpu import DEVICE, Counts, FakeGpu

RANKS, TOKENS, HEAD_DIM = 4, 7, 128
ATTENTION = "_scaled_dot_product_cudnn_attention"
PACKED = ["copy_"] * 3
SENT = "alltoall_base_"


class Noted(Meter):
    """A meter that notes among the kernels when the device's stream is told to wait for received data."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(device=DEVICE)
        self._gpu = gpu

    @contextmanager
    def wait(self, kind: str) -> Iterator[None]:
        with super().wait(kind):
            self._gpu.counts.order.append("wait")
            yield


def counts(axis: str, heads: int, chunks: int = 1) -> Counts:
    """Return the counts of an attention whose ranks are all on one axis, with its waits among the kernels."""
    gpu = FakeGpu()
    with gpu.running(0, RANKS):
        mesh = build_mesh(gpu_plan(**{axis: RANKS}), DEVICE, Noted(gpu))
        q = torch.empty(1, TOKENS, heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        attend = choose_kernel("sdpa", DEVICE, q.dtype, HEAD_DIM, {}).attend
        tokens = (TOKENS,) * RANKS
        gpu.begin()
        if axis == "ring":
            ring_attention(q, torch.stack((q, q)), mesh.ring, tokens, attend)
        else:
            split = SequenceSplit(tokens, heads, 1, RANKS, (1,) * RANKS, heads)
            usp_attention(q, q, q, UspLayout(mesh, split, attend, chunks))
        return gpu.counts


def test_while_a_chunk_is_computed_the_next_arrives_and_the_last_leaves() -> None:
    there = [*PACKED, SENT]
    first, others, last = [*there, "wait", *there], ["wait", *there], ["wait"]
    computed = [ATTENTION, SENT]
    expected = [*first, *computed, *others, *computed, *last, *computed, *["wait"] * 3, "cat"]
    assert counts("ulysses", 12, 3).order == expected


@pytest.mark.parametrize(("heads", "chunks"), [(4, 3), (12, 1), (7, 4)])
def test_without_a_second_chunk_on_every_rank_all_heads_are_exchanged_at_once(heads: int, chunks: int) -> None:
    """Without chunks there are no extra streams: the wait comes with the collective."""
    packs = 3 if heads % RANKS == 0 else 3 * RANKS
    expected = [*["copy_"] * packs, "wait", SENT, ATTENTION, "wait", SENT, "cat"]
    assert counts("ulysses", heads, chunks).order == expected


def test_hops_of_ring_are_collectives() -> None:
    """NCCL's send and recv would keep each hop's buffers until the GPU gets there."""
    assert counts("ring", 2).collectives == {SENT: RANKS - 1}
