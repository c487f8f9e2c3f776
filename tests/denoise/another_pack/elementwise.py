"""Samplers that treat every element of the latent separately."""

import copy

import numpy as np
import torch
from comfy.k_diffusion.sampling import to_d

from .steps import along


def euler(i, x, denoised, sigma, sigma_next):
    return x + to_d(x, sigma, denoised) * (sigma_next - sigma)


def reads_sizes(i, x, denoised, sigma, sigma_next):
    flow = 1.0 if x.shape[1] == 16 else 0.9
    return denoised + (x - denoised) * (sigma_next / sigma) * flow * (x.ndim / 4) * min(x.numel(), 1)


def detached_and_in_place(i, x, denoised, sigma, sigma_next):
    moving = x.detach()
    moving.sub_(denoised).mul_(sigma_next / sigma)
    return x.add_(denoised)  # x itself has changed too


def copied_and_in_place(i, x, denoised, sigma, sigma_next):
    copy = x.clone()
    copy.mul_(0.0)
    x.lerp_(denoised, float(1 - sigma_next / sigma))
    return x + copy.contiguous()


def by_sign(i, x, denoised, sigma, sigma_next):
    there = torch.where(x > 0, x * 0.99, x).clamp(-8, 8)
    return torch.addcmul(denoised, there - denoised, torch.full_like(x, float(sigma_next / sigma)))


def in_double(i, x, denoised, sigma, sigma_next):
    ratio = (sigma_next.double() / sigma.double()).reshape(1, 1, 1, 1)
    return (denoised + (x.double() - denoised) * ratio).to(x.dtype)


def with_numpy_numbers(i, x, denoised, sigma, sigma_next):
    return np.float64(sigma_next / sigma) * (x - denoised) + denoised


def a_copy_by_torch_tensor(i, x, denoised, sigma, sigma_next):
    return torch.tensor(x) * (sigma_next / sigma) + denoised * (1 - sigma_next / sigma)


def in_double_throughout(model, x, sigmas, extra_args=None, callback=None, disable=None):
    x = x.double()
    for i, (sigma, sigma_next) in enumerate(zip(sigmas.double(), sigmas[1:].double(), strict=False)):
        denoised = model(x, sigma.float() * torch.ones(len(x)), **extra_args)
        callback({"x": x, "i": i, "denoised": denoised})
        x = denoised + (x - denoised) * (sigma_next / sigma)
    return x


def with_history(model, x, sigmas, extra_args=None, callback=None, disable=None):
    history = []

    def step(i, x, denoised, sigma, sigma_next):
        history.append(denoised)
        stack = torch.stack(history[-3:], dim=1)
        weights = torch.linspace(1, 2, stack.shape[1])
        weights = weights / weights.sum()
        mixed = torch.einsum("k,bkchw->bchw", weights, stack)
        mixed = 0.5 * mixed + 0.25 * torch.tensordot(stack, weights, dims=([1], [0]))
        mixed = mixed + 0.25 * (stack * weights.view(1, -1, 1, 1, 1)).sum(dim=1) + 0.0 * stack[:, 0]
        return mixed + (x - mixed) * (sigma_next / sigma)

    return along(step)(model, x, sigmas, extra_args, callback)


def by_a_plain_condition(i, x, denoised, sigma, sigma_next):
    nearer = denoised + (x - denoised) * (sigma_next / sigma)
    return torch.where(sigma > sigma_next, nearer, denoised)


def by_masks(i, x, denoised, sigma, sigma_next):
    within = torch.fmin(torch.fmax(x, denoised - 1), denoised + 1)
    within = within.masked_fill(within.sgn() == 0, 0.1) + 0.01 * (within // 0.5)
    return denoised + (within - denoised) * (sigma_next / sigma)


def with_a_copied_history(model, x, sigmas, extra_args=None, callback=None, disable=None):
    state, kept = {}, []

    def step(i, x, denoised, sigma, sigma_next):
        state["denoised"] = denoised
        kept.append(copy.deepcopy(state))
        denoised.mul_(0.9)
        return kept[-1]["denoised"] + (x - kept[0]["denoised"]) * (sigma_next / sigma) + 0.01 * denoised

    return along(step)(model, x, sigmas, extra_args, callback)


LOCAL = {
    **{
        step.__name__: along(step)
        for step in (
            euler,
            reads_sizes,
            detached_and_in_place,
            copied_and_in_place,
            by_sign,
            in_double,
            with_numpy_numbers,
            a_copy_by_torch_tensor,
            by_a_plain_condition,
            by_masks,
        )
    },
    "with_a_copied_history": with_a_copied_history,
    "in_double_throughout": in_double_throughout,
    "with_history": with_history,
}
