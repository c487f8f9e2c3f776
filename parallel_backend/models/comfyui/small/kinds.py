"""The small models that represent each declared model class, and the inputs that each covers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Input:
    """A small model's call, by its name.

    Attributes:
        case: the name.
        of: a configuration entry that files of this version have set; empty for all other files.
        plain: True if a graph with only a text makes this call.
    """

    case: str
    of: str = ""
    plain: bool = False


def _of(plain: str, *more_cases: str, of: str = "") -> tuple[Input, ...]:
    """Return a plain call, and further calls."""
    return Input(plain, of, plain=True), *(Input(case, of) for case in more_cases)


FLUX = _of("flux", "flux, references", "flux, references by index")
WAN = _of("wan, text", "wan, references behind")
HUNYUAN = _of("hunyuan video", "hunyuan video, masked text", "hunyuan video, first frame and reference")

LTX23 = "caption_proj_before_connector"

KINDS: Mapping[str, Sequence[Input]] = MappingProxyType(
    {
        "Flux": FLUX,
        "FluxInpaint": FLUX,
        "FluxSchnell": FLUX,
        "Flux2": _of("flux 2", "flux 2, zero-timestep reference"),
        "LongCatImage": FLUX,
        "Chroma": _of("chroma"),
        "ChromaRadiance": _of("chroma radiance"),
        "QwenImage": _of(
            "qwen-image",
            "qwen-image, masked text",
            "qwen-image-edit, references",
            "qwen-image-edit, zero-timestep references",
            "qwen-image-edit, negative index",
        ),
        "QwenImage21": _of("qwen-image 2.1", "qwen-image 2.1, references"),
        "WAN21_T2V": WAN,
        "WAN21_I2V": _of("wan, image"),
        "WAN21_FunControl2V": _of("wan, image", "wan, reference frame"),
        "WAN21_Camera": _of("wan, camera"),
        "WAN22_Camera": _of("wan 2.2, camera"),
        "WAN21_FlowRVS": _of("wan, text"),
        "WAN22_T2V": _of("wan, text", "wan 2.2, a timestep a frame"),
        "WAN21_Vace": _of("vace, two controls"),
        "WAN21_SCAIL": _of("scail"),
        "WAN21_SCAIL2": _of("scail 2"),
        "WAN21_HuMo": _of("humo", "humo, reference", "humo, no sound", "humo 17b, reference"),
        "WAN22_S2V": _of("wan s2v", "wan s2v, reference and motion"),
        "WAN22_Animate": _of("wan animate, no faces", "wan animate"),
        "WAN_Animate2": _of("wan animate 2, no poses", "wan animate 2"),
        "WAN22_WanDancer": _of("wan dancer", "wan dancer, few frames a second"),
        "HunyuanVideo": HUNYUAN,
        "HunyuanVideoI2V": _of("hunyuan video, first frame", "hunyuan video, first frame, masked text"),
        "HunyuanVideoSkyreelsI2V": _of("skyreels", "skyreels, masked text"),
        "HunyuanVideo15": _of(
            "hunyuan video 1.5, glyphs and picture", "hunyuan video 1.5, masked text and first frame"
        ),
        "HunyuanVideo15_SR_Distilled": _of("hunyuan video 1.5, meanflow"),
        "HunyuanImage21": _of("hunyuan image, glyphs", "hunyuan image, masked text"),
        "HunyuanImage21Refiner": _of("hunyuan image, refiner", "hunyuan image, refiner, masked text"),
        "GenmoMochi": _of("mochi, padded text"),
        "LTXV": _of("ltxv", "ltxv, masked text and a timestep a token", "ltxv, guide", "ltxv, weighed guide"),
        "LTXAV": (
            *_of(
                "ltx-2",
                "ltx-2, masked text",
                "ltx-2, reference sound",
                "ltx-2, a timestep a frame",
                "ltx-2, weighed guide",
                "ltx-2, video alone",
                "ltx-2, neither hears the other",
                "ltx-2, no picture from the sound",
            ),
            *_of("ltx-2.3", "ltx-2.3, reference sound, a timestep a frame", of=LTX23),
        ),
        "MiniMaxH3": (
            *_of(
                "minimax-h3",
                "minimax-h3, first frame and tagged text",
                "minimax-h3, first and last frame",
                "minimax-h3, references with sound",
                "minimax-h3, masked",
            ),
            *_of("minimax-h3, curves", of="adaln_curve_grid"),
        ),
        "Kandinsky5": _of("kandinsky 5", "kandinsky 5, first frame"),
        "CosmosT2IPredict2": _of("cosmos-predict2"),
        "CosmosI2VPredict2": _of("cosmos-predict2, a timestep a frame"),
        "Anima": _of("anima"),
        "Lumina2": _of("lumina 2, grouped heads"),
        "ZImage": _of("z-image", "z-image, masked text", "z-image, reference"),
        "Krea2": _of("krea 2", "krea 2, zero-timestep references"),
        "Omnigen2": _of("omnigen 2", "omnigen 2, references"),
        "SD3": _of("sd 3", "sd 3.5 medium"),
        "AuraFlow": _of("auraflow"),
        "HiDream": _of("hidream", "hidream, a picture to edit"),
        "Kandinsky5Image": _of("kandinsky 5 image"),
        "JoyImage": _of("joyimage", "joyimage, references"),
        "Lens": _of("lens", "lens, masked text"),
        "Boogu": _of("boogu", "boogu, reference"),
        "Ideogram4": _of("ideogram 4"),
        "ErnieImage": _of("ernie-image"),
        "MageFlow": _of("mage-flow", "mage-flow, references"),
    }
)
"""The small calls of each declared model class, by ComfyUI's class name."""


def cases_of(kind: str, configuration: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a class's calls for a file, the plain call first.

    Args:
        configuration: the file's configuration, as ComfyUI detects it.
    """
    versions = {entry.of for entry in KINDS[kind] if entry.of and configuration.get(entry.of)} or {""}
    inputs = [entry for entry in KINDS[kind] if entry.of in versions]
    return tuple(entry.case for entry in sorted(inputs, key=lambda entry: not entry.plain))


def all_cases(kind: str) -> tuple[str, ...]:
    """Return the names of all calls of a class."""
    return tuple(each.case for each in KINDS[kind])
