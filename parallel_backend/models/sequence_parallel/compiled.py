"""Blocks compiled by torch.compile: one compilation per kind of block, for all sizes.

The compiler sees the block's own code with this rank's tokens, which are plain tensors. Attention, with its exchanges between
ranks, is one operator that the compiler does not look into. A quantised layer is such an operator too (layer_operator.py). If
the compiler cannot take a kind of block whole, these blocks run uncompiled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...declaration import ReplicatedKeys
from .arguments import Arguments
from .attentions import LOW_PRECISION, SCALE, Attentions
from .layer_operator import RUNNING

OVERRIDE = "optimized_attention_override"
"""The transformer option in which ComfyUI looks for a function that replaces its attention."""

RECORDS = "cudagraphs"
"""The torch.compile backend that records the kernels launched on a GPU and replays them together."""

ANY_SIZE = {"use_duck_shape": False}
"""Setting by which two sizes that are equal during compilation may differ later.

A batch of two, for example, is unrelated to the two columns of a tensor of positions.
"""

EXACT_NUMBERS = {"specialize_float": True}
"""Setting that makes a block's own floats, such as a norm's epsilon, constants. As variables they cause a second tracing."""

GRAPHS = "unique_graphs"
"""The key under which torch counts compiled graphs."""

ANSWERING: ContextVar[Attentions] = ContextVar("attentions")
"""The object that computes attention for the running block. An operator takes only tensors and plain values as arguments."""


@torch.library.custom_op("comfyui_parallel::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    kernel: str,
    ordinal: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    enable_gqa: bool,
    low_precision: bool,
    scale: float | None,
) -> Tensor:
    """Compute one call of attention of the running block.

    Args:
        kernel: `module:name` of ComfyUI's kernel; empty if there is none.
        ordinal: the number of calls of attention before this one in the block.
    """
    attentions = ANSWERING.get()
    assert attentions.block is not None
    assert attentions.block.done == ordinal, "the compiler has changed the order of attentions"
    module, _, name = kernel.partition(":")
    keywords: dict[str, Any] = {"enable_gqa": True} if enable_gqa else {}
    keywords |= {} if low_precision else {LOW_PRECISION: False}
    keywords |= {} if scale is None else {SCALE: scale}
    out = attentions(
        getattr(sys.modules[module], name) if kernel else None, q, k, v, heads, mask, attn_precision, skip_reshape,
        skip_output_reshape, _inside_attn_wrapper=True, **keywords,
    )  # fmt: skip
    return out.contiguous()


@attention.register_fake
def _shape_of_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    heads: int,
    kernel: str,
    ordinal: int,
    attn_precision: torch.dtype | None,
    skip_reshape: bool,
    skip_output_reshape: bool,
    enable_gqa: bool,
    low_precision: bool,
    scale: float | None,
) -> Tensor:
    tokens, width = (q.shape[2], v.shape[3]) if skip_reshape else (q.shape[1], q.shape[2] // heads)
    if skip_output_reshape:
        return q.new_empty(q.shape[0], heads, tokens, width)
    return q.new_empty(q.shape[0], tokens, heads * width)


@dataclass(frozen=True)
class CompiledEntry:
    """The function and the argument by which a block runs with its attention as an operator.

    Attributes:
        run: the function that is compiled. It calls the block's forward, given the block, its options, an empty list, and the
            block's other arguments. The list grows by one element for each call of attention.
        options: the name of the argument through which attention is replaced; empty if blocks have no such argument.
    """

    run: Callable[..., Any]
    options: str


class CompiledBlocks:
    """A model's blocks, each kind compiled by one of torch.compile's backends when the first block of the kind runs."""

    def __init__(self, backend: str, entry: CompiledEntry) -> None:
        from torch._dynamo import config, exc, utils  # a slow import that few users need
        from torch.fx.experimental import _config

        self._compile_errors = exc.TorchDynamoException, exc.FailOnRecompileLimitHit
        self._tracing, self._shapes = config, _config
        self._counted = utils.counters["stats"]
        self._backend = backend
        self._entry = entry
        self._kinds: dict[tuple[type, tuple[str, ...]], Callable[..., Any] | None] = {}
        self._warnings: list[str] = []
        self._seconds = 0.0

    def takes(self, module: nn.Module, method: str, injected: Collection[str]) -> bool:
        """Return True if a block is compiled when it is called by this method and with `injected` attention as arguments.

        A block runs uncompiled if the method is not forward, or if a node injects attention.
        """
        variant = (method,) if method != "forward" else tuple(injected)
        if variant and (type(module), variant) not in self._kinds:
            self._kinds[type(module), variant] = None
            reason = "a node replaces its attention, which cannot be compiled"
            if method != "forward":
                reason = f"ComfyUI calls its {method}, and only a block's forward is compiled"
            self._give_up(module, reason)
        return not variant

    def seconds(self) -> float:
        """Return the seconds spent on compiling, with the first run of each compiled block, since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each kind of block that could not be compiled since the last call."""
        warnings, self._warnings = tuple(self._warnings), []
        return warnings

    def __call__(
        self,
        module: nn.Module,
        traced_module: nn.Module,
        arguments: Arguments,
        local: Mapping[str, Any],
        attentions: Attentions,
    ) -> Any:
        """Return the block's result for its arguments on this rank. `traced_module` is the block as the compiler sees it."""
        kind = type(module), tuple(local)
        if kind not in self._kinds:
            self._kinds[kind] = self._compiled(module, local, attentions)
        run = self._kinds[kind]
        if run is None:
            return arguments.call(module.forward, local)
        options = local.get(self._entry.options)
        answering, running = ANSWERING.set(attentions), RUNNING.set(module)
        graphs, started = self._counted[GRAPHS], time.perf_counter()

        def compiled(*args: Any, **named: Any) -> Any:
            return run(traced_module, options, [], args, named)

        try:
            with self._shapes.patch(**ANY_SIZE), self._tracing.patch(EXACT_NUMBERS):  # type: ignore[attr-defined]
                local_arguments = {name: value for name, value in local.items() if name != self._entry.options}
                return arguments.call(compiled, local_arguments)
        except self._compile_errors as error:  # the whole block is one graph, so no part of it has run yet
            self._give_up(module, error)
            self._kinds[kind] = None
        finally:
            if self._counted[GRAPHS] > graphs:
                self._seconds += time.perf_counter() - started
            RUNNING.reset(running)
            ANSWERING.reset(answering)
        return arguments.call(module.forward, local)

    def _compiled(
        self, module: nn.Module, local: Mapping[str, Any], attentions: Attentions
    ) -> Callable[..., Any] | None:
        assert attentions.block is not None
        exchanging = sum(not isinstance(each, ReplicatedKeys) for each in attentions.block.attentions)
        if self._backend == RECORDS and attentions.device.type != "cpu":
            self._give_up(module, f"{RECORDS} cannot record the exchanges between GPUs; choose inductor")
        elif attentions.block.prefix is not None:
            self._give_up(module, "ComfyUI passes it a new attention function in each call")
        elif exchanging > 1:
            self._give_up(
                module, f"it calls attention over all tokens {exchanging} times, and a compiler may change their order"
            )
        elif self._entry.options and self._entry.options not in local:
            self._give_up(module, "its attention cannot be replaced")
        else:
            # torch keeps compiled code with the function's code: a copy for each model is freed with the model.
            run = self._entry.run
            assert isinstance(run, FunctionType)
            own = FunctionType(run.__code__.replace(), run.__globals__)
            try:
                return torch.compile(own, backend=self._backend, fullgraph=True, dynamic=True)
            except self._compile_errors as error:
                self._give_up(module, error)
        return None

    def _give_up(self, module: nn.Module, reason: object) -> None:
        first, _, _ = str(reason).partition("\n")
        self._warnings.append(f"{type(module).__name__} is not compiled: {first.rstrip('.')}.")
