"""Graphs that can give no picture."""

from __future__ import annotations

from tests.support.graphs.flux import Graph, insert_after, insert_after_model, ksampler_graph, node


def with_sigmas(sigmas: str) -> Graph:
    graph = ksampler_graph("tiny-schnell", width=64, height=64)
    graph["sigmas"] = node("ManualSigmas", sigmas=sigmas)
    graph["kind"] = node("KSamplerSelect", sampler_name="euler")
    graph["noise"] = node("RandomNoise", noise_seed=3)
    graph["guider"] = node("BasicGuider", model=["model", 0], conditioning=["positive", 0])
    graph["sampler"] = node(
        "SamplerCustomAdvanced",
        noise=["noise", 0],
        guider=["guider", 0],
        sampler=["kind", 0],
        sigmas=["sigmas", 0],
        latent_image=["latent", 0],
    )
    return graph


SHIFT = insert_after_model(ksampler_graph("tiny-schnell", width=64, height=64), "ModelSamplingSD3", shift=0.0)


def masked(value: str, of: str) -> Graph:
    """Return a graph with this value in a mask of the noise or of a prompt."""
    graph = ksampler_graph("tiny-schnell", width=64, height=64) | {"mask": node("PackMask", value=value)}
    if of == "noise":
        return insert_after(graph, "latent", "SetLatentNoiseMask", "samples", mask=["mask", 0])
    area = {"strength": 1.0, "set_cond_area": "default"}
    return insert_after(graph, "positive", "ConditioningSetMask", "conditioning", mask=["mask", 0], **area)


def with_guidance(value: str) -> Graph:
    graph = ksampler_graph("tiny-dev", width=64, height=64)
    return insert_after(graph, "positive", "PackGuidance", "conditioning", value=value)


NO_PICTURE = {
    **{
        f"{value} in a mask of the noise": (
            masked(value, "noise"),
            r"the noise mask holds \d+ values of \d+ that are NaN or infinite: look at the node it comes from .set it from 0",
        )
        for value in ("nan", "inf")
    },
    "nan in a mask of a prompt": (
        masked("nan", "prompt"),
        r"the mask of a prompt holds \d+ values of \d+ that are NaN or infinite: look at the node it comes from .set it",
    ),
    "a guidance of 1e38": (
        with_guidance("1e38"),
        r"the guidance is 1e.38, which overflows in float32: set it to a number such as 3.5 in FluxGuidance",
    ),
    "0, 0": (with_sigmas("0, 0"), "Step 1 of 1: the sampler's step gives .* the sigmas go from 0 to 0"),
    "step by step": (
        insert_after_model(with_sigmas("0, 0"), "RescaleCFG", multiplier=0.7),
        "After the last step: .* the sigmas go from 0 to 0",
    ),
    "to 1": (with_sigmas("0.5, 1"), "the sigmas end at 1, where this model's latent is pure noise"),
    "a shift of 0": (SHIFT, r"sigma 1 of \d is nan: .* the shift of a ModelSampling node"),
}
