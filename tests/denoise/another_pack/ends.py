"""Samplers that report steps in other ways, fail, or never end."""

import torch

from .elementwise import euler
from .steps import along


def tells_nothing(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return along(euler)(model, x, sigmas, extra_args, None)


def falls_back(model, x, sigmas, extra_args=None, callback=None, disable=None):
    def counted(told):
        callback({**told, "i": len(sigmas) - told["i"]})

    return along(euler)(model, x, sigmas, extra_args, counted)


def fails(i, x, denoised, sigma, sigma_next):
    raise ZeroDivisionError


def never_ends(i, x, denoised, sigma, sigma_next):
    while True:
        x = x * 0.5


def never_ends_on_numbers(i, x, denoised, sigma, sigma_next):
    while True:
        sigma = torch.sin(sigma)


def goes_on_whatever_is_raised(i, x, denoised, sigma, sigma_next):
    while True:
        try:
            if x.norm() < 1:
                return x
            x = x * 0.5
        except Exception:
            continue


LOCAL = {"tells_nothing": tells_nothing, "falls_back": falls_back}

REFUSED = {
    step.__name__: (along(step), word)
    for step, word in (
        (fails, "raises ZeroDivisionError on a latent without data"),
        (never_ends, "uses more than"),
        (never_ends_on_numbers, "runs for more than"),
        (goes_on_whatever_is_raised, "takes a norm of the latent"),
    )
}
