"""The declarations of models, one kind of model a file, by ComfyUI's names of model classes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...declaration import Declaration
from .auraflow import AURAFLOW
from .cosmos_predict2 import COSMOS_PREDICT2
from .ernie_image import ERNIE_IMAGE
from .flux import CHROMA, CHROMA_RADIANCE, FLUX
from .hidream import HIDREAM
from .hunyuan_video import HUNYUAN_VIDEO
from .ideogram4 import IDEOGRAM4
from .joyimage import JOYIMAGE
from .kandinsky5 import KANDINSKY5, KANDINSKY5_IMAGE
from .krea2 import KREA2
from .lens import LENS
from .ltxav import LTXAV
from .ltxv import LTXV
from .lumina import LUMINA, Z_IMAGE
from .mage_flow import MAGE_FLOW
from .minimax_h3 import MINIMAX_H3
from .mochi import MOCHI
from .omnigen2 import BOOGU, OMNIGEN2
from .qwen_image import QWEN_IMAGE
from .qwen_image21 import QWEN_IMAGE21
from .sd3 import SD3
from .wan import WAN, WAN_SCAIL, WAN_VACE
from .wan_animate2 import WAN_ANIMATE_2
from .wan_by_frame import WAN_ANIMATE, WAN_DANCER, WAN_HUMO, WAN_S2V

DECLARATIONS: Mapping[str, Declaration] = MappingProxyType(
    {
        "Flux": FLUX,
        "FluxInpaint": FLUX,
        "FluxSchnell": FLUX,
        "Flux2": FLUX,
        "LongCatImage": FLUX,
        "Chroma": CHROMA,
        "ChromaRadiance": CHROMA_RADIANCE,
        "QwenImage": QWEN_IMAGE,
        "QwenImage21": QWEN_IMAGE21,
        "WAN21_T2V": WAN,
        "WAN21_I2V": WAN,
        "WAN21_FunControl2V": WAN,
        "WAN21_Camera": WAN,
        "WAN22_Camera": WAN,
        "WAN21_FlowRVS": WAN,
        "WAN22_T2V": WAN,
        "WAN21_Vace": WAN_VACE,
        "WAN21_SCAIL": WAN_SCAIL,
        "WAN21_SCAIL2": WAN_SCAIL,
        "WAN21_HuMo": WAN_HUMO,
        "WAN22_S2V": WAN_S2V,
        "WAN22_Animate": WAN_ANIMATE,
        "WAN22_WanDancer": WAN_DANCER,
        "WAN_Animate2": WAN_ANIMATE_2,
        "HunyuanVideo": HUNYUAN_VIDEO,
        "HunyuanVideoI2V": HUNYUAN_VIDEO,
        "HunyuanVideoSkyreelsI2V": HUNYUAN_VIDEO,
        "HunyuanVideo15": HUNYUAN_VIDEO,
        "HunyuanVideo15_SR_Distilled": HUNYUAN_VIDEO,
        "HunyuanImage21": HUNYUAN_VIDEO,
        "HunyuanImage21Refiner": HUNYUAN_VIDEO,
        "GenmoMochi": MOCHI,
        "LTXV": LTXV,
        "LTXAV": LTXAV,
        "MiniMaxH3": MINIMAX_H3,
        "Kandinsky5": KANDINSKY5,
        "CosmosT2IPredict2": COSMOS_PREDICT2,
        "CosmosI2VPredict2": COSMOS_PREDICT2,
        "Anima": COSMOS_PREDICT2,
        "Lumina2": LUMINA,
        "ZImage": Z_IMAGE,
        "Krea2": KREA2,
        "Omnigen2": OMNIGEN2,
        "SD3": SD3,
        "AuraFlow": AURAFLOW,
        "HiDream": HIDREAM,
        "Kandinsky5Image": KANDINSKY5_IMAGE,
        "JoyImage": JOYIMAGE,
        "Lens": LENS,
        "Boogu": BOOGU,
        "Ideogram4": IDEOGRAM4,
        "ErnieImage": ERNIE_IMAGE,
        "MageFlow": MAGE_FLOW,
    }
)
"""The declarations, by the class in comfy.supported_models that ComfyUI detects for a file."""
