"""Ring's hops are collectives: NCCL's send and recv would keep each hop's buffers until the GPU gets there."""

from __future__ import annotations

import torch

from parallel_backend.attention.kernels import choose_kernel
from parallel_backend.attention.sequence_parallel import ring_attention
from parallel_backend.comm.meter import Meter
from parallel_backend.mesh import build_mesh

from .fake_gpu import DEVICE, FakeGpu
from .lone_rank import plan_of

RANKS, TOKENS, HEADS, HEAD_DIM = 4, 7, 2, 128


def test_hops_of_ring_are_collectives() -> None:
    gpu = FakeGpu()
    with gpu.running(0, RANKS):
        mesh = build_mesh(plan_of(4, 1, {"ring": RANKS}), DEVICE, Meter())
        gpu.begin()
        q = torch.empty(1, TOKENS, HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        attend = choose_kernel("sdpa", DEVICE, q.dtype, HEAD_DIM, {}).attend
        ring_attention(q, torch.stack((q, q)), mesh.ring, [TOKENS] * RANKS, attend)
    assert gpu.counts.collectives == {"alltoall_base_": RANKS - 1}
