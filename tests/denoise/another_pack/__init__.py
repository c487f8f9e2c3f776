"""Samplers that another pack might have. `LOCAL` are those whose programs give ComfyUI's result, `REFUSED` says of others why."""

from __future__ import annotations

import itertools
import random

import comfy.k_diffusion.sampling as sampling
import numpy as np
import torch
from comfy.k_diffusion.sampling import BrownianTreeNoiseSampler, to_d
from comfy.k_diffusion.sampling import default_noise_sampler as noise_of
from comfy.model_patcher import set_model_options_post_cfg_function

COUNT = 0
CALLS: list[int] = []


def steps(model, x, sigmas, extra_args, callback):
    """Euler's, as a generator that is sent what x becomes."""
    ones = x.new_ones([x.shape[0]])
    for i in range(len(sigmas) - 1):
        denoised = model(x, sigmas[i] * ones, **extra_args)
        if callback is not None:
            callback({"x": x, "i": i, "sigma": sigmas[i], "sigma_hat": sigmas[i], "denoised": denoised})
        x = yield i, x, denoised, sigmas[i], sigmas[i + 1]


def along(step):
    """A sampler of a step: (i, x, denoised, sigma, sigma_next) -> x."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None, **options):
        running = steps(model, x, sigmas, extra_args, callback)
        try:
            now = next(running)
            while True:
                x = step(*now, **options)
                now = running.send(x)
        except StopIteration:
            return x

    sample.__name__ = step.__name__
    return sample


def euler(i, x, denoised, sigma, sigma_next):
    return x + to_d(x, sigma, denoised) * (sigma_next - sigma)


def reads_sizes(i, x, denoised, sigma, sigma_next):
    flow = 1.0 if x.shape[1] == 16 else 0.9
    return denoised + (x - denoised) * (sigma_next / sigma) * flow * (x.ndim / 4) * min(x.numel(), 1)


def detached_and_in_place(i, x, denoised, sigma, sigma_next):
    moving = x.detach()
    moving.sub_(denoised).mul_(sigma_next / sigma)
    return x.add_(denoised)  # x has been moved too


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


def in_double_throughout(model, x, sigmas, extra_args=None, callback=None, disable=None):
    x = x.double()
    for i, (sigma, sigma_next) in enumerate(zip(sigmas.double(), sigmas[1:].double(), strict=False)):
        denoised = model(x, sigma.float() * torch.ones(len(x)), **extra_args)
        callback({"x": x, "i": i, "denoised": denoised})
        x = denoised + (x - denoised) * (sigma_next / sigma)
    return x


def with_history(model, x, sigmas, extra_args=None, callback=None, disable=None):
    history, running = [], steps(model, x, sigmas, extra_args, callback)
    now = next(running)
    try:
        while True:
            _i, x, denoised, sigma, sigma_next = now
            history = [*history, denoised][-3:]
            stack = torch.stack(history, dim=1)
            weights = torch.linspace(1, 2, len(history))
            weights = weights / weights.sum()
            mixed = torch.einsum("k,bkchw->bchw", weights, stack)
            mixed = 0.5 * mixed + 0.25 * torch.tensordot(stack, weights, dims=([1], [0]))
            mixed = mixed + 0.25 * (stack * weights.view(1, -1, 1, 1, 1)).sum(dim=1) + 0.0 * stack[:, 0]
            x = mixed + (x - mixed) * (sigma_next / sigma)
            now = running.send(x)
    except StopIteration:
        return x


def names_bound_at_import(model, x, sigmas, extra_args=None, callback=None, disable=None):
    plain, tree = (
        noise_of(x, seed=extra_args["seed"]),
        BrownianTreeNoiseSampler(x, sigmas[-2], sigmas[0], seed=7, cpu=True),
    )
    running = steps(model, x, sigmas, extra_args, callback)
    now = next(running)
    try:
        while True:
            _i, x, denoised, sigma, sigma_next = now
            x = denoised + (x - denoised) * (sigma_next / sigma)
            if sigma_next > 0:
                noise = plain(sigma, sigma_next)
                limit = 1.5 * noise.std()
                x = x + 0.1 * noise.clamp(-limit, limit) + 0.1 * tree(sigma, sigma_next)
            now = running.send(x)
    except StopIteration:
        return x


def around_comfyuis(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sampling.sample_dpmpp_2m(model, x * 1.01, sigmas, extra_args=extra_args, callback=callback, disable=disable)


def both_sides(model, x, sigmas, extra_args=None, callback=None, disable=None):
    seen = {}

    def hook(args):
        seen.update(args)
        return args["denoised"]

    options = set_model_options_post_cfg_function(
        dict(extra_args["model_options"]), hook, disable_cfg1_optimization=True
    )
    for i, (sigma, sigma_next) in enumerate(itertools.pairwise(sigmas)):
        denoised = model(x, sigma * x.new_ones([x.shape[0]]), **{**extra_args, "model_options": options})
        callback({"x": x, "i": i, "denoised": denoised})
        x = denoised + to_d(x, sigma, seen["uncond_denoised"] + 0.1 * seen["cond_denoised"]) * sigma_next
    return x


def tells_nothing(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return along(euler)(model, x, sigmas, extra_args, None)


def falls_back(model, x, sigmas, extra_args=None, callback=None, disable=None):
    def counted(told):
        callback({**told, "i": len(sigmas) - told["i"]})

    return along(euler)(model, x, sigmas, extra_args, counted)


def counts_in_a_run(model, x, sigmas, extra_args=None, callback=None, disable=None):
    count = [0]

    def step(i, x, denoised, sigma, sigma_next):
        count[0] += 1
        return denoised + (x - denoised) * (sigma_next / sigma) * (1 - 0.01 * count[0])

    return along(step)(model, x, sigmas, extra_args, callback)


def a_copy_by_torch_tensor(i, x, denoised, sigma, sigma_next):
    return torch.tensor(x) * (sigma_next / sigma) + denoised * (1 - sigma_next / sigma)


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
        )
    },
    **{
        sample.__name__: sample
        for sample in (
            in_double_throughout,
            with_history,
            names_bound_at_import,
            around_comfyuis,
            both_sides,
            tells_nothing,
            falls_back,
            counts_in_a_run,
        )
    },
}


def largest(i, x, denoised, sigma, sigma_next):
    return x * (1 - 0.01 / float(1 + torch.tensor(x).max()))


def smallest(i, x, denoised, sigma, sigma_next):
    return x * x.abs().min().item()


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


def turned(i, x, denoised, sigma, sigma_next):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def other_pictures(i, x, denoised, sigma, sigma_next):
    return x.roll(1, 0)


def own_noise(i, x, denoised, sigma, sigma_next):
    return denoised + torch.randn_like(x) * sigma_next


def own_noise_of_a_shape(i, x, denoised, sigma, sigma_next):
    return denoised + torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) * sigma_next


def own_numbers(i, x, denoised, sigma, sigma_next):
    return denoised + (x - denoised) * (sigma_next / sigma) * random.random()


def fails(i, x, denoised, sigma, sigma_next):
    raise ZeroDivisionError


def never_ends(i, x, denoised, sigma, sigma_next):
    while True:
        x = x * 0.5


def never_ends_on_numbers(i, x, denoised, sigma, sigma_next):
    while True:
        sigma = torch.sin(sigma)


def sets_cfg(model, x, sigmas, extra_args=None, callback=None, disable=None):
    for sigma in sigmas[:-1]:
        x = model(x, sigma * torch.ones(len(x)), **extra_args)
        model.inner_model.cfg = 3.0
    return x


def sets_a_prompt(model, x, sigmas, extra_args=None, callback=None, disable=None):
    model.inner_model.conds["positive"][0]["strength"] = 0.5
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args)


def goes_past(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model.inner_model(x, sigmas[0] * torch.ones(len(x)))


def goes_past_further(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model.inner_model.inner_model.apply_model(x, sigmas[0] * torch.ones(len(x)))


def each_its_sigma(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model(x, sigmas[0] * torch.linspace(0.5, 1, len(x)), **extra_args)


@torch.no_grad()
def another_seed(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model(x, sigmas[0] * torch.ones(len(x)), **{**extra_args, "seed": 5})


def an_option(model, x, sigmas, extra_args=None, callback=None, disable=None):
    options = {**extra_args["model_options"], "sampler_cfg_function": euler}
    return model(x, sigmas[0] * torch.ones(len(x)), **{**extra_args, "model_options": options})


def an_option_in_place(model, x, sigmas, extra_args=None, callback=None, disable=None):
    extra_args["model_options"]["transformer_options"]["mine"] = 1
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args)


def another_guidance(model, x, sigmas, extra_args=None, callback=None, disable=None):
    options = set_model_options_post_cfg_function(
        dict(extra_args["model_options"]), lambda args: args["denoised"] * 0.9
    )
    return model(x, sigmas[0] * torch.ones(len(x)), **{**extra_args, "model_options": options})


def the_noise(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) + model.noise


def a_seed_for_each(model, x, sigmas, extra_args=None, callback=None, disable=None):
    denoised = model(x, sigmas[0] * torch.ones(len(x)), **extra_args)
    return denoised + BrownianTreeNoiseSampler(x, 0.1, 1.0, seed=[1] * len(x))(0.5, 0.2)


def no_seed(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return model(x, sigmas[0] * torch.ones(len(x)), **extra_args) + noise_of(x)(1, 0)


def clamps_by(deviations):
    """Fresh noise, clamped by what `deviations` makes of it."""

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


def of_rows(noise):
    return noise.std(dim=-1, keepdim=True)


def transformed(model, x, sigmas, extra_args=None, callback=None, disable=None):
    denoised = model(x, sigmas[0] * torch.ones(len(x)), **extra_args)
    return denoised + BrownianTreeNoiseSampler(x, 0.1, 1.0, seed=1, transform=lambda t: t**2)(0.5, 0.2)


def knows_a_plain_tensor(i, x, denoised, sigma, sigma_next):
    return x if type(x) is torch.Tensor else denoised


def counts_runs(model, x, sigmas, extra_args=None, callback=None, disable=None):
    global COUNT
    COUNT += 1
    return along(euler)(model, x * COUNT, sigmas, extra_args, callback)


def counts_calls(model, x, sigmas, extra_args=None, callback=None, disable=None):
    CALLS.append(len(CALLS))
    return along(euler)(model, x * len(CALLS), sigmas, extra_args, callback)


def counter():
    count = 0

    def counts_in_a_closure(model, x, sigmas, extra_args=None, callback=None, disable=None):
        nonlocal count
        count += 1
        return along(euler)(model, x * count, sigmas, extra_args, callback)

    return counts_in_a_closure


class State:
    """What an option may keep between runs."""

    def __init__(self):
        self.count = 0


def counts_in_an_option(model, x, sigmas, extra_args=None, callback=None, disable=None, state=None):
    state.count += 1
    return along(euler)(model, x * state.count, sigmas, extra_args, callback)


def returns_another(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return torch.zeros(x.shape)


REFUSED = {
    **{
        step.__name__: (along(step), word)
        for step, word in (
            (largest, "takes a statistic of the latent"),
            (smallest, "takes a statistic of the latent"),
            (branch, "calls torch's any on the latent"),
            (norm_or_one, "takes a norm of the latent"),
            (numpy_or_none, "reads values of the latent"),
            (first_channel, "takes a part of the latent"),
            (mirrored, "calls torch's flip on the latent"),
            (turned, "calls torch's transpose on the latent"),
            (other_pictures, "calls torch's roll on the latent"),
            (own_noise, "draws noise of its own"),
            (own_noise_of_a_shape, "computes with a tensor that is not made of the latent"),
            (own_numbers, "draws numbers of its own"),
            (fails, "raises ZeroDivisionError on a latent without data"),
            (never_ends, "does more than"),
            (never_ends_on_numbers, "takes too long"),
            (knows_a_plain_tensor, "gives another picture when its recording is replayed"),
        )
    },
    **{
        sample.__name__: (sample, word)
        for sample, word in (
            (sets_cfg, "changes the guider or the model"),
            (sets_a_prompt, "changes the guider or the model"),
            (goes_past, "calls the model past the way of samplers"),
            (goes_past_further, "calls the model past the way of samplers"),
            (each_its_sigma, "gives the model a sigma that differs by picture"),
            (another_seed, "gives the model another seed"),
            (an_option, "changes the model option sampler_cfg_function"),
            (an_option_in_place, "changes the guider or the model"),
            (another_guidance, "changes what the guidance gives"),
            (the_noise, "uses the noise"),
            (a_seed_for_each, "draws noise without a seed, or with a seed for each picture"),
            (no_seed, "draws noise without a seed"),
            (clamps_by(biased), "takes a statistic of the latent"),
            (clamps_by(changed_since), "clamps noise that it has changed"),
            (clamps_by(of_rows), "takes a statistic of the latent"),
            (transformed, "draws noise over a transformed schedule"),
            (counts_runs, "remembers what it has done"),
            (counts_calls, "remembers what it has done"),
            (counter(), "remembers what it has done"),
            (counts_in_an_option, "remembers what it has done"),
            (returns_another, "returns what is not made of the latent"),
        )
    },
}
