"""PipeFusion's attention (arXiv 2405.14430): one patch's queries attend to a cache of all tokens' keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transfers import to_device
from .online_softmax import OnlineSoftmax
from .sequence_parallel import UspLayout, ulysses_attention


class KVCache:
    """Keys and values of all tokens for one attention of one block, kept from model call to model call.

    They are sharded as attention is: this Ulysses rank's heads of this ring rank's tokens.

    Args:
        slots: for each patch, the positions of its tokens in the cache (int64), in the order of the patch's own all-to-all.
            `update` moves them to the device in place, for all caches that share the list.
    """

    def __init__(self, slots: list[Tensor]) -> None:
        self._slots = slots
        self._kv: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the keys and values."""
        return 0 if self._kv is None else self._kv.nbytes

    def fill(self, kv: Tensor) -> None:
        """Keep keys and values of all tokens, `[2, batch, tokens, heads, head_dim]`. The cache owns the tensor from now on."""
        self._kv = kv

    def update(self, patch: int, k: Tensor, v: Tensor) -> Tensor:
        """Replace the keys and values of one patch.

        Args:
            patch: the patch's number.
            k: `[batch, patch tokens, heads, head_dim]`.
            v: as k.

        Returns:
            The keys and values of all tokens, `[2, batch, tokens, heads, head_dim]`.
        """
        assert self._kv is not None, "the cache is filled by a call of all tokens"
        slots = self._slots[patch] = to_device(self._slots[patch], self._kv.device)
        self._kv[0].index_copy_(1, slots, k)
        self._kv[1].index_copy_(1, slots, v)
        return self._kv


def patch_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: UspLayout, patch: int, cache: KVCache, prefix: Tensor | None = None
) -> Tensor:
    """Compute attention of one patch's tokens to all tokens. A collective.

    The patch's keys and values go into the cache first. Queries are few, so they go to all ring ranks and outputs come back.

    Args:
        q: `[batch, local patch tokens, heads, head_dim]`.
        k: `[batch, local patch tokens, key heads, head_dim]`.
        v: as k.
        layout: the state for the patch's tokens, with one chunk of heads.
        patch: the patch's number.
        cache: keys and values of all tokens.
        prefix: further keys and values that every rank has, as in `usp_attention`.

    Returns:
        Attention output of the local patch tokens, shape and dtype of q.
    """
    (heads,) = layout.ulysses.heads
    head_prefix = None if prefix is None else prefix[:, :, :, heads.kv]

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attend_over_ring(q, cache.update(patch, k, v), layout, head_prefix)

    return ulysses_attention(q, k, v, layout.ulysses, attend)


def _attend_over_ring(q: Tensor, kv: Tensor, layout: UspLayout, prefix: Tensor | None) -> Tensor:
    """Return attention of this ring rank's queries to the cached keys of all ring ranks."""
    ring, codec, (kernel,) = layout.ring, layout.codec, layout.kernels
    if ring.size == 1:
        k, v = kv if prefix is None else torch.cat((prefix, kv), dim=2)
        return kernel(q, k, v)[0] if q.numel() else q
    encoded = codec.encode(q)
    gathered = ring.all_gather(encoded.flatten(2), layout.ring_tokens).unflatten(2, encoded.shape[2:])
    queries = codec.decode(gathered, q.dtype)
    if queries.numel() and kv.numel():
        out, lse = kernel(queries, kv[0], kv[1])
        lse = lse.transpose(1, 2).unsqueeze(-1)
    else:
        out = torch.zeros_like(queries)
        lse = queries.new_full((*queries.shape[:3], 1), -torch.inf, dtype=torch.float32)
    merged = OnlineSoftmax(q)
    if prefix is not None and q.numel() and prefix.numel():
        merged.add(*kernel(q, *prefix))
    outputs = _return_to_owners(codec.encode(out), layout)
    for part, part_lse in zip(outputs, _return_to_owners(lse, layout, "ring lse"), strict=True):
        merged.add(codec.decode(part, q.dtype), part_lse.squeeze(-1).transpose(1, 2))
    return merged.result()


def _return_to_owners(results: Tensor, layout: UspLayout, kind: str = "") -> list[Tensor]:
    """Send results `[batch, all ring ranks' queries, heads, channels]` to the ranks of the queries.

    Returns:
        The result of each ring rank for this rank's queries, `[batch, queries, heads, channels]`; nothing without queries.
    """
    ring, tokens = layout.ring, layout.ring_tokens
    batch, _, heads, channels = results.shape
    row, local = batch * heads * channels, tokens[ring.rank]
    send = torch.cat([piece.reshape(-1) for piece in results.split(tokens, dim=1)])
    received = ring.all_to_all(send, [row * count for count in tokens], [row * local] * ring.size, kind)
    return [piece.view(batch, local, heads, channels) for piece in received.chunk(ring.size)] if local else []
