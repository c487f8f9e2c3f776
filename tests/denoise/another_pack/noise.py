"""Samplers that draw noise or numbers."""

import functools
import random

import torch
from comfy.k_diffusion.sampling import BrownianTreeNoiseSampler
from comfy.k_diffusion.sampling import default_noise_sampler as noise_of

from .steps import along


def names_bound_at_import(model, x, sigmas, extra_args=None, callback=None, disable=None):
    plain = noise_of(x, seed=extra_args["seed"])
    tree = BrownianTreeNoiseSampler(x, sigmas[-2], sigmas[0], seed=7, cpu=True)

    def step(i, x, denoised, sigma, sigma_next):
        x = denoised + (x - denoised) * (sigma_next / sigma)
        if sigma_next > 0:
            noise = plain(sigma, sigma_next)
            limit = 1.5 * noise.std()
            x = x + 0.1 * noise.clamp(-limit, limit) + 0.1 * tree(sigma, sigma_next)
        return x

    return along(step)(model, x, sigmas, extra_args, callback)


def own_noise(i, x, denoised, sigma, sigma_next):
    return denoised + torch.randn_like(x) * sigma_next


def own_noise_of_a_shape(i, x, denoised, sigma, sigma_next):
    return denoised + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * sigma_next


def own_numbers(i, x, denoised, sigma, sigma_next):
    return denoised + (x - denoised) * (sigma_next / sigma) * random.random()


def a_seed_for_each(model, x, sigmas, extra_args=None, callback=None, disable=None):
    denoised = model(x, sigmas[0] * torch.ones(len(x)), **extra_args)
    return denoised + BrownianTreeNoiseSampler(x, 0.1, 1.0, seed=[1] * len(x))(0.5, 0.2)


def no_seed(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) + noise_of(x)(1, 0)


def clamps_by(deviations):
    """Return a sampler that adds fresh noise, clamped to the limit that `deviations` computes from it."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None):
        denoised = model(x, sigmas[0] * torch.ones(len(x)), **extra_args)
        noise = noise_of(x, seed=3)(1, 0)
        limit = deviations(noise)
        return denoised + noise.clamp(-limit, limit)

    sample.__name__ = deviations.__name__
    return sample


def biased(noise):
    return noise.std(unbiased=False)


def changed_since(noise):
    limit = noise.std()
    noise.mul_(2.0)
    return limit


def transformed(model, x, sigmas, extra_args=None, callback=None, disable=None):
    denoised = model(x, sigmas[0] * torch.ones(len(x)), **extra_args)
    return denoised + BrownianTreeNoiseSampler(x, 0.1, 1.0, seed=1, transform=lambda t: t**2)(0.5, 0.2)


def seeds_all(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Draw only numbers that follow from the run's seed."""
    random.seed(extra_args["seed"])
    torch.manual_seed(extra_args["seed"])
    scale = 0.9 + 0.1 * random.random() + 0.01 * torch.rand(1)
    torch.randn_like(x)  # so that later draws are other noise

    def step(i, x, denoised, sigma, sigma_next):
        return denoised * scale + (x - denoised) * (sigma_next / sigma)

    return along(step)(model, x, sigmas, extra_args, callback)


@functools.wraps(noise_of)
def quieter(x, seed=None):
    louder = noise_of(x, seed)
    return lambda sigma, sigma_next: 0.5 * louder(sigma, sigma_next)


def wrapped_noise(model, x, sigmas, extra_args=None, callback=None, disable=None, factor=1.0):
    noise = quieter(x, extra_args["seed"])

    def step(i, x, denoised, sigma, sigma_next):
        return denoised + (x - denoised) * (sigma_next / sigma) + factor * 0.1 * sigma_next * noise(sigma, sigma_next)

    return along(step)(model, x, sigmas, extra_args, callback)


def draws_before_it_seeds(model, x, sigmas, extra_args=None, callback=None, disable=None):
    scale = 0.9 + 0.1 * torch.rand(1)
    torch.manual_seed(extra_args["seed"])
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) * scale


def draws_behind_noise(model, x, sigmas, extra_args=None, callback=None, disable=None):
    torch.manual_seed(extra_args["seed"])
    torch.randn_like(x)
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) * torch.rand(1)


def looks_before_it_seeds(model, x, sigmas, extra_args=None, callback=None, disable=None):
    """Draw a number before seeding, and hardly ever use it."""
    scale = 0.9 if random.random() < 1e-9 else 1.0
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) * scale


def own_noise_in_place(i, x, denoised, sigma, sigma_next):
    torch.manual_seed(1)
    return torch.randn(x.shape).mul_(sigma_next).add_(denoised)


LOCAL = {
    "names_bound_at_import": names_bound_at_import,
    "seeds_all": seeds_all,
    "wrapped_noise": wrapped_noise,
    "a_partial": functools.partial(wrapped_noise, factor=2.0),
}

REFUSED = {
    **{
        step.__name__: (along(step), word)
        for step, word in (
            (own_noise, "draws noise of its own"),
            (own_noise_of_a_shape, "combines the latent with a tensor that was not computed from it"),
            (own_noise_in_place, "combines the latent with a tensor that was not computed from it"),
            (own_numbers, "draws random numbers itself"),
        )
    },
    **{
        sample.__name__: (sample, word)
        for sample, word in (
            (a_seed_for_each, "draws noise without a seed, or with a seed for each picture"),
            (no_seed, "draws noise without a seed"),
            (clamps_by(biased), "takes a statistic of the latent"),
            (clamps_by(changed_since), "clamps noise that it has changed"),
            (transformed, "draws noise over transformed sigmas"),
            (draws_before_it_seeds, "draws random numbers itself"),
            (looks_before_it_seeds, "draws random numbers itself"),
            (draws_behind_noise, "gives a different picture when its recorded operations are replayed"),
        )
    },
}
