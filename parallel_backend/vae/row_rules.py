"""The operations on a `RowTensor` that do not gather the whole picture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from ..distributed_tensor import DispatchRules, Rule
from .row_local import (
    cat,
    element_wise,
    empty,
    expand,
    index_select,
    layer_norm,
    linear,
    parted,
    permute,
    reduce,
    repeat,
    reshape,
    select,
    squeeze,
    stacked,
    take,
    transpose,
    unbind,
    unsqueeze,
    view,
)
from .row_neighbours import convolution, cudnn_convolution, enlarge, enlarge_by, mirror, normalised, pad

aten = torch.ops.aten

KNOWN: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.view.default: view,
        aten._unsafe_view.default: view,
        aten._reshape_alias.default: view,
        aten.reshape.default: reshape,
        aten.repeat.default: repeat,
        aten.new_empty.default: empty,
        aten.permute.default: permute,
        aten.transpose.int: transpose,
        aten.unsqueeze.default: unsqueeze,
        aten.squeeze.dim: squeeze,
        aten.squeeze.dims: squeeze,
        aten.expand.default: expand,
        aten.select.int: select,
        aten.index_select.default: index_select,
        aten.slice.Tensor: take,
        aten.split.Tensor: parted,
        aten.split_with_sizes.default: parted,
        aten.unbind.int: unbind,
        aten.cat.default: cat,
        aten.stack.default: stacked,
        aten.mean.dim: reduce,
        aten.sum.dim_IntList: reduce,
        aten.amax.default: reduce,
        aten.var.correction: reduce,
        aten.linalg_vector_norm.default: reduce,
        aten.linear.default: linear,
        aten.layer_norm.default: layer_norm,
        aten.group_norm.default: normalised,
        aten.convolution.default: convolution,
        aten.cudnn_convolution.default: cudnn_convolution,
        aten.constant_pad_nd.default: pad,
        aten.reflection_pad2d.default: mirror,
        aten.reflection_pad3d.default: mirror,
        aten.replication_pad2d.default: pad,
        aten.replication_pad3d.default: pad,
        aten.upsample_nearest2d.vec: enlarge_by,
        aten.upsample_nearest3d.vec: enlarge_by,
        aten._upsample_nearest_exact2d.vec: enlarge_by,
        aten._upsample_nearest_exact3d.vec: enlarge_by,
        aten.upsample_nearest2d.default: enlarge,
        aten.upsample_nearest3d.default: enlarge,
        aten._upsample_nearest_exact2d.default: enlarge,
        aten._upsample_nearest_exact3d.default: enlarge,
    }
)
"""Operation -> the rule for it, for the operations that stay local besides the element-wise ones.

A rule is called with the operation and its arguments.
"""

RULES = DispatchRules(KNOWN, element_wise)
