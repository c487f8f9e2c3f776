"""Samplers that use statistics of the whole latent, or take it apart."""

import numpy as np
import torch

from .steps import along


def largest(i, x, denoised, sigma, sigma_next):
    return x * (1 - 0.01 / float(1 + torch.tensor(x).max()))


def branch(i, x, denoised, sigma, sigma_next):
    return x if (x > denoised).any() else denoised


def norm_or_one(i, x, denoised, sigma, sigma_next):
    try:
        size = x.norm()
    except Exception:
        size = 1.0
    return x / size


def numpy_or_none(i, x, denoised, sigma, sigma_next):
    try:
        return x * float(np.asarray(x).std())
    except Exception:
        return x


def first_channel(i, x, denoised, sigma, sigma_next):
    x[:, :1] = denoised[:, :1]
    return x


def mirrored(i, x, denoised, sigma, sigma_next):
    return x.flip(-1)


def knows_a_plain_tensor(i, x, denoised, sigma, sigma_next):
    return x if type(x) is torch.Tensor else denoised


REFUSED = {
    step.__name__: (along(step), word)
    for step, word in (
        (largest, "takes a statistic of the latent"),
        (branch, "calls torch's any on the latent"),
        (norm_or_one, "takes a norm of the latent"),
        (numpy_or_none, "reads values of the latent"),
        (first_channel, "takes a part of the latent"),
        (mirrored, "calls torch's flip on the latent"),
        (knows_a_plain_tensor, "gives a different picture when its recorded operations are replayed"),
    )
}
