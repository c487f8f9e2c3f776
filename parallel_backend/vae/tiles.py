"""Autoencoders that work in tiles of their own, such as MiniMax-H3's: ranks take turns at whole tiles.

The positions of the tiles and their blending are part of the model, and no tile depends on another. So one rank computes a tile
as ComfyUI computes it. The first rank, which answers the request, joins all tiles by ComfyUI's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .autoencoder import OnProgress
from .rows import Slab

OF_A_TILE: Mapping[str, str] = MappingProxyType({"decode": "_decode_pixels", "encode": "_encode_moments"})
"""Method of the module for a whole picture -> its method for one tile."""


def has_tiles(module: Any) -> bool:
    """Return True if an autoencoder works in tiles of its own."""
    return all(hasattr(module, name) for name in OF_A_TILE.values())


def in_tiles(module: Any, method: str, slab: Slab, on_progress: OnProgress) -> Slab:
    """Decode or encode tile by tile. The first rank gets all rows. This is a collective.

    Every rank holds the whole input, and the tile that it computes.
    """
    axis, name = slab.axis, OF_A_TILE[method]
    whole = slab.fetch([slice(0, slab.height)] * axis.size)
    compute = getattr(module, name)
    tiles: list[Tensor] = []

    def listed(tile: Tensor) -> Tensor:
        tiles.append(tile)
        return torch.empty(_shape(module, method, tile), dtype=tile.dtype, device="meta")

    with _NoValues():
        result = _run(module, method, whole, listed)  # a meta tensor: shape and dtype without values
    done = _computed(module, method, tiles, compute, slab, on_progress)
    runs = (slice(0, result.shape[-2]), *[slice(result.shape[-2], result.shape[-2])] * (axis.size - 1))
    if axis.rank == 0:
        joined = _run(module, method, whole, lambda _: next(done))  # ComfyUI's code may use host memory for the result
        return Slab(joined.to(slab.values.device), runs, axis)
    for _ in done:
        pass
    return Slab(whole.new_empty((*result.shape[:-2], 0, result.shape[-1]), dtype=result.dtype), runs, axis)


def decoded_shape(module: Any, latent: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the pixels of a latent, as the module's own code joins tiles."""

    def nothing(tile: Tensor) -> Tensor:
        return tile.new_empty(_shape(module, "decode", tile))

    with _NoValues():
        return tuple(_run(module, "decode", torch.empty(tuple(latent), device="meta"), nothing).shape)


class _NoValues(TorchDispatchMode):
    """A dispatch mode that runs operations on the meta device if an argument is a meta tensor, or if none is a tensor.

    All other operations run as usual.
    """

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation on the meta device, whatever device the caller asks for."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable and tensors and not tensors[0].is_meta:
            return tensors[0]  # a meta tensor has no values to write into it
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (tuple(args), dict(kwargs or {})))
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _run(module: Any, method: str, whole: Tensor, of_a_tile: Callable[[Tensor], Tensor]) -> Tensor:
    setattr(module, OF_A_TILE[method], of_a_tile)  # hides the class's method
    try:
        return getattr(module, method)(whole)  # type: ignore[no-any-return]
    finally:
        delattr(module, OF_A_TILE[method])


def _shape(module: Any, method: str, tile: Tensor) -> tuple[int, ...]:
    """Return the shape of a tile's result, which is pixels, or means and variances."""
    batch, _, frames, height, width = tile.shape
    space, time = module.vae_ratio, module.vae_ratio_t
    if method == "decode":
        return (batch, module.decoder.out_channels, frames * time, height * space, width * space)
    return (batch, 2 * len(module.latents_mean), -(-frames // time), height // space, width // space)


def _computed(
    module: Any,
    method: str,
    tiles: list[Tensor],
    compute: Callable[[Tensor], Tensor],
    slab: Slab,
    on_progress: OnProgress,
) -> Iterator[Tensor]:
    """Yield all tiles in order on the first rank, and none on the others. Each rank computes one tile at a time."""
    axis = slab.axis
    for first in range(0, len(tiles), axis.size):
        batch = tiles[first : first + axis.size]
        mine = batch[axis.rank] if axis.rank < len(batch) else None
        tile = slab.values.new_empty(0) if mine is None else compute(mine)
        shapes = [torch.Size(_shape(module, method, each)) for each in batch]
        assert mine is None or (tile.shape, tile.dtype) == (shapes[axis.rank], slab.values.dtype)
        on_progress(sum(1 for _ in module.modules()))
        leaving = 0 if axis.rank == 0 else tile.numel()
        coming = [shape.numel() if rank and axis.rank == 0 else 0 for rank, shape in enumerate(shapes)]
        coming += [0] * (axis.size - len(shapes))
        send = tile.reshape(-1)[:leaving]
        received = axis.all_to_all(send, [leaving, *[0] * (axis.size - 1)], coming)
        if axis.rank == 0:
            yield tile
            rest = received.split(coming[1 : len(shapes)])
            yield from (values.view(shape) for values, shape in zip(rest, shapes[1:], strict=True))
