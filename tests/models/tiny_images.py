"""The classes of ComfyUI's other picture models, as in tiny_classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.models.tiny_classes import AXES, HEADS, SETTINGS, TEXT, WIDTH, Case, case, text
from tests.tiny_models import draw

# isort: split
from comfy.ldm.aura.mmdit import MMDiT as AuraFlow
from comfy.ldm.boogu.model import BooguTransformer2DModel
from comfy.ldm.ernie.model import ErnieImageModel
from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel
from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel
from comfy.ldm.joyimage.model import JoyImageTransformer3DModel
from comfy.ldm.kandinsky5.model import Kandinsky5
from comfy.ldm.krea2.model import SingleStreamDiT
from comfy.ldm.lens.model import LensTransformer2DModel
from comfy.ldm.mage_flow.model import MageFlowTransformer2DModel
from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper as SD3
from comfy.ldm.omnigen.omnigen2 import OmniGen2Transformer2DModel


def _krea2(references: str = "") -> Case:
    model = SingleStreamDiT(
        features=2 * WIDTH, tdim=32, txtdim=24, heads=HEADS * 2, kvheads=2, multiplier=1, layers=3, txtlayers=2, txtheads=3,
        txtkvheads=3, **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text()}
    if references:
        given |= {
            "ref_latents": [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)],
            "ref_latents_method": references,
        }
    return case("Krea2", model, draw(1, 16, 1, 9, 14, seed=1), given)


def _omnigen2(references: bool = False) -> Case:
    model = OmniGen2Transformer2DModel(
        hidden_size=2 * WIDTH, num_layers=2, num_refiner_layers=2, num_attention_heads=HEADS * 2, num_kv_heads=HEADS,
        multiple_of=64, axes_dim_rope=AXES, text_feat_dim=TEXT, **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text(), "num_tokens": 7}
    if references:
        given["ref_latents"] = [draw(1, 16, 6, 5, seed=4), draw(1, 16, 3, 4, seed=5)]
    return case("Omnigen2", model, draw(1, 16, 9, 14, seed=1), given)


def sd3(attend_twice: tuple[int, ...] = (), **settings: Any) -> Case:
    model = SD3(
        input_size=None, in_channels=16, depth=HEADS, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        adm_in_channels=32, x_block_self_attn_layers=list(attend_twice), pos_embed_scaling_factor=None,
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": HEADS * 64}
        },
        **SETTINGS | settings,
    )  # fmt: skip
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return case("SD3", model, draw(2, 16, 9, 14, seed=1), {"context": text(batch=2), "y": draw(2, 32, seed=3)})


def _auraflow() -> Case:
    model = AuraFlow(
        in_channels=4, dim=WIDTH, n_layers=4, n_double_layers=2, n_heads=HEADS, global_conddim=64, cond_seq_dim=TEXT,
        max_seq=64, **SETTINGS,
    )  # fmt: skip
    return case("AuraFlow", model, draw(2, 4, 9, 14, seed=1), {"context": text(batch=2), "control": None})


def _hidream(**edited: Tensor) -> Case:
    model = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS, caption_channels=[TEXT, 40], text_emb_dim=32, axes_dims_rope=(16, 8, 8),
        llama_layers=[0, 2, 1, 2], **SETTINGS,
    )  # fmt: skip
    given = {"context": text(), "y": draw(1, 32, seed=3), "encoder_hidden_states_llama3": draw(1, 3, 5, 40, seed=4)}
    return case("HiDream", model, draw(1, 16, 9, 14, seed=1), given | edited)


def _kandinsky() -> Case:
    model = Kandinsky5(
        in_text_dim=TEXT, in_text_dim2=32, time_dim=64, model_dim=HEADS * 64, ff_dim=128, visual_embed_dim=64,
        num_text_blocks=1, num_visual_blocks=3, axes_dims=(16, 24, 24), rope_scale_factor=(1.0, 1.0, 1.0), **SETTINGS,
    )  # fmt: skip
    given = {"context": text(batch=2), "y": draw(2, 32, seed=3), "attention_mask": torch.ones(2, 7)}
    return case("Kandinsky5Image", model, draw(2, 16, 10, 14, seed=1), given)


def _joyimage(references: bool = False) -> Case:
    model = JoyImageTransformer3DModel(
        hidden_size=WIDTH, num_attention_heads=HEADS, text_dim=TEXT, mlp_width_ratio=1.0, num_layers=3, theta=10000,
        rope_dim_list=list(AXES), **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text()}
    if references:
        given["ref_latents"] = [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)]
    return case("JoyImage", model, draw(1, 16, 1, 9, 14, seed=1), given)


def _lens(mask: tuple[int, ...]) -> Case:
    model = LensTransformer2DModel(
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, enc_hidden_dim=TEXT // 2,
        selected_layer_index=(5, 11), axes_dims_rope=AXES, **SETTINGS,
    )  # fmt: skip
    given = {"context": text(), "attention_mask": torch.tensor([mask])}
    return case("Lens", model, draw(1, 128, 5, 7, seed=1), given)


def _boogu(references: bool = False) -> Case:
    model = BooguTransformer2DModel(
        hidden_size=2 * WIDTH, num_layers=2, num_double_stream_layers=2, num_refiner_layers=1,
        num_attention_heads=HEADS * 2, num_kv_heads=HEADS, multiple_of=64, axes_dim_rope=AXES,
        instruction_feat_dim=TEXT, **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text(), "num_tokens": 7}
    if references:
        given["ref_latents"] = [draw(1, 16, 6, 5, seed=4)]
    return case("Boogu", model, draw(1, 16, 9, 14, seed=1), given)


def _ideogram() -> Case:
    model = Ideogram4Transformer2DModel(
        num_layers=3, num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, intermediate_size=128, adaln_dim=32,
        llm_features_dim=TEXT, mrope_section=(6, 5, 5), **SETTINGS,
    )  # fmt: skip
    return case("Ideogram4", model, draw(2, 128, 5, 7, seed=1), {"context": text(batch=2)})


def _ernie() -> Case:
    model = ErnieImageModel(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_layers=3, ffn_hidden_size=256, text_in_dim=TEXT, rope_axes_dim=AXES,
        **SETTINGS,
    )  # fmt: skip
    return case("ErnieImage", model, draw(2, 128, 5, 7, seed=1), {"context": text(batch=2)})


def _mage_flow(given: Mapping[str, Any]) -> Case:
    """Its time in bf16, as ComfyUI's class around it gives it."""
    model = MageFlowTransformer2DModel(
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, joint_attention_dim=TEXT,
        axes_dims_rope=AXES, **SETTINGS,
    )  # fmt: skip
    time = torch.tensor([0.6], dtype=torch.bfloat16)
    return case("MageFlow", model, draw(1, 128, 5, 7, seed=1), {"context": text(), **given}, time)


IMAGES: Mapping[str, Callable[[], Case]] = {
    "krea 2": _krea2,
    "krea 2, zero-timestep references": lambda: _krea2("index_timestep_zero"),
    "omnigen 2": _omnigen2,
    "omnigen 2, references": lambda: _omnigen2(references=True),
    "sd 3": sd3,
    "sd 3.5 medium": lambda: sd3(attend_twice=(0, 2)),
    "auraflow": _auraflow,
    "hidream": _hidream,
    "hidream, a picture to edit": lambda: _hidream(image_cond=draw(1, 16, 9, 11, seed=5)),
    "kandinsky 5 image": _kandinsky,
    "joyimage": _joyimage,
    "joyimage, references": lambda: _joyimage(references=True),
    "lens": lambda: _lens((1,) * 7),
    "lens, masked text": lambda: _lens((0, 0, 1, 1, 1, 0, 1)),
    "boogu": _boogu,
    "boogu, reference": lambda: _boogu(references=True),
    "ideogram 4": _ideogram,
    "ernie-image": _ernie,
    "mage-flow": lambda: _mage_flow({}),
    "mage-flow, references": lambda: _mage_flow(
        {"ref_latents": [draw(1, 128, 3, 5, seed=4), draw(1, 128, 2, 2, seed=5)]}
    ),
}
