"""The weights of DEIS (arXiv 2204.13902): integrals of Lagrange polynomials over each step.

They are tabulated like those of diff-sampler (Apache-2.0, github.com/zju-pi/diff-sampler), which ComfyUI
follows: the sigmas are put on the time axis of a variance-preserving process and the integrals are sums
over a fine fp32 grid. The grid's bias (about 1e-4 of a weight) and the rounding of the constants are part
of the picture, so both are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = 3
"""Slopes used in a step, as ComfyUI's `deis` has it."""

_GRID_POINTS = 10_000
_FIRST_TIME = 1e-3
_SIGMA_RANGE = (0.002, 80.0)
"""The variance-preserving process is the one that passes through these sigmas at `_FIRST_TIME` and at 1."""


def deis_weights(sigmas: Tensor) -> list[tuple[Tensor, ...]]:
    """For each step of a schedule (1-D fp32, on the CPU) the weights of its slopes, the newest first.

    At most `ORDER` 0-dim fp32 weights a step, no more than there are slopes, and one for a step that ends
    at zero.
    """
    # 1 + sigma² rounds to fp32 before anything else: for the lower sigma that is 1 % of the logarithm.
    log_low, log_high = (torch.tensor(sigma).square().add(1).log().double() for sigma in _SIGMA_RANGE)
    growth = 2 * (log_low / _FIRST_TIME - log_high) / (_FIRST_TIME - 1)
    start = log_high - 0.5 * growth
    # The noise rate at time t is start + growth * t, hence log(sigma² + 1) = start * t + growth * t² / 2.
    times = ((start**2 + 2 * growth * (sigmas**2 + 1).log()).sqrt() - start) / growth

    weights: list[tuple[Tensor, ...]] = []
    for step in range(len(sigmas) - 1):
        order = 1 if sigmas[step + 1] <= 0 else min(step + 1, ORDER)
        if order == 1:
            weights.append((sigmas[step + 1] - sigmas[step],))
            continue
        nodes = times[step - order + 1 : step + 1].flip(0)
        grid = torch.linspace(float(times[step]), float(times[step + 1]), _GRID_POINTS)
        width = (times[step + 1] - times[step]) / _GRID_POINTS
        rate = _sigma_rate(start, growth, grid)
        weights.append(tuple((rate * _lagrange(nodes, node, grid)).sum() * width for node in range(order)))
    return weights


def _sigma_rate(start: Tensor, growth: Tensor, time: Tensor) -> Tensor:
    """dsigma/dtime, from log(kept) = -log(sigma² + 1).

    ComfyUI differentiates log(kept) automatically, which multiplies by 1 / kept * kept. That is one but for
    rounding, and rounding shows: the weights are large and of either sign where sigma drops steeply.
    """
    kept = torch.exp(-0.5 * time**2 * growth - time * start)
    one = 1 / kept * kept
    log_kept_rate = -(one * growth) * time - one * start
    return -0.5 * log_kept_rate / torch.sqrt(kept * (1 - kept))


def _lagrange(nodes: Tensor, node: int, at: Tensor) -> Tensor:
    value = torch.ones_like(at)
    for other in range(len(nodes)):
        if other != node:
            value = value * ((at - nodes[other]) / (nodes[node] - nodes[other]))
    return value
