"""Small models of ComfyUI's other image models, with one call of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..reduced import draw
from .case import AXES, HEADS, TEXT, WIDTH, Builder, Example, Small, example, text


def _krea2(builder: Builder, references: str = "") -> Example:
    model = builder.model("krea2.model.SingleStreamDiT",
        features=2 * WIDTH, tdim=32, txtdim=24, heads=HEADS * 2, kvheads=2, multiplier=1, layers=3, txtlayers=2, txtheads=3,
        txtkvheads=3,
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text()}
    if references:
        prompt |= {
            "reference_latents": [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)],
            "reference_latents_method": references,
        }
    return example("Krea2", model, draw(1, 16, 1, 9, 14, seed=1), prompt)


def _omnigen2(builder: Builder, references: bool = False) -> Example:
    model = builder.model("omnigen.omnigen2.OmniGen2Transformer2DModel",
        hidden_size=2 * WIDTH, num_layers=2, num_refiner_layers=2, num_attention_heads=HEADS * 2, num_kv_heads=HEADS,
        multiple_of=64, axes_dim_rope=AXES, text_feat_dim=TEXT,
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text(), "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    if references:
        prompt["reference_latents"] = [draw(1, 16, 6, 5, seed=4), draw(1, 16, 3, 4, seed=5)]
    return example("Omnigen2", model, draw(1, 16, 9, 14, seed=1), prompt)


def sd3(builder: Builder, attend_twice: tuple[int, ...] = (), **settings: Any) -> Example:
    """Return an SD3 model. Its blocks `attend_twice` have a second attention, as in SD3.5 medium."""
    model = builder.model("modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        input_size=None, in_channels=16, depth=HEADS, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
        adm_in_channels=32, x_block_self_attn_layers=list(attend_twice), pos_embed_scaling_factor=None,
        context_embedder_config={
            "target": "torch.nn.Linear", "params": {"in_features": TEXT, "out_features": HEADS * 64}
        },
        **settings,
    )  # fmt: skip
    model.pos_embed.copy_(draw(*model.pos_embed.shape, seed=6))
    return example(
        "SD3", model, draw(2, 16, 9, 14, seed=1), {"cross_attn": text(batch=2), "pooled_output": draw(2, 32, seed=3)}
    )


def _auraflow(builder: Builder) -> Example:
    model = builder.model("aura.mmdit.MMDiT",
        in_channels=4, dim=WIDTH, n_layers=4, n_double_layers=2, n_heads=HEADS, global_conddim=64, cond_seq_dim=TEXT,
        max_seq=64,
    )  # fmt: skip
    return example("AuraFlow", model, draw(2, 4, 9, 14, seed=1), {"cross_attn": text(batch=2)})


def _hidream(builder: Builder, **edited: Tensor) -> Example:
    model = builder.model("hidream.model.HiDreamImageTransformer2DModel",
        patch_size=2, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=WIDTH // HEADS,
        num_attention_heads=HEADS, caption_channels=[TEXT, 40], text_emb_dim=32, axes_dims_rope=(16, 8, 8),
        llama_layers=[0, 2, 1, 2],
    )  # fmt: skip
    prompt = {
        "cross_attn": text(),
        "pooled_output": draw(1, 32, seed=3),
        "conditioning_llama3": draw(1, 3, 5, 40, seed=4),
    }
    return example("HiDream", model, draw(1, 16, 9, 14, seed=1), prompt | edited)


def _kandinsky(builder: Builder) -> Example:
    model = builder.model("kandinsky5.model.Kandinsky5",
        in_text_dim=TEXT, in_text_dim2=32, time_dim=64, model_dim=HEADS * 64, ff_dim=128, visual_embed_dim=64,
        num_text_blocks=1, num_visual_blocks=3, axes_dims=(16, 24, 24), rope_scale_factor=(1.0, 1.0, 1.0),
    )  # fmt: skip
    prompt = {"cross_attn": text(batch=2), "pooled_output": draw(2, 32, seed=3), "attention_mask": torch.ones(2, 7)}
    return example("Kandinsky5Image", model, draw(2, 16, 10, 14, seed=1), prompt)


def _joyimage(builder: Builder, references: bool = False) -> Example:
    model = builder.model("joyimage.model.JoyImageTransformer3DModel",
        hidden_size=WIDTH, num_attention_heads=HEADS, text_dim=TEXT, mlp_width_ratio=1.0, num_layers=3, theta=10000,
        rope_dim_list=list(AXES),
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text()}
    if references:
        prompt["reference_latents"] = [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)]
    return example("JoyImage", model, draw(1, 16, 1, 9, 14, seed=1), prompt)


def _lens(builder: Builder, mask: tuple[int, ...]) -> Example:
    model = builder.model("lens.model.LensTransformer2DModel",
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, enc_hidden_dim=TEXT // 2,
        selected_layer_index=(5, 11), axes_dims_rope=AXES,
    )  # fmt: skip
    prompt = {"cross_attn": text(), "attention_mask": torch.tensor([mask])}
    return example("Lens", model, draw(1, 128, 5, 7, seed=1), prompt)


def _boogu(builder: Builder, references: bool = False) -> Example:
    model = builder.model("boogu.model.BooguTransformer2DModel",
        hidden_size=2 * WIDTH, num_layers=2, num_double_stream_layers=2, num_refiner_layers=1,
        num_attention_heads=HEADS * 2, num_kv_heads=HEADS, multiple_of=64, axes_dim_rope=AXES,
        instruction_feat_dim=TEXT,
    )  # fmt: skip
    prompt: dict[str, Any] = {"cross_attn": text(), "attention_mask": torch.ones(1, 7, dtype=torch.long)}
    if references:
        prompt["reference_latents"] = [draw(1, 16, 6, 5, seed=4)]
    return example("Boogu", model, draw(1, 16, 9, 14, seed=1), prompt)


def _ideogram(builder: Builder) -> Example:
    model = builder.model("ideogram4.model.Ideogram4Transformer2DModel",
        num_layers=3, num_attention_heads=HEADS, attention_head_dim=WIDTH // HEADS, intermediate_size=128, adaln_dim=32,
        llm_features_dim=TEXT, mrope_section=(6, 5, 5),
    )  # fmt: skip
    return example("Ideogram4", model, draw(2, 128, 5, 7, seed=1), {"cross_attn": text(batch=2)})


def _ernie(builder: Builder) -> Example:
    model = builder.model("ernie.model.ErnieImageModel",
        hidden_size=WIDTH, num_attention_heads=HEADS, num_layers=3, ffn_hidden_size=256, text_in_dim=TEXT, rope_axes_dim=AXES,

    )  # fmt: skip
    return example("ErnieImage", model, draw(2, 128, 5, 7, seed=1), {"cross_attn": text(batch=2)})


def _mage_flow(builder: Builder, prompt: Mapping[str, Any]) -> Example:
    model = builder.model("mage_flow.model.MageFlowTransformer2DModel",
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, joint_attention_dim=TEXT,
        axes_dims_rope=AXES,
    )  # fmt: skip
    return example("MageFlow", model, draw(1, 128, 5, 7, seed=1), {"cross_attn": text(), **prompt})


def _qwen_image21(builder: Builder, **references: Any) -> Example:
    model = builder.model("qwen_image21.model.QwenImage21Transformer2DModel",
        in_channels=64, out_channels=64, num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS,
        context_in_dim=TEXT, axes_dims_rope=AXES,
    )  # fmt: skip
    return example("QwenImage21", model, draw(2, 64, 5, 7, seed=1), {"cross_attn": text(batch=2), **references})


PICTURES: Mapping[str, Small] = {
    "krea 2": _krea2,
    "krea 2, zero-timestep references": lambda builder: _krea2(builder, "index_timestep_zero"),
    "omnigen 2": _omnigen2,
    "omnigen 2, references": lambda builder: _omnigen2(builder, references=True),
    "sd 3": sd3,
    "sd 3.5 medium": lambda builder: sd3(builder, attend_twice=(0, 2)),
    "auraflow": _auraflow,
    "hidream": _hidream,
    "hidream, a picture to edit": lambda builder: _hidream(builder, concat_latent_image=draw(1, 16, 9, 11, seed=5)),
    "kandinsky 5 image": _kandinsky,
    "qwen-image 2.1": _qwen_image21,
    "qwen-image 2.1, references": lambda builder: _qwen_image21(
        builder, reference_latents=[draw(2, 64, 4, 3, seed=4), draw(2, 64, 3, 4, seed=5)], image_slots=[3, 5]
    ),
    "joyimage": _joyimage,
    "joyimage, references": lambda builder: _joyimage(builder, references=True),
    "lens": lambda builder: _lens(builder, (1,) * 7),
    "lens, masked text": lambda builder: _lens(builder, (0, 0, 1, 1, 1, 0, 1)),
    "boogu": _boogu,
    "boogu, reference": lambda builder: _boogu(builder, references=True),
    "ideogram 4": _ideogram,
    "ernie-image": _ernie,
    "mage-flow": lambda builder: _mage_flow(builder, {}),
    "mage-flow, references": lambda builder: _mage_flow(
        builder, {"reference_latents": [draw(1, 128, 3, 5, seed=4), draw(1, 128, 2, 2, seed=5)]}
    ),
}
