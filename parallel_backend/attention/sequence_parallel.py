"""Attention of a sequence that is sharded over the ring x ulysses ranks of a mesh: Ulysses, Ring and their product.

Each rank passes q, k and v of its own tokens, `[batch, local tokens, heads, head_dim]`. It receives the attention output of
these tokens in the same shape and dtype. The functions take a layout object, which is built once for each split of tokens.

| function | collectives | paper |
|---|---|---|
| `ulysses_attention` | all-to-all before and after the kernel | DeepSpeed-Ulysses, arXiv 2309.14509 |
| `ring_attention` | ring size - 1 shifts to the next rank, each overlapped with the kernel | Ring Attention, arXiv 2310.01889 |
| `usp_attention` | Ulysses inside each ring rank, Ring outside | USP, arXiv 2405.07719 |
| `replicated_query_attention` | one all-gather | FlashAttention's merge, arXiv 2205.14135 |

Sequence rank = ring rank * Ulysses size + Ulysses rank. `layout.SequenceSplit` holds the counts for all of them.

**Uneven tokens.** Ranks may hold different numbers of tokens, also none. Every collective has explicit sizes for each rank, so
nothing is padded. Attention does not depend on the order of tokens, because models apply positions to q and k beforehand.

**Uneven heads.** The Ulysses size need not divide the number of heads: `SequenceSplit.head_counts` gives ranks different
numbers. A rank has none if there are fewer heads than ranks. With grouped queries each rank receives the key heads that its
query heads share. A key head whose group lies on two ranks goes to both.

Other files: `ulysses.py` has the all-to-all, `online_softmax.py` the merge and `codec.py` fp8. `kernels.py` chooses a kernel.
`patches.py` computes PipeFusion's patches with a cache. `function_attention.py` calls a node's function in place of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..layout import SequenceSplit
from ..mesh import Mesh
from .codec import EXACT, Codec
from .online_softmax import OnlineSoftmax
from .packages import AttentionKernel
from .ulysses import UlyssesLayout, concatenate_heads, encode_operands, repeat_kv_heads


class UspLayout:
    """The state that `usp_attention` and `patch_attention` need for one split of tokens and heads.

    Args:
        mesh: the rank's communicators; `ring` and `ulysses` are used.
        split: the tokens of each rank and the numbers of heads.
        kernel: computes attention of one rank's heads; key heads are repeated for it.
        max_chunks: the largest number of chunks that exchange their heads separately.
        codec: encodes tensors that are sent to other ranks.
    """

    def __init__(
        self, mesh: Mesh, split: SequenceSplit, kernel: AttentionKernel, max_chunks: int = 1, codec: Codec = EXACT
    ) -> None:
        self.ring = mesh.ring
        self.ring_tokens = split.ring_tokens()
        self.codec = codec
        tokens = split.ulysses_tokens(mesh.ring.rank)
        self.ulysses = UlyssesLayout(mesh.ulysses, tokens, split, max_chunks, codec)
        self.kernels = [repeat_kv_heads(kernel, split.group_size, heads) for heads in self.ulysses.heads]


def usp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: UspLayout,
    prefix: Tensor | None = None,
    keep_kv: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Compute attention of all tokens to all tokens: Ulysses inside each ring rank, Ring over ring ranks. A collective.

    Args:
        q: `[batch, local tokens, heads, head_dim]`.
        k: `[batch, local tokens, key heads, head_dim]`.
        v: as k.
        layout: the state for this split of tokens and heads.
        prefix: keys and values `[2, batch, prefix tokens, key heads, head_dim]` that every rank has. All queries attend to them.
        keep_kv: receives the keys and values of this ring rank, `[2, batch, ring rank's tokens, this rank's heads, head_dim]`,
            which it may keep. The layout must have one chunk.

    Returns:
        Attention output of the local tokens, shape and dtype of q.
    """
    assert keep_kv is None or len(layout.kernels) == 1

    def attend_chunk(chunk: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = layout.kernels[chunk]
        chunk_prefix = None if prefix is None else prefix[:, :, :, layout.ulysses.heads[chunk].kv]
        if layout.ring.size == 1 and keep_kv is None:
            if chunk_prefix is not None:
                k, v = (torch.cat(pair, dim=1) for pair in zip(chunk_prefix, (k, v), strict=True))
            return kernel(q, k, v)[0] if q.numel() else q
        kv = torch.stack((k, v))
        if keep_kv is not None:
            keep_kv(kv)
        return ring_attention(q, kv, layout.ring, layout.ring_tokens, kernel, layout.codec, chunk_prefix)

    return ulysses_attention(q, k, v, layout.ulysses, attend_chunk)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: UlyssesLayout,
    attend_chunk: Callable[[int, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute attention with DeepSpeed-Ulysses. A collective.

    An all-to-all gives each rank all tokens of some heads; another one sends the outputs back. With several chunks of heads,
    communication overlaps with computation: while one chunk is computed, the next arrives and the previous one leaves.

    Args:
        q: `[batch, local tokens, heads, head_dim]`.
        k: `[batch, local tokens, key heads, head_dim]`.
        v: as k.
        layout: the all-to-alls for this split of tokens and heads.
        attend_chunk: computes attention of one chunk of this rank's heads over all tokens of the Ulysses ranks. Its arguments
            are the chunk's number, q, k and v `[batch, all ranks' tokens, chunk's heads, head_dim]`.

    Returns:
        Attention output of the local tokens, shape and dtype of q.
    """
    codec = layout.codec
    q, k, v, decode = encode_operands(codec, q, k, v)
    wait_for_operands = layout.exchanges[0].start_to_heads(q, k, v, decode)
    waits_for_outputs = []
    for chunk, exchange in enumerate(layout.exchanges):
        operands = wait_for_operands()
        if chunk + 1 < len(layout.exchanges):
            wait_for_operands = layout.exchanges[chunk + 1].start_to_heads(q, k, v, decode)
        out = attend_chunk(chunk, *operands)
        waits_for_outputs.append(exchange.start_to_tokens(codec.encode(out)))
    return codec.decode(concatenate_heads([wait() for wait in waits_for_outputs]), out.dtype)


def ring_attention(
    q: Tensor,
    kv: Tensor,
    ring: Communicator,
    ring_tokens: Sequence[int],
    kernel: AttentionKernel,
    codec: Codec = EXACT,
    prefix: Tensor | None = None,
) -> Tensor:
    """Compute attention of the local queries to the keys of all ring ranks. A collective.

    Blocks of keys and values go round the ring. While a rank computes attention to one block, it receives the next. The
    results are merged by log-sum-exp in fp32.

    Args:
        q: `[batch, local queries, heads, head_dim]`.
        kv: keys and values `[2, batch, local keys, key heads, head_dim]`; the kernel takes so many key heads.
        ring: the ranks.
        ring_tokens: the number of keys on each ring rank.
        kernel: computes attention and its log-sum-exp.
        codec: encodes keys and values. A rank decodes its own too, so that all ranks compute with the same values.
        prefix: further keys and values, shaped as kv, that every rank has. They are not sent.

    Returns:
        Attention output of the local queries, shape and dtype of q.
    """
    merged, block = OnlineSoftmax(q), codec.encode(kv)
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        wait_for_block: Callable[[], Tensor] | None = None
        if hop + 1 < ring.size:
            next_shape = (2, q.shape[0], ring_tokens[(source - 1) % ring.size], *block.shape[3:])
            wait_for_block = ring.start_shift(block.reshape(-1), torch.Size(next_shape).numel())
        hop_prefix = prefix if hop == 0 else None
        if q.numel() and (block.numel() or hop_prefix is not None):
            decoded = codec.decode(block, q.dtype)
            k, v = decoded if hop_prefix is None else torch.cat((hop_prefix, decoded), dim=2)
            merged.add(*kernel(q, k, v))
        if wait_for_block is not None:
            block = wait_for_block().view(next_shape)
    return merged.result()


def replicated_query_attention(ranks: Communicator, kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention of queries that every rank has to keys that are sharded over the ranks. A collective.

    Each rank attends to its own keys. An all-gather shares the outputs, which every rank merges in rank order.

    Args:
        ranks: the ranks that hold the keys.
        kernel: computes attention and its log-sum-exp.
        q: `[batch, queries, heads, head_dim]`, equal on all ranks.
        k: `[batch, local keys, heads, head_dim]`; there may be none.
        v: as k.

    Returns:
        Attention output, shape and dtype of q, the same bits on all ranks.
    """
    if k.shape[1]:
        out, lse = kernel(q, k, v)
        lse = lse.transpose(1, 2).unsqueeze(-1).float()
    else:
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
    local = torch.cat([out.float(), lse], dim=-1)
    gathered = ranks.all_gather(local.flatten(2), [q.shape[1]] * ranks.size).unflatten(2, local.shape[2:])
    merged = OnlineSoftmax(q)
    for result in gathered.chunk(ranks.size, dim=1):
        merged.add(result[..., :-1], result[..., -1].transpose(1, 2))
    return merged.result()
