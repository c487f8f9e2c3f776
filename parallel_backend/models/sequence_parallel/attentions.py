"""The calls of attention of a block, on the ranks that divide its tokens, in the declared order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...attention.codec import EXACT, FP8, SCALE_BYTES, Codec
from ...attention.kernels import choose_kernel, is_approximate
from ...attention.packages import AttentionKernel, package_failures
from ...attention.patches import KVCache, patch_attention
from ...attention.sequence_parallel import UspLayout, replicated_query_attention, usp_attention
from ...declaration import (
    Attention,
    DistributedAttention,
    HeadParallelAttention,
    PrefixedAttention,
    ReplicatedKeys,
    ReplicatedQueries,
)
from ...errors import Refused
from ...layout import SequenceSplit
from ...mesh import Mesh
from ...plan import ResolvedPlan
from .call_layout import CallLayout
from .placement import Placement, slots_of
from .token_layout import TokenLayout

Kernel = Callable[..., Tensor]


class Overriding(Protocol):
    """An attention override, which computes attention in place of the kernels."""

    def __call__(self, block: BlockCall | None, attention: Attention, kernel: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute one call of attention.

        Args:
            block: the running block.
            attention: the declaration of this call.
            kernel: ComfyUI's own kernel.
            args: the further positional arguments of `Attentions.__call__`.
            kwargs: the further keyword arguments of `Attentions.__call__`.
        """

    def of_heads(self, run: slice, heads: int) -> Kernel:
        """Return the function for all tokens and the range `run` of `heads` heads. Its first argument is ComfyUI's kernel."""


EXACT_ATTENTION = "auto"
"""The choice of kernels that replaces an approximate choice for calls that must be exact."""

OF_THE_CALL = frozenset({"transformer_options", "_inside_attn_wrapper", "enable_gqa", "preferred_attention"})
"""Names of arguments of attention that do not change its result."""

SCALE, LOW_PRECISION = "scale", "low_precision_attention"
"""Names of arguments: a factor of the scores, in place of 1 / sqrt(head_dim); and a flag that allows approximate kernels."""

CHANGES_NOTHING: Mapping[str, tuple[object, ...]] = MappingProxyType({LOW_PRECISION: (True, False), SCALE: (None,)})
"""Values of arguments that our kernels support without a change; LOW_PRECISION selects the kernel."""


def unknown(arguments: Mapping[str, Any]) -> list[str]:
    """Return the names of arguments that our kernels do not support, sorted. `arguments` does not include the operands."""
    return sorted(
        name
        for name, value in arguments.items()
        if name not in OF_THE_CALL
        and not (name == SCALE and isinstance(value, (int, float)))
        and not any(value is known for known in CHANGES_NOTHING.get(name, ()))
    )


def attention_refused(names: Sequence[str]) -> Refused:
    """Return the error for arguments of the model's attention that our kernels do not support."""
    return Refused(
        f"the model's attention was given {', '.join(names)}, which this pack does not support: update the pack, or "
        "use Load Diffusion Model."
    )


def attends_alone(mesh: Mesh, patches: int, choice: str) -> bool:
    """Return True if ComfyUI's own kernels compute all attention.

    They do if one rank holds all tokens, no keys and values are cached from call to call, and the user chose no approximate
    kernel.
    """
    return mesh.sequence.size == 1 and patches == 1 and not is_approximate(choice)


@dataclass(frozen=True)
class Operands:
    """The operands of one call of ComfyUI's `optimized_attention`: q, k and v, each `[batch, heads, tokens, head_dim]`.

    `exact` is True if no approximate kernel may compute the call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    exact: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, heads: int, skip_reshape: bool, arguments: Mapping[str, Any]
    ) -> Operands:
        """Return the operands of a call from its arguments.

        Raises:
            Refused: our kernels do not support one of the arguments.
        """
        if names := unknown(arguments):
            raise attention_refused(names)
        if not skip_reshape:
            q, k, v = (x.reshape(*x.shape[:2], heads, x.shape[2:].numel() // heads).transpose(1, 2) for x in (q, k, v))
        if (scale := arguments.get(SCALE)) is not None:
            q = q * (scale * q.shape[3] ** 0.5)  # kernels divide by the root of the width
        return cls(q, k, v, exact=arguments.get(LOW_PRECISION) is False)

    def weighed(self, weights: Tensor) -> Operands:
        """Return operands with two more channels, whose product adds a logarithmic weight to the scores.

        The weight applies to scores between a token with a weight and a token without. So no kernel and no exchange has to
        support weights. `weights` is `[tokens, 2]` as `declaration.AttentionBias` defines it. Kernels divide scores by the root
        of the width, which grows to a multiple of 8.
        """
        width = self.q.shape[3]
        wide = (width + 2 + 7) // 8 * 8
        q, k, v = (nn.functional.pad(x, (0, wide - width)) for x in (self.q * (wide / width) ** 0.5, self.k, self.v))
        logarithms, plain = weights.to(q).unbind(1)
        q[..., width], k[..., width] = plain * wide**0.5, logarithms
        q[..., width + 1], k[..., width + 1] = logarithms, plain * wide**0.5
        return replace(self, q=q, k=k, v=v)


@dataclass
class BlockCall:
    """One call of the running block, as its attentions need it.

    Attributes:
        number: the number of the block among the blocks of all stages.
        turn: the number of times that the block ran in this forward before.
        name: the name of the block's class, for messages.
        attentions: the calls of attention that the block makes, in order.
        placements: the placements of its streams, by name.
        absent: the names of declared arguments that this call does not pass.
        options: its transformer_options.
        passes_options: True if the block passes its transformer_options to attention.
        done: the number of calls of attention so far.
    """

    number: int
    turn: int
    name: str
    attentions: Sequence[Attention]
    placements: dict[str, Placement]
    absent: Collection[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    passes_options: bool = True
    done: int = 0

    def __post_init__(self) -> None:
        self.prefix = next(
            (
                self.placements[each.stream].replicated
                for each in self.attentions
                if isinstance(each, PrefixedAttention)
            ),
            None,
        )
        """The number of tokens of a `PrefixedTokens` stream that every rank holds; None for a block without such a stream."""
        self.attentions = [attention for attention in self.attentions if not self._empty(attention)]

    def _empty(self, attention: Attention) -> bool:
        if isinstance(attention, HeadParallelAttention):
            return False
        if isinstance(attention, PrefixedAttention):
            return self.placements[attention.stream].everywhere
        if not attention.is_called(self.options):
            return True
        name = ""
        if isinstance(attention, ReplicatedQueries):
            name = attention.queries
        elif isinstance(attention, ReplicatedKeys):
            name = attention.source
        return name in self.absent or (name in self.placements and self.placements[name].length == 0)

    def in_prefix(self, queries: int, keys: int) -> bool:
        """Return True for a call of so many queries and keys that all lie in the prefix, which every rank has."""
        return self.prefix is not None and 0 < queries <= keys <= self.prefix

    def next(self) -> Attention:
        """Return the declaration of the next call of attention.

        Raises:
            Refused: the block makes more calls than declared.
        """
        if self.done == len(self.attentions):
            raise Refused(
                f"the model's {self.name} calls attention more than {len(self.attentions)} times: this ComfyUI or diffusers is "
                "newer or older than this pack knows; update the pack, or use Load Diffusion Model."
            )
        self.done += 1
        return self.attentions[self.done - 1]

    def finish(self) -> None:
        """Raise Refused if the block made fewer calls of attention than declared."""
        if self.done != len(self.attentions):
            raise Refused(
                f"the model's {self.name} called attention {self.done} times and this pack expects "
                f"{len(self.attentions)}: update the pack, or use Load Diffusion Model."
            )


@dataclass
class Caches:
    """The keys and values of one set of prompts, for PipeFusion."""

    by_attention: dict[tuple[int, int, int], KVCache] = field(default_factory=dict)

    def new(self, key: tuple[int, int, int], slots: list[Tensor]) -> KVCache:
        """Return an empty cache for one call of attention. The key is (block, turn, index of the call in the block)."""
        self.by_attention[key] = KVCache(slots)
        return self.by_attention[key]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all caches."""
        return sum(cache.nbytes for cache in self.by_attention.values())


class Attentions:
    """The object that computes a model's calls of attention during one forward.

    Args:
        plan: selects the kernels, the number of chunks in which heads are exchanged, and the codec of the exchange.
        caches: the keys and values that are kept from call to call if the latent is cut into patches; otherwise None.
    """

    def __init__(self, call: CallLayout, mesh: Mesh, plan: ResolvedPlan, caches: Caches | None) -> None:
        self._call = call
        self._mesh = mesh
        self._choice = choice = plan.attention
        self._head_chunks = plan.head_chunks
        self._codec: Codec = FP8 if plan.exchange == "fp8" else EXACT
        self._caches = caches
        self._alone = caches is None and attends_alone(mesh, 1, choice)
        self.block: BlockCall | None = None
        self.device = call.device
        self.overriding: Overriding | None = None
        """The attention override. It computes the calls to which the model passes its transformer_options."""

    def __call__(
        self,
        kernel: Kernel | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **extra_arguments: Any,
    ) -> Tensor:
        """Compute one call of `optimized_attention` on this rank's tokens. Depending on the plan, a collective.

        `kernel` is ComfyUI's own kernel. If it is None, the plan's kernel takes its place. ComfyUI's own kernel gets all
        `extra_arguments`.

        Raises:
            Refused: the call differs from the block's declaration, or one of our kernels would have to compute and does not
                support an argument.
        """
        block, dim = self.block, 2 if skip_reshape else 1
        if block is not None and block.in_prefix(q.shape[dim], k.shape[dim]):
            block = None
        attention = block.next() if block is not None else ReplicatedKeys()
        if isinstance(attention, HeadParallelAttention):
            assert block is not None
            raise Refused(
                f"the model's {block.name} calls attention and this pack expects {attention.method} of its "
                f"{attention.module}: update the pack, or use Load Diffusion Model."
            )
        if self.overriding is not None and (block is None or block.passes_options):
            return self.overriding(
                block, attention, kernel, q, k, v, heads, mask=mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape, **extra_arguments,
            )  # fmt: skip
        alone = self._alone
        if isinstance(attention, PrefixedAttention) and not alone:
            assert block is not None
            if mask is not None:
                raise attention_refused(["mask"])
            out = self._after_prefix(block, attention, Operands.of(q, k, v, heads, skip_reshape, extra_arguments))
            return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)
        distributed = isinstance(attention, DistributedAttention)
        weights = mask if isinstance(attention, DistributedAttention) and attention.biased else None
        if isinstance(attention, ReplicatedQueries) and self._mesh.sequence.size > 1:
            assert block is not None
            operands = shared_heads(
                self._call.layout, block, heads, Operands.of(q, k, v, heads, skip_reshape, extra_arguments)
            )
            out = self._merged(block, attention, operands)
            return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)
        if not distributed or (alone and weights is None and not self._masked(attention)):
            return (kernel or self._product)(
                q, k, v, heads, mask=None if distributed else mask, attn_precision=attn_precision, skip_reshape=skip_reshape,
                skip_output_reshape=skip_output_reshape, **extra_arguments,
            )  # fmt: skip
        assert block is not None and isinstance(attention, DistributedAttention)
        kv_heads = attention.kv_heads or heads
        operands = shared_heads(
            self._call.layout, block, kv_heads, Operands.of(q, k, v, heads, skip_reshape, extra_arguments)
        )
        width = operands.v.shape[3]
        exactly = operands.exact or weights is not None
        out = self._distributed(block, attention, operands if weights is None else operands.weighed(weights), exactly)[
            ..., :width
        ]
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def of_heads(self, run: slice, heads: int) -> Kernel | None:
        """Return the function that computes attention for all tokens and some of the heads; None for ComfyUI's own kernel."""
        if self.overriding is not None:
            return self.overriding.of_heads(run, heads)
        return None if self._alone else self._of_all_tokens

    def _of_all_tokens(
        self,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **extra_arguments: Any,
    ) -> Tensor:
        if mask is not None:
            raise attention_refused(["mask"])
        operands = Operands.of(q, k, v, heads, skip_reshape, extra_arguments)
        attend = self.kernel(operands.q, operands.exact)
        out = attend(*(x.transpose(1, 2) for x in (operands.q, operands.k, operands.v)))[0]
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _masked(self, attention: Attention) -> bool:
        assert self.block is not None and isinstance(attention, DistributedAttention)
        return any(self._idle(self.block.placements[name]) for name in attention.streams)

    def _idle(self, placement: Placement) -> bool:
        return placement.counts[self._call.rank] == 0

    def _merged(self, block: BlockCall, attention: ReplicatedQueries, operands: Operands) -> Tensor:
        """Return attention of replicated queries, `[batch, tokens, heads, head_dim]`, the same on all ranks. A collective."""
        queries, keys = (
            block.placements[attention.queries].length,
            block.placements[attention.keys].counts[self._call.rank],
        )
        if operands.q.shape[2] != queries or operands.k.shape[2] != max(1, keys):
            raise Refused(
                f"the model's {block.name} attends with {operands.q.shape[2]} queries to {operands.k.shape[2]} keys "
                f"and this pack expects {queries} and {max(1, keys)}: update the pack, or use Load Diffusion Model."
            )
        q, k, v = (x.transpose(1, 2) for x in (operands.q, operands.k[:, :, :keys], operands.v[:, :, :keys]))
        return replicated_query_attention(self._mesh.sequence, self.kernel(q, operands.exact), q, k, v)

    def _distributed(
        self, block: BlockCall, attention: DistributedAttention, operands: Operands, exactly: bool
    ) -> Tensor:
        """Return `[batch, local tokens, heads, head_dim]`. `exactly` overrides the plan's codec. A collective."""
        placements = [block.placements[name] for name in attention.streams]
        padded_counts = [max(1, placement.counts[self._call.rank]) for placement in placements]
        if not operands.q.shape[2] == operands.k.shape[2] == sum(padded_counts):
            raise Refused(
                f"the model's {block.name} attends with {operands.q.shape[2]} queries to {operands.k.shape[2]} keys "
                f"and this pack expects {sum(padded_counts)}: update the pack, or use Load Diffusion Model."
            )
        return self._exchanged(block, placements, padded_counts, operands, exactly)

    def _after_prefix(self, block: BlockCall, attention: PrefixedAttention, operands: Operands) -> Tensor:
        """Return attention of a prefixed stream, `[batch, local tokens, heads, head_dim]`. A collective."""
        tokens, prefix, placement = without_prefix(self._call, block, attention, operands)
        return self._exchanged(block, [placement], [tokens.q.shape[2]], tokens, tokens.exact, prefix)

    def _exchanged(
        self,
        block: BlockCall,
        placements: Sequence[Placement],
        padded_counts: Sequence[int],
        operands: Operands,
        exactly: bool,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Return `[batch, local tokens, heads, head_dim]`; the operands have `padded_counts` tokens of each stream."""
        counts = [placement.counts[self._call.rank] for placement in placements]
        q, k, v = (without_idle(x, padded_counts, counts).transpose(1, 2) for x in (operands.q, operands.k, operands.v))
        kernel, layout = self.kernel(q, operands.exact), self._call.layout
        codec = EXACT if exactly or q.shape[3] % SCALE_BYTES else self._codec
        key = block.number, block.turn, block.done - 1
        chunks = self._head_chunks if self._caches is None else 1

        def make_layout() -> UspLayout:
            tokens = tuple(map(sum, zip(*(placement.counts for placement in placements), strict=True)))
            sizes = self._mesh.ring.size, self._mesh.ulysses.size
            split = SequenceSplit(tokens, q.shape[2], *sizes, layout.shares, k.shape[2])
            return UspLayout(self._mesh, split, kernel, chunks, codec)

        usp = layout.once(("usp", chunks, kernel, codec, q.shape[2], k.shape[2], *placements), make_layout)
        if layout.patch is None:
            keep_kv = None if self._caches is None else self._caches.new(key, self._slots(placements)).fill
            out = usp_attention(q, k, v, usp, prefix, keep_kv)
        else:
            assert self._caches is not None
            out = patch_attention(q, k, v, usp, layout.patch, self._caches.by_attention[key], prefix)
        return with_idle(out, padded_counts, counts)

    def kernel(self, q: Tensor, exact: bool = False) -> AttentionKernel:
        """Return the plan's kernel for q `[batch, heads, tokens, head_dim]`.

        The kernel is chosen once for each dtype and width, because the choice reads files and queries drivers. Calls that must
        be `exact` get no approximate kernel.
        """
        choice = EXACT_ATTENTION if exact and is_approximate(self._choice) else self._choice

        def choose() -> AttentionKernel:
            return choose_kernel(choice, q.device, q.dtype, q.shape[3], package_failures(q.device)).attend

        return self._call.layout.once(("kernel", choice, q.dtype, q.shape[3]), choose)

    def _product(self, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None, **_: Any) -> Tensor:
        """Compute attention of local operands, `[batch, heads, tokens, head_dim]`, by the plan's kernel.

        The plan's kernel supports no mask. With a mask, torch's scaled_dot_product_attention computes it.
        """
        if mask is not None:
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.kernel(q)(*(x.transpose(1, 2) for x in (q, k, v)))[0].transpose(1, 2)

    def _slots(self, placements: Sequence[Placement]) -> list[Tensor]:
        """Return the indices of each patch's tokens among this ring rank's tokens, in the order of the all-to-all's output."""

        def find() -> list[Tensor]:
            first = self._mesh.ring.rank * self._mesh.ulysses.size
            return slots_of(placements, range(first, first + self._mesh.ulysses.size), self._call.layout.patches)

        return self._call.layout.once(("slots", *placements), find)


def without_prefix(
    call: CallLayout, block: BlockCall, attention: PrefixedAttention, operands: Operands
) -> tuple[Operands, Tensor, Placement]:
    """Split a call into the latent's part and the prefix.

    Returns:
        The latent's operands, the prefix's keys and values `[2, batch, tokens, heads, head_dim]`, and the placement of the
        latent's tokens.

    Raises:
        Refused: the call has other numbers of queries and keys than the stream.
    """
    stream = block.placements[attention.stream]
    placement = call.layout.part(stream, stream.replicated, stream.length)
    count, queries = placement.counts[call.rank], operands.q.shape[2]
    padded_count = count if stream.replicated else max(1, count)
    length = operands.k.shape[2] - queries
    if queries != padded_count or length < 0 or stream.replicated not in (0, length):
        raise Refused(
            f"the model's {block.name} attends with {queries} queries to {operands.k.shape[2]} keys and this pack "
            f"expects {padded_count} and {stream.replicated + padded_count}: update the pack, or use Load Diffusion "
            "Model."
        )
    prefix = torch.stack([x[:, :, :length].transpose(1, 2) for x in (operands.k, operands.v)])
    return replace(operands, k=operands.k[:, :, length:], v=operands.v[:, :, length:]), prefix, placement


def shared_heads(layout: TokenLayout, block: BlockCall, kv_heads: int, operands: Operands) -> Operands:
    """Return operands in which each head of k and v occurs once.

    A model with grouped queries may have repeated a head for all heads of q that share it.

    Raises:
        Refused: k or v has other heads than declared, or its heads are not repetitions. Only a run's first call checks it.
    """
    if operands.k.shape[1] == operands.v.shape[1] == kv_heads:
        return operands
    group = operands.q.shape[1] // kv_heads
    once = replace(operands, k=operands.k[:, ::group], v=operands.v[:, ::group])

    def repeated() -> bool:
        counts = once.k.shape[1], once.v.shape[1]
        return counts == (kv_heads, kv_heads) and _repeats(operands.k, once.k) and _repeats(operands.v, once.v)

    if not layout.once(("repeated", block.number, block.turn, block.done), repeated):
        raise Refused(
            f"the model's {block.name} has {operands.q.shape[1]} heads of queries, {operands.k.shape[1]} of keys and "
            f"{operands.v.shape[1]} of values, and this pack expects {kv_heads} of keys and values, or repetitions of "
            "them: update the pack, or use Load Diffusion Model."
        )
    return once


def _repeats(x: Tensor, once: Tensor) -> bool:
    """Return True if `x`, `[batch, heads, ...]`, repeats each head of `once` consecutively, with equal values or NaN."""
    apart = x.unflatten(1, (once.shape[1], -1))
    return torch.allclose(apart, once.unsqueeze(2).expand_as(apart), rtol=0, atol=0, equal_nan=True)


def without_idle(x: Tensor, padded_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return `x`, `[batch, heads, tokens, head_dim]`, without idle tokens.

    Args:
        padded_counts: the number of tokens of each stream in `x`, idle tokens included.
        counts: the number of tokens of each stream without idle tokens.
    """
    if list(padded_counts) == list(counts):
        return x
    parts = [part[:, :, :count] for part, count in zip(x.split(list(padded_counts), dim=2), counts, strict=True)]
    return torch.cat(parts, dim=2)


def with_idle(x: Tensor, padded_counts: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Return `x`, `[batch, tokens, heads, head_dim]`, with zeros inserted for idle tokens; see `without_idle`."""
    if list(padded_counts) == list(counts):
        return x
    parts = []
    for part, count in zip(x.split(list(counts), dim=1), counts, strict=True):
        parts.append(part if count else part.new_zeros(part.shape[0], 1, *part.shape[2:]))
    return torch.cat(parts, dim=1)
