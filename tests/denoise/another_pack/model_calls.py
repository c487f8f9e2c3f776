"""Samplers that call the model in various ways."""

import itertools

import torch
from comfy.k_diffusion import sampling
from comfy.k_diffusion.sampling import to_d
from comfy.model_patcher import set_model_options_post_cfg_function


def around_comfyuis(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sampling.sample_dpmpp_2m(model, x * 1.01, sigmas, extra_args=extra_args, callback=callback, disable=disable)


def reads_branches(both):
    """Return a sampler that reads both predictions; without `both`, only if the guidance computes the negative one."""

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None):
        seen = {}

        def hook(args):
            seen.update(args)
            return args["denoised"]

        options = dict(extra_args["model_options"])
        options = set_model_options_post_cfg_function(options, hook, disable_cfg1_optimization=both)
        for i, (sigma, sigma_next) in enumerate(itertools.pairwise(sigmas)):
            denoised = model(x, sigma * x.new_ones([x.shape[0]]), **{**extra_args, "model_options": options})
            callback({"x": x, "i": i, "denoised": denoised})
            other = seen["cond_denoised"] if seen["uncond"] is None else seen["uncond_denoised"]
            x = denoised + to_d(x, sigma, other + 0.1 * seen["cond_denoised"]) * sigma_next
        return x

    return sample


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
    options = {**extra_args["model_options"], "sampler_cfg_function": to_d}
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


def returns_another(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return torch.zeros(x.shape)


LOCAL = {
    "around_comfyuis": around_comfyuis,
    "reads_both_branches": reads_branches(both=True),
    "the_other_side_if_asked": reads_branches(both=False),
}

REFUSED = {
    sample.__name__: (sample, word)
    for sample, word in (
        (sets_cfg, "changes the guider or the model"),
        (sets_a_prompt, "changes the guider or the model"),
        (goes_past, "calls the network directly instead of the model that it received"),
        (goes_past_further, "calls the network directly instead of the model that it received"),
        (each_its_sigma, "passes the model a sigma that differs between pictures"),
        (another_seed, "passes the model a different seed"),
        (an_option, "changes the model option sampler_cfg_function"),
        (an_option_in_place, "changes the guider or the model"),
        (another_guidance, "changes the result of the guidance"),
        (the_noise, "uses the initial noise"),
        (returns_another, "returns a tensor that was not computed from the latent"),
    )
}
