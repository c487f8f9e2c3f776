"""Injected attention: a node's function that a block calls in place of its attention, for all tokens and some of the heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...declaration import InjectedAttention
from ...errors import Refused
from ...layout import SequenceSplit, length
from .forward import RankForward
from .head_parallel import EveryToken
from .placement import Placement

WAY_OUT = "remove that node, or use Load Diffusion Model"


class InjectedFunction:
    """The function that a block calls in place of its attention.

    Args:
        inside: the attention submodule that the function replaces.
        declared: the declaration of the block's argument.
        function: the node's function.
        values: the block's arguments as the model passed them.
        placement: the placement of the block's tokens.
        now: the running forward.
    """

    def __init__(
        self, inside: Any, declared: InjectedAttention, function: Callable[..., Tensor], values: Mapping[str, Any],
        placement: Placement, now: RankForward,
    ) -> None:  # fmt: skip
        self._inside = inside
        self._declared = declared
        self._function = function
        self._values = values
        self._placement = placement
        self._now = now

    def __call__(self, tokens: Tensor, **keywords: Any) -> Tensor:
        """Return the attention output `[local tokens, width]`, as the submodule does. A collective."""
        inside, now = self._inside, self._now
        heads, head_dim = inside.heads, inside.head_dim
        local = self._projected(tokens, heads, head_dim)
        arguments = {name: self._values.get(name, value) for name, value in keywords.items()}
        nothing = tokens.new_empty(1, 0, heads, head_dim)

        def attend(run: slice, every: Tensor, *_: Tensor) -> Tensor:
            apart = every[0].split([rows.shape[2] for rows in local.values()], dim=2)
            in_turn = (rows.unflatten(2, (-1, head_dim)).transpose(1, 2).flatten(1) for rows in apart)
            rows = Rows(dict(zip(local, in_turn, strict=True)), (every.shape[1], tokens.shape[1]), tokens)
            try:
                output = self._function(rows, **arguments)
            except AttributeError as error:
                raise _refused_read(f"{error.name} of the model's layers") from error
            if not isinstance(output, _Out):
                raise Refused(
                    f"a node's attention function does not end with the layer {self._declared.output_layer}: {WAY_OUT}."
                )
            return output.rows.view(1, every.shape[1], length(run), head_dim)

        exchange = EveryToken(now.call, now.mesh.sequence, [self._placement], heads, replicated_keys=True)
        out = exchange.attend(attend, torch.cat([*local.values()], dim=2)[None], nothing, nothing)
        result: Tensor = getattr(inside, self._declared.output_layer)(out[0].flatten(1))
        return result

    def _projected(self, tokens: Tensor, heads: int, head_dim: int) -> dict[str, Tensor]:
        """Return the result of each projection, `[local tokens, heads, values of a head]`. A submodule may lack some."""
        projected = {}
        for name in self._declared.projections:
            if (layer := getattr(self._inside, name)) is None:
                continue
            if getattr(layer, "bias", None) is not None:
                raise Refused(
                    f"the model's {name} has a bias, which a node's attention function does not support: {WAY_OUT}."
                )
            projected[name] = layer(tokens).unflatten(1, (-1, heads, head_dim)).transpose(1, 2).flatten(2)
        return projected


class Rows:
    """The tokens that a node's function gets. It may select, weigh and project them by the submodule's layers.

    The projections for this rank's heads are computed already. All other data of the tokens is on other ranks.

    Args:
        projected: `[tokens, values]` by the layer's name.
        shape: the shape of the tokens, `[tokens, width]`.
        like: a tensor with their dtype and device.
    """

    def __init__(self, projected: Mapping[str, Tensor], shape: tuple[int, int], like: Tensor) -> None:
        self.shape = torch.Size(shape)
        self.dtype, self.device = like.dtype, like.device
        self._projected = projected
        self._like = like

    def __getitem__(self, picked: Any) -> Rows:
        return self._each(lambda rows: rows[picked])

    def __mul__(self, weights: Tensor) -> Rows:
        if weights.shape != (self.shape[0], 1):
            raise _refused_read("single values of the tokens")
        return self._each(lambda rows: rows * weights)

    def new_empty(self, *sizes: Any, **settings: Any) -> Tensor:
        """Return a new tensor, as `Tensor.new_empty` does."""
        return self._like.new_empty(*sizes, **settings)

    def by(self, layer: str) -> Tensor:
        """Return the tokens' projection by the layer of this name."""
        return self._projected[layer]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Rows:
        changed = {name: change(rows) for name, rows in self._projected.items()}
        (count,) = {rows.shape[0] for rows in changed.values()}
        if any(rows.shape[1:] != self._projected[name].shape[1:] for name, rows in changed.items()):
            raise _refused_read("single values of the tokens")
        return Rows(changed, (count, self.shape[1]), self._like)

    def __getattr__(self, name: str) -> Any:
        raise _refused_read(f"{name} of the tokens")


class SomeHeads:
    """The attention submodule that a node's function gets: it has only this rank's heads."""

    def __init__(self, inside: Any, declared: InjectedAttention, now: Callable[[], RankForward]) -> None:
        self._inside = inside
        self._declared = declared
        self._now = now

    def __getattr__(self, name: str) -> Any:
        declared, inside = self._declared, self._inside
        if name == "heads":
            ranks, shares = self._now().mesh.sequence, self._now().call.layout.shares
            split = SequenceSplit((1,) * ranks.size, inside.heads, 1, ranks.size, shares)
            return split.head_counts()[ranks.rank]
        if name in declared.projections:
            return None if getattr(inside, name) is None else lambda rows: rows.by(name)
        if name == declared.output_layer:
            return _Out
        if name in declared.shared:
            return getattr(inside, name)
        raise _refused_read(f"{name} of the model's {type(inside).__name__}")


@dataclass(frozen=True)
class _Out:
    """The input of the submodule's last layer: `[tokens, heads * head_dim]`."""

    rows: Tensor


class BlockOfSomeHeads:
    """The block that a node's function gets: it has only the block's submodules for attention, by name."""

    def __init__(self, inside: Mapping[str, SomeHeads]) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> SomeHeads:
        if name not in self._inside:
            raise _refused_read(f"{name} of the model's block")
        return self._inside[name]


def _refused_read(what: str) -> Refused:
    return Refused(f"a node's attention function reads {what}, which no worker has in full: {WAY_OUT}.")
