"""Samplers that call the model in various ways."""

import itertools

import torch
from comfy.k_diffusion import sampling
from comfy.k_diffusion.sampling import to_d
from comfy.model_patcher import set_model_options_post_cfg_function


def around_comfyuis(model, x, sigmas, extra_args=None, callback=None, disable=None):
    return sampling.sample_dpmpp_2m(model, x * 1.01, sigmas, extra_args=extra_args, callback=callback, disable=disable)


def reads_both_branches(model, x, sigmas, extra_args=None, callback=None, disable=None):
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


def in_the_place_of_cfgpp_ud10_ab(both):
    """Return a stand-in for ComfyUI 0.35's sampler of this name, by what is known of it.

    It is CFG++ whose derivatives have a history, and goes on to sigma 0 along a line. It uses the positive prediction if the
    negative one is not requested; with `both` it requests that at cfg 1 too.
    """

    def sample(model, x, sigmas, extra_args=None, callback=None, disable=None):
        other = []

        def hook(args):
            other.append(args["cond_denoised"] if args["uncond"] is None else args["uncond_denoised"])
            return args["denoised"]

        options = extra_args["model_options"].copy()
        options = set_model_options_post_cfg_function(options, hook, disable_cfg1_optimization=both)
        before, step_before = None, None
        for i, (sigma, sigma_next) in enumerate(itertools.pairwise(sigmas)):
            denoised = model(x, sigma * x.new_ones([x.shape[0]]), **{**extra_args, "model_options": options})
            callback({"x": x, "i": i, "sigma": sigma, "sigma_hat": sigma, "denoised": denoised})
            step = (denoised + to_d(x, sigma, other[-1]) * sigma_next - x) / (sigma_next - sigma)
            mixed = step if step_before is None else torch.lerp(step, 1.5 * step - 0.5 * step_before, 0.25)
            if sigma_next == 0 and before is not None:
                x = denoised - sigma * (denoised - before[0]) / (sigma - before[1])
            else:
                x = x + mixed * (sigma_next - sigma)
            before, step_before = (denoised, sigma), step
        return x

    return sample


LOCAL = {
    "around_comfyuis": around_comfyuis,
    "reads_both_branches": reads_both_branches,
    "in_the_place_of_cfgpp_ud10_ab": in_the_place_of_cfgpp_ud10_ab(both=True),
    "the_other_side_if_asked": in_the_place_of_cfgpp_ud10_ab(both=False),
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
