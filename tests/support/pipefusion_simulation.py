"""PipeFusion's staleness rule for FLUX in one process: an oracle that shares no code with the engine.

This file runs ComfyUI's own FLUX blocks, samplers and CFG, and decides only which keys a query attends to. A model call is one
evaluation of the model at one sigma. Calls of the first `warmup_steps` steps are exact: they compute all tokens together and
fill the key/value cache of every block. Every later call runs patch after patch. Each patch writes its fresh keys and values
into the cache before its queries attend to all of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as replaced

import torch
from torch import Tensor

from tests.support.comfy_oracle import comfy_on_path

comfy_on_path()

import comfy.extra_samplers.uni_pc  # noqa: E402
import comfy.k_diffusion.sampling  # noqa: E402
import comfy.latent_formats  # noqa: E402
import comfy.model_detection  # noqa: E402
import comfy.samplers  # noqa: E402
from comfy.ldm.flux.math import apply_rope  # noqa: E402

Prompt = tuple[Tensor, Tensor | None]
"""Text embeddings `[1 or batch, tokens, width]` and the pooled output `[1 or batch, width]`."""


@dataclass(frozen=True)
class Rule:
    """PipeFusion's rule. Other values are mutations that a comparison must be able to detect."""

    updates_cache: bool = True
    """True if a patch leaves its fresh keys and values in the cache, for the patches and calls after it."""
    own_keys_fresh: bool = True
    """True if a patch attends to its own fresh keys and values, false if to those of its last call."""
    text_once: bool = True
    """True if the text is computed with patch 0 only, false if with every patch."""


PIPEFUSION = Rule()


def load_model(tensors: dict[str, Tensor]) -> Any:
    """Return ComfyUI's `model_base.Flux` in fp32 from a checkpoint in Black Forest Labs' keys, without prefix."""
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    config = comfy.model_detection.model_config_from_unet(tensors, "")
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(tensors)
    model.load_model_weights(dict(tensors), "")
    return model.eval().requires_grad_(False)


def ksampler_sigmas(model: Any, steps: int, *, sampler: str, scheduler: str = "simple", denoise: float = 1.0) -> Tensor:
    """Return the sigmas that ComfyUI's KSampler uses for a model of `load_model` (schnell or dev, by its checkpoint)."""
    patcher = SimpleNamespace(get_model_object=lambda name: getattr(model, name))
    return comfy.samplers.KSampler(
        patcher, steps, device="cpu", sampler=sampler, scheduler=scheduler, denoise=denoise
    ).sigmas


def process_out(latent: Tensor) -> Tensor:
    """Convert a latent from the model's latent space to the one that SaveLatent writes."""
    return comfy.latent_formats.Flux().process_out(latent)


def patch_rows(rows: int, patches: int) -> list[range]:
    """Return the token rows of each patch."""
    return [range(m * rows // patches, (m + 1) * rows // patches) for m in range(patches)]


class Cache:
    """The keys and values of all tokens (text, image, references) in every block, for one prompt."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.keys: dict[tuple[str, int], Tensor] = {}
        self.values: dict[tuple[str, int], Tensor] = {}
        self.whole = True
        self.slots = torch.empty(0, dtype=torch.long)
        """Cache positions of the last tokens of the chunk; the tokens before those are idle."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pe: Tensor, attn_mask: Tensor | None, extra_options: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the q, k and v `[b, heads, n, d]` that replace the chunk's own in a block (ComfyUI's attn1_patch)."""
        assert attn_mask is None
        block = (extra_options["block_type"], extra_options["block_index"])
        q, k = apply_rope(q, k, pe)
        if self.whole:
            self.keys[block], self.values[block] = k.clone(), v.clone()
            return {"q": q, "k": k, "v": v, "pe": None}

        own_k, own_v = (part[:, :, -len(self.slots) :] for part in (k, v))  # without the idle text token's
        stale = self.keys[block], self.values[block]
        fresh = stale[0].index_copy(2, self.slots, own_k), stale[1].index_copy(2, self.slots, own_v)
        if self.rule.updates_cache:
            self.keys[block], self.values[block] = fresh
        k, v = fresh if self.rule.own_keys_fresh else stale
        return {"q": q, "k": k, "v": v, "pe": None}


class Branch:
    """One guidance branch of the model (a prompt), with its own cache."""

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        guidance: float | None,
        patches: int,
        rule: Rule,
        references: Sequence[Tensor] = (),
    ) -> None:
        self.flux = model.diffusion_model
        self.sampling = model.model_sampling
        self.context, self.pooled = prompt
        self.guidance = None if guidance is None else torch.tensor([guidance])
        self.patches = patches
        self.rule = rule
        self.references = [  # each in its own plane, as ComfyUI's method "index" places references
            self.flux.process_img(latent, index=(1 + number) * self.flux.params.ref_index_scale)
            for number, latent in enumerate(references)
        ]
        self.cache = Cache(rule)

    def denoised(self, x: Tensor, sigma: Tensor, *, whole: bool) -> Tensor:
        """Return the denoised latent of one model call. If `whole`, compute all tokens together and exactly."""
        batch, _, height, width = x.shape
        rows, columns = math.ceil(height / 2), math.ceil(width / 2)
        if self.patches > rows:
            raise ValueError(f"{rows} rows of tokens cannot be cut into {self.patches} patches.")
        image, image_ids = self.flux.process_img(x)  # pads an odd latent circularly
        assert image.shape[1] == rows * columns

        parts = []
        for m, run in enumerate([range(rows)] if whole else patch_rows(rows, self.patches)):
            tokens = slice(run.start * columns, run.stop * columns)
            chunk = image[:, tokens], image_ids[:, tokens]
            parts.append(self._chunk(*chunk, tokens, image.shape[1], sigma, first=m == 0, whole=whole))
        grid = torch.cat(parts, dim=1).view(batch, rows, columns, -1, 2, 2)
        velocity = grid.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, 2 * rows, 2 * columns)[:, :, :height, :width]
        return self.sampling.calculate_denoised(sigma, velocity, x)

    def _chunk(
        self,
        image: Tensor,
        image_ids: Tensor,
        tokens: slice,
        image_tokens: int,
        sigma: Tensor,
        *,
        first: bool,
        whole: bool,
    ) -> Tensor:
        """Return the velocity of the chunk `tokens` of all `image_tokens`.

        The `first` chunk also computes the text and the references.
        """
        batch, own = image.shape[:2]
        length = self.context.shape[1]
        with_text = first or not self.rule.text_once
        # ComfyUI's blocks fail without text: without it, pass one text token that nothing attends to.
        text = (self.context if with_text else self.context[:, :1]).expand(batch, -1, -1)
        slots = torch.arange(length + tokens.start, length + tokens.stop)
        slots = torch.cat((torch.arange(length), slots)) if with_text else slots
        if first and self.references:
            pictures, places = (
                torch.cat(parts, dim=1).expand(batch, -1, -1) for parts in zip(*self.references, strict=True)
            )
            image, image_ids = torch.cat((image, pictures), dim=1), torch.cat((image_ids, places), dim=1)
            end = length + image_tokens
            slots = torch.cat((slots, torch.arange(end, end + pictures.shape[1])))
        self.cache.slots = slots
        self.cache.whole = whole
        velocity = self.flux.forward_orig(
            image,
            image_ids,
            text,
            torch.zeros(batch, text.shape[1], 3),
            self.sampling.timestep(sigma).float(),
            None if self.pooled is None else self.pooled.expand(batch, -1),
            self.guidance,
            transformer_options={"patches": {"attn1_patch": [self.cache]}},
        )
        return velocity[:, :own]


class Guider:
    """A guider that ComfyUI's samplers call as their model: both branches and CFG."""

    def __init__(self, model: Any, positive: Branch, negative: Branch | None, cfg: float, warmup_steps: int) -> None:
        self.inner_model = model
        self.model_patcher = SimpleNamespace(model=model, get_model_object=lambda name: getattr(model, name))
        self.positive = positive
        self.negative = negative
        self.cfg = cfg
        self.warmup_steps = warmup_steps
        self.step: int | None = None
        self.calls: list[int] = []
        """The steps of the model calls so far, in order."""

    def __call__(self, x: Tensor, sigma: Tensor, model_options: dict[str, Any], seed: int | None = None) -> Tensor:
        if self.step is None:
            raise ValueError("This sampler does not say which step a model call belongs to.")
        self.calls.append(self.step)
        whole = self.step < self.warmup_steps
        cond = self.positive.denoised(x, sigma, whole=whole)
        if math.isclose(self.cfg, 1.0) and not model_options.get("disable_cfg1_optimization", False):
            uncond = cond
        elif self.negative is None:
            raise ValueError("A negative prompt is needed for this cfg and sampler.")
        else:
            uncond = self.negative.denoised(x, sigma, whole=whole)
        return comfy.samplers.cfg_function(
            self.inner_model, cond, uncond, self.cfg, x, sigma, model_options=model_options
        )

    @contextmanager
    def steps_counted(self) -> Iterator[None]:
        """Keep `step` equal to the step of ComfyUI's sampler loops inside this context."""

        def counted(steps: int, **_: Any) -> Iterable[int]:
            for self.step in range(steps):
                yield self.step

        with ExitStack() as stack:
            for module in (comfy.k_diffusion.sampling, comfy.extra_samplers.uni_pc):
                stack.enter_context(replaced.object(module, "trange", counted))
            yield


@torch.no_grad()
def simulate(
    tensors: dict[str, Tensor],
    *,
    noise: Tensor,
    sigmas: Tensor,
    positive: Prompt,
    negative: Prompt | None = None,
    cfg: float = 1.0,
    guidance: float | None = 3.5,
    sampler: str = "euler",
    seed: int = 0,
    patches: int,
    warmup_steps: int,
    latent: Tensor | None = None,
    references: Sequence[Tensor] = (),
    rule: Rule = PIPEFUSION,
    model: Any = None,
) -> Tensor:
    """Denoise as KSampler does, with PipeFusion's staleness. The result is in the model's latent space.

    Args:
        tensors: the checkpoint, in Black Forest Labs' keys.
        noise: `[batch, 16, height, width]`, of standard deviation 1; `seed` does not affect it.
        sigmas: sigmas from `ksampler_sigmas`.
        positive: the positive prompt.
        negative: the negative prompt; not needed when `cfg` is 1.
        cfg: the guidance scale, as in KSampler.
        guidance: the guidance of dev models. ComfyUI uses 3.5 when the prompt has none; None leaves the embedding out.
        sampler: ComfyUI's name of a sampler. Samplers without a loop over steps (dpm_fast, dpm_adaptive) are refused.
        seed: the seed of the sampler's own noise.
        patches: number of patches, each a run of token rows.
        warmup_steps: number of exact steps, at least one.
        latent: the latent to denoise, in the model's latent space; None means zeros (an empty latent).
        references: latents `[1, 16, height, width]` of reference pictures after both prompts, by the method "index". They go
            with the first patch, as text does.
        rule: PipeFusion's rule, or a mutation of it.
        model: a model of `load_model`; `tensors` is then ignored.

    Raises:
        ValueError: a missing negative prompt, no warm-up, more patches than token rows, or a sampler without steps.
    """
    if warmup_steps < 1:
        raise ValueError("The first step has no earlier keys: warmup_steps must be at least 1.")
    model = model or load_model(tensors)
    first = Branch(model, positive, guidance, patches, rule, references)
    second = None if negative is None else Branch(model, negative, guidance, patches, rule, references)
    guider = Guider(model, first, second, cfg, warmup_steps)
    with guider.steps_counted():
        return comfy.samplers.sampler_object(sampler).sample(
            guider,
            sigmas.clone(),  # uni_pc writes into it
            {"model_options": {}, "seed": seed},
            None,
            noise,
            torch.zeros_like(noise) if latent is None else latent,
            disable_pbar=True,
        )
