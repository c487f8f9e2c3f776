"""ComfyUI's model patches that add a network to the blocks, in the form that the workers take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import comfy.ldm.anima.lllite as lllite
import comfy.utils
import torch
from comfy.ldm.cosmos.predict2 import MiniTrainDIT
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel
from comfy.ldm.wan.model_multitalk import MultiTalkCrossAttnPatch, MultiTalkGetAttnMapPatch
from torch import Tensor, nn

from ....parallel_backend.errors import Refused
from ....parallel_backend.models.comfyui.content.model_code import classes_of
from ....parallel_backend.models.comfyui.features.node_functions import ATTENTION_OUTPUT, UNET_OUTPUT
from ....parallel_backend.plan import ResolvedPlan
from ....parallel_backend.weights.adapters.lora import CROSS_ATTENTION, SELF_ATTENTION, NetworkPatch
from ..own_code import COMFYUI, foreign
from ..refusals import WAY_OUT, refuse_transformer_options
from ..unchanged import refuse_replaced
from .feature import Feature
from .node_functions import attention_guidance_functions, unet_functions

ZIMAGE_SETTINGS = ("n_control_layers", "additional_in_dim", "control_in_dim", "refiner_control", "broken")
"""Settings of a Z-Image network that ComfyUI's loader derives from the file."""

NODES = COMFYUI / "comfy_extras" / "nodes_model_patch.py"
"""ComfyUI's file of the nodes for model patches."""

OF_MODELS = ("comfy.", "torch.")
"""Prefixes of modules whose classes are compared with their source. ComfyUI imports its nodes under names that are paths."""

UNSHARDED: Literal["ZImageControl"] = "ZImageControl"
"""The kind of network that sees the whole picture at once, on every rank."""

PATCHES = "patches"
"""The transformer option that holds the nodes' functions."""

PatchTable: TypeAlias = Mapping[str, Sequence[Any]]
"""The value of the option `patches`: functions by the place where a model calls them."""

Name = Callable[[Tensor], str]
"""A function that adds a tensor to those to send, and returns its id."""


def networks_of(
    options: Mapping[str, Any], skeleton: nn.Module, shape: Sequence[int], name: Name
) -> tuple[NetworkPatch, ...]:
    """Return the networks that a MODEL's options add to its blocks, in order.

    Args:
        options: the transformer_options.
        skeleton: ComfyUI's diffusion model.
        shape: the latent's shape `[batch, channels, frames, height, width]`.
        name: adds the networks' tensors to those to send.

    Raises:
        Refused: the workers do not know a patch, or a network does not fit the model.
    """
    every_patch = {point: functions for point, functions in (options.get(PATCHES) or {}).items() if functions}
    patches = dict(every_patch)
    if attention_guidance_functions(options):
        del patches[ATTENTION_OUTPUT]
    if unet_functions(options, skeleton):
        del patches[UNET_OUTPUT]
    if not patches:
        return ()
    if isinstance(skeleton, MiniTrainDIT) and _all_lllite(patches):
        return tuple(_lllite(patch, skeleton, shape, name) for patch in patches["post_input"])
    if isinstance(skeleton, QwenImageTransformer2DModel) and _all_diffsynth(patches):
        return tuple(_diffsynth(patch, skeleton, shape, name) for patch in patches["double_block"])
    if isinstance(skeleton, NextDiT) and _all_zimage(patches):
        return tuple(_zimage(patch, skeleton, shape, name) for patch in patches["double_block"])
    if type(skeleton) is WanModel and _all_infinitetalk(patches):
        return (_infinitetalk(patches, skeleton, shape, name, options["audio_embeds"]),)
    refuse_transformer_options({PATCHES: every_patch}, skeleton)
    raise AssertionError("any patches that are left are refused")


def _all_lllite(patches: PatchTable) -> bool:
    """Return True if all patches are those of Apply Anima LLLite, applied once or several times."""
    wholes = patches.get("post_input", ())
    inside: dict[str, tuple[type, Mapping[str, str] | None]] = {
        "attn1_patch": (lllite.AnimaLLLiteAttentionPatch, SELF_ATTENTION),
        "attn2_patch": (lllite.AnimaLLLiteAttentionPatch, CROSS_ATTENTION),
        "mlp_patch": (lllite.AnimaLLLiteMLPPatch, None),
    }
    if set(patches) != {"post_input", *inside} or not all(_own(p, lllite.AnimaLLLitePatch) for p in wholes):
        return False
    return all(_own(p.model_patch.model, lllite.AnimaLLLite) for p in wholes) and all(
        [_part_of(p, kind) for p in patches[point]] == [(id(whole), targets) for whole in wholes]
        for point, (kind, targets) in inside.items()
    )


def _part_of(patch: Any, kind: type) -> Any:
    """Return the id of the network that a patch belongs to, with its targets; None for a patch of another kind."""
    return (id(patch.patch), getattr(patch, "targets", None)) if _own(patch, kind) else None


def _lllite(patch: Any, skeleton: Any, shape: Sequence[int], name: Name) -> NetworkPatch:
    module = patch.model_patch.model
    _check_width(module.model_dim, skeleton.model_channels)
    if len(shape) > 4 and shape[2] != 1:
        raise Refused(f"Anima LLLite takes a picture and the latent has {shape[2]} frames: use a latent of one frame.")
    inputs = {"image": patch.image} if patch.mask is None else {"image": patch.image, "mask": patch.mask}
    _check_single(inputs.values())
    aspp = module.lllite_conditioning1.aspp
    values: dict[str, Any] = {
        "lllite.inpaint_masked_input": str(module.inpaint_masked_input).lower(),
        "strength": float(patch.strength),
        "sigma_start": float(patch.sigma_start),
        "sigma_end": float(patch.sigma_end),
    }
    if aspp is not None:
        values["lllite.aspp_dilations"] = ",".join(str(branch[0].dilation[0]) for branch in aspp.branches)
    return NetworkPatch(
        "AnimaLLLite", _weights(patch, module, name), {key: name(value) for key, value in inputs.items()}, values
    )


def _all_diffsynth(patches: PatchTable) -> bool:
    """Return True if all patches are those of Apply Qwen Image DiffSynth ControlNet."""
    return set(patches) == {"double_block"} and all(
        _of_nodes(patch, "DiffSynthCnetPatch") and _of_nodes(patch.model_patch.model, "QwenImageBlockWiseControlNet")
        for patch in patches["double_block"]
    )


def _diffsynth(patch: Any, skeleton: Any, shape: Sequence[int], name: Name) -> NetworkPatch:
    module = patch.model_patch.model
    _check_width(module.img_in.out_features, skeleton.inner_dim)
    blocks, depth = len(module.controlnet_blocks), len(skeleton.transformer_blocks)
    _check_blocks(blocks, depth)
    _fit(patch, shape)
    _check_single([patch.encoded_image])
    values: dict[str, Any] = {"strength": float(patch.strength)}
    weights = _weights(patch, module.controlnet_blocks, name)
    return NetworkPatch("QwenDiffSynth", weights, {"encoded": name(patch.encoded_image)}, values)


def _all_zimage(patches: PatchTable) -> bool:
    """Return True if all patches are those of Apply Z-Image Fun ControlNet."""
    double_blocks, refining = (patches.get(point, ()) for point in ("double_block", "noise_refiner"))
    return (
        set(patches) == {"double_block", "noise_refiner"}
        and [*map(id, double_blocks)] == [*map(id, refining)]
        and all(_of_nodes(p, "ZImageControlPatch") and _own(p.model_patch.model, ZImage_Control) for p in double_blocks)
    )


def _zimage(patch: Any, skeleton: Any, shape: Sequence[int], name: Name) -> NetworkPatch:
    module = patch.model_patch.model
    block = module.control_layers[0]
    _check_width(block.dim, skeleton.dim)
    last, blocks = (module.n_control_layers - 1) * round(30 / module.n_control_layers), len(skeleton.layers)
    if last >= blocks:
        raise Refused(
            f"the model patch changes block {last} and the model has only {blocks}: choose a patch that was made for this "
            "model."
        )
    height, width = (size + size % skeleton.patch_size for size in shape[-2:])
    beyond = {"x": torch.empty(1, 1, height, width, device="meta"), "block_index": blocks}
    patch(beyond | dict.fromkeys(("img", "txt")))  # after the last block, the patch at most encodes the picture
    _check_single([patch.encoded_image])
    values = {
        "strength": float(patch.strength),
        "dim": block.dim,
        "n_heads": block.attention.n_local_heads,
        "n_kv_heads": block.attention.n_local_kv_heads,
        **{key: getattr(module, key) for key in ZIMAGE_SETTINGS},
    }
    return NetworkPatch(UNSHARDED, _weights(patch, module, name), {"encoded": name(patch.encoded_image)}, values)


def _all_infinitetalk(patches: PatchTable) -> bool:
    """Return True if the patches are those of one WanInfiniteTalkToVideo, for one speaker or two."""
    kinds = {"attn2_patch": MultiTalkCrossAttnPatch, "attn1_patch": MultiTalkGetAttnMapPatch}
    return (
        patches.keys() <= kinds.keys()
        and all(len(functions) == 1 and _own(functions[0], kinds[point]) for point, functions in patches.items())
        and "attn2_patch" in patches
        and _of_nodes(patches["attn2_patch"][0].model_patch.model, "MultiTalkModelPatch")
    )


def _infinitetalk(patches: PatchTable, skeleton: Any, shape: Sequence[int], name: Name, speech: Tensor) -> NetworkPatch:
    (patch,) = patches["attn2_patch"]
    blocks = patch.model_patch.model.blocks
    _check_width(blocks[0].norm_x.normalized_shape[0], skeleton.dim)
    _check_blocks(len(blocks), len(skeleton.blocks))
    if speech.shape[1] != shape[2]:
        raise Refused(
            f"the speech is for {speech.shape[1]} latent frames and the latent has {shape[2]}: use the latent of "
            "WanInfiniteTalkToVideo."
        )
    if shape[0] != 1:
        raise Refused(
            f"InfiniteTalk takes one video and one prompt in a model call, and this call has {shape[0]}: choose batch_size 1 "
            "and cfg 1."
        )
    inputs = {"speech": name(speech)}
    for speakers in patches.get("attn1_patch", ()):
        inputs["places"] = name(speakers.ref_target_masks.to(torch.uint8))
    return NetworkPatch("InfiniteTalk", _weights(patch, blocks, name), inputs, {"strength": float(patch.audio_scale)})


def refuse_stages(plan: ResolvedPlan, networks: Sequence[NetworkPatch]) -> None:
    """Raise Refused if a network needs the whole picture at once and the plan splits it into patches."""
    if plan.uses_pipefusion and any(network.kind == UNSHARDED for network in networks):
        raise Refused(
            f"Apply Z-Image Fun ControlNet cannot be used with pipefusion {plan.pipefusion} and patches {plan.patches}, because "
            "its blocks need the whole picture at once: choose pipefusion 1 and patches 1 in Parallel Plan."
        )


def _fit(patch: Any, shape: Sequence[int]) -> None:
    """Make the patch encode its picture for the latent's size, as the patch does when ComfyUI calls it."""
    pixels = patch.vae.spacial_compression_encode()
    height, width = shape[-2] * pixels, shape[-1] * pixels
    if patch.encoded_image is not None and patch.encoded_image_size == (height, width):
        return
    scaled = comfy.utils.common_upscale(patch.image.movedim(-1, 1), width, height, "area", "center")
    patch.encoded_image = patch.model_patch.model.process_input_latent_image(
        patch.encode_latent_cond(scaled.movedim(1, -1))
    )
    patch.encoded_image_size = (height, width)


def _own(instance: Any, kind: type) -> bool:
    """Return True if an object has exactly this ComfyUI class and no other pack has changed it."""
    return type(instance) is kind and next(foreign(instance, ""), None) is None


def _of_nodes(instance: Any, name: str) -> bool:
    """Return True if an object's class is in ComfyUI's file of the nodes for model patches, and unchanged.

    ComfyUI imports that file under a name of its own.
    """
    module = sys.modules.get(type(instance).__module__)
    return getattr(module, "__file__", None) == str(NODES) and _own(instance, vars(module)[name])


def _weights(patch: Any, module: nn.Module, name: Name) -> dict[str, str]:
    patcher = patch.model_patch
    if patcher.patches or patcher.object_patches or next(_changed(patcher.model), None) is not None:
        raise Refused(f"a model patch that another node has changed cannot be applied to a parallel MODEL: {WAY_OUT}.")
    refuse_replaced(frozenset(kind for kind in classes_of(module) if kind.__module__.startswith(OF_MODELS)))
    return {key: name(value) for key, value in module.state_dict(keep_vars=True).items()}


def _changed(module: nn.Module) -> Iterator[str]:
    """Yield another pack's changes to a network, in words."""
    for part in module.modules():
        yield from foreign(part, "network")
        yield from (table for table, hooks in vars(part).items() if table.endswith("_hooks") and hooks)


def _check_width(width: int, model_width: int) -> None:
    if width != model_width:
        raise Refused(
            f"the model patch is made for a width of {width} and the model has {model_width}: choose a patch that was made for "
            "this model."
        )


def _check_blocks(blocks: int, model_blocks: int) -> None:
    if blocks < model_blocks:
        raise Refused(
            f"the model patch has {blocks} blocks and the model {model_blocks}: choose a patch that was made for this model."
        )


def _check_single(inputs: Any) -> None:
    for tensor in inputs:
        if tensor.shape[0] != 1:
            raise Refused(
                f"the model patch has a batch of {tensor.shape[0]} pictures and a parallel MODEL takes one: use one picture, or "
                "Load Diffusion Model."
            )


FEATURE = Feature(handled=lambda call: (PATCHES,))
"""Carries out the option `patches`. `networks_of` reads the networks from it, and refuses all other patches."""
