"""Which small models stand for each model class that is declared, and for which inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Input:
    """A small model's call, by its name.

    Attributes:
        conditioning: the conditioning that a graph gives where it takes such a call.
        of: what the configuration of files has set whose models are like this one; empty for all others.
    """

    case: str
    conditioning: frozenset[str] = frozenset()
    of: str = ""


def _of(plain: str, **others: str) -> tuple[Input, ...]:
    """A plain call, and others by the conditioning that makes them so."""
    return Input(plain), *(Input(case, frozenset({conditioning})) for conditioning, case in others.items())


FLUX = _of("flux", ref_latents="flux, references")
WAN = _of("wan, text", time_dim_concat="wan, references behind", context_latents="wan, references behind")
HUNYUAN = (
    *_of("hunyuan video", attention_mask="hunyuan video, masked text"),
    Input("hunyuan video, first frame and reference", frozenset({"guiding_frame_index", "ref_latent"})),
)

LTX23 = "caption_proj_before_connector"

KINDS: Mapping[str, Sequence[Input]] = MappingProxyType(
    {
        "Flux": FLUX,
        "FluxInpaint": FLUX,
        "FluxSchnell": FLUX,
        "Flux2": _of("flux 2, zero-timestep reference"),
        "LongCatImage": FLUX,
        "Chroma": _of("chroma"),
        "ChromaRadiance": _of("chroma radiance"),
        "QwenImage": (
            *_of("qwen-image", attention_mask="qwen-image, masked text"),
            Input("qwen-image-edit, zero-timestep references", frozenset({"ref_latents"})),
            Input("qwen-image-edit, negative index", frozenset({"ref_latents"})),
        ),
        "QwenImage21": _of("qwen-image 2.1", ref_latents="qwen-image 2.1, references"),
        "WAN21_T2V": WAN,
        "WAN21_I2V": _of("wan, image"),
        "WAN21_FunControl2V": _of("wan, image", reference_latent="wan, reference frame"),
        "WAN21_Camera": _of("wan, camera"),
        "WAN22_Camera": _of("wan 2.2, camera"),
        "WAN21_FlowRVS": _of("wan, text"),
        "WAN22_T2V": (Input("wan, text"), Input("wan 2.2, a timestep a frame")),
        "WAN21_Vace": _of("vace, two controls"),
        "WAN21_SCAIL": _of("scail"),
        "WAN21_SCAIL2": _of("scail 2"),
        "WAN21_HuMo": _of("humo", reference_latent="humo, reference"),
        "WAN22_S2V": _of("wan s2v", reference_latent="wan s2v, reference and motion"),
        "WAN22_Animate": _of("wan animate, no faces", face_pixel_values="wan animate"),
        "WAN_Animate2": _of("wan animate 2, no poses", pose_latents="wan animate 2"),
        "WAN22_WanDancer": (Input("wan dancer"), Input("wan dancer, few frames a second", frozenset({"fps"}))),
        "HunyuanVideo": HUNYUAN,
        "HunyuanVideoI2V": _of("hunyuan video, first frame"),
        "HunyuanVideoSkyreelsI2V": HUNYUAN,
        "HunyuanVideo15": _of("hunyuan video 1.5, glyphs and picture"),
        "HunyuanVideo15_SR_Distilled": _of("hunyuan video 1.5, meanflow"),
        "HunyuanImage21": _of("hunyuan image, glyphs"),
        "HunyuanImage21Refiner": _of("hunyuan image, refiner"),
        "GenmoMochi": _of("mochi, padded text"),
        "LTXV": (
            *_of("ltxv", attention_mask="ltxv, masked text and a timestep a token"),
            Input("ltxv, guide", frozenset({"keyframe_idxs"})),
            Input("ltxv, weighed guide", frozenset({"guide_attention_entries"})),
        ),
        "LTXAV": (
            *_of("ltx-2", ref_audio="ltx-2, reference sound"),
            Input("ltx-2, a timestep a frame", frozenset({"denoise_mask"})),
            Input("ltx-2, weighed guide", frozenset({"guide_attention_entries"})),
            Input("ltx-2.3", of=LTX23),
            Input("ltx-2.3, reference sound, a timestep a frame", frozenset({"ref_audio"}), LTX23),
        ),
        "MiniMaxH3": (
            Input("minimax-h3"),
            Input("minimax-h3, curves", of="adaln_curve_grid"),
            *(
                Input(f"minimax-h3, {case}", frozenset({"minimax_payload"}))
                for case in (
                    "first frame and tagged text",
                    "first and last frame",
                    "references with sound",
                )
            ),
        ),
        "Kandinsky5": _of("kandinsky 5", time_dim_replace="kandinsky 5, first frame"),
        "CosmosT2IPredict2": _of("cosmos-predict2"),
        "CosmosI2VPredict2": _of("cosmos-predict2, a timestep a frame"),
        "Anima": _of("anima"),
        "Lumina2": _of("lumina 2, grouped heads"),
        "ZImage": _of("z-image", ref_latents="z-image, reference"),
        "Krea2": _of("krea 2", ref_latents="krea 2, zero-timestep references"),
        "Omnigen2": _of("omnigen 2", ref_latents="omnigen 2, references"),
        "SD3": (Input("sd 3"), Input("sd 3.5 medium")),
        "AuraFlow": _of("auraflow"),
        "HiDream": _of("hidream", image_cond="hidream, a picture to edit"),
        "Kandinsky5Image": _of("kandinsky 5 image"),
        "JoyImage": _of("joyimage", ref_latents="joyimage, references"),
        "Lens": _of("lens", attention_mask="lens, masked text"),
        "Boogu": _of("boogu", ref_latents="boogu, reference"),
        "Ideogram4": _of("ideogram 4"),
        "ErnieImage": _of("ernie-image"),
        "MageFlow": _of("mage-flow", ref_latents="mage-flow, references"),
    }
)
"""By ComfyUI's names of declared models: the plain call, which comes first, and others."""


def cases_of(kind: str, configuration: Mapping[str, Any], conditioning: Collection[str] = ()) -> tuple[str, ...]:
    """The names of the calls that prove a class.

    Args:
        configuration: of the file, as ComfyUI detects it.
        conditioning: the names of the conditioning in the graph; the plain calls are always among them.
    """
    versions = {each.of for each in KINDS[kind] if each.of and configuration.get(each.of)} or {""}
    found = (each.case for each in KINDS[kind] if each.of in versions and each.conditioning <= {*conditioning})
    return tuple(dict.fromkeys(found))


def all_cases(kind: str) -> tuple[str, ...]:
    """The names of all its calls."""
    return tuple(dict.fromkeys(each.case for each in KINDS[kind]))
