"""ComfyUI's model classes with random weights, far smaller than its detection of files allows, and one call of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel_backend.models.declared import DECLARATIONS
from parallel_backend.models.spread.declaration import Declaration
from tests.comfy_oracle import comfy_on_path
from tests.tiny_models import draw, randomise

comfy_on_path()

import comfy.ops  # noqa: E402
import comfy.utils  # noqa: E402
from comfy.ldm.chroma.model import Chroma  # noqa: E402
from comfy.ldm.chroma_radiance.model import ChromaRadiance  # noqa: E402
from comfy.ldm.flux.model import Flux  # noqa: E402
from comfy.ldm.lumina.model import NextDiT  # noqa: E402
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel  # noqa: E402
from comfy.ldm.wan.model import VaceWanModel, WanModel  # noqa: E402

HEADS = 3
"""Odd, so that no even degree divides them."""

WIDTH = HEADS * 32
AXES = (8, 12, 12)
"""Of a head's positions, in the proportions of 16, 56 and 56."""

TEXT = 48
SETTINGS = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


@dataclass(frozen=True)
class Case:
    """A model, what declares it, one call (`x`, `timestep` and the arguments of its forward) and what ComfyUI calls it.

    With `shapes` the model is given several latents, which are packed in `x`. `gathers` is how many of them are spread.
    `options` are its transformer_options.
    """

    model: Any
    declaration: Declaration
    x: Tensor
    timestep: Tensor
    arguments: Mapping[str, Any]
    kind: str
    shapes: tuple[tuple[int, ...], ...] = ()
    gathers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def unpacked(self, x: Tensor) -> Any:
        """A latent as the model takes it."""
        return comfy.utils.unpack_latents(x, self.shapes) if self.shapes else x

    def stock(self) -> Tensor:
        """What ComfyUI's own forward gives."""
        return packed(
            self.model(
                self.unpacked(self.x.clone()), self.timestep, transformer_options=dict(self.options), **self.arguments
            )
        )


def packed(out: Any) -> Tensor:
    """A model's output as one tensor."""
    return out if isinstance(out, Tensor) else comfy.utils.pack_latents(out)[0]  # type: ignore[no-any-return]


def case(
    kind: str,
    model: Any,
    x: Tensor | Sequence[Tensor],
    arguments: Mapping[str, Any],
    timestep: Any = None,
) -> Case:
    shapes = () if isinstance(x, Tensor) else tuple(tuple(each.shape) for each in x)
    latent = packed(x[0] if len(shapes) == 1 else x)
    time = torch.full((latent.shape[0],), 0.6) if timestep is None else timestep
    return Case(randomise(model, seed=len(kind)), DECLARATIONS[kind], latent, time, arguments, kind, shapes)


def text(tokens: int = 7, batch: int = 1) -> Tensor:
    return draw(batch, tokens, TEXT, seed=2)


def _flux(references: bool = False) -> Case:
    model = Flux(
        in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0,
        num_heads=HEADS, depth=2, depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=True, txt_ids_dims=[], **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text(batch=2), "y": draw(2, 32, seed=3), "guidance": torch.tensor([3.5, 4.0])}
    if references:
        given |= {"ref_latents": [draw(2, 16, 6, 5, seed=4), draw(2, 16, 3, 4, seed=5)], "ref_latents_method": "offset"}
    return case("Flux", model, draw(2, 16, 9, 14, seed=1), given)


def _flux2() -> Case:
    model = Flux(
        in_channels=16, out_channels=16, vec_in_dim=None, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0,
        num_heads=HEADS, depth=1, depth_single_blocks=2, axes_dim=[8, 8, 8, 8], theta=2000, patch_size=1,
        qkv_bias=False, guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False,
        default_ref_method="index", ref_index_scale=10.0, **SETTINGS,
    )  # fmt: skip
    given = {"context": text(), "guidance": torch.tensor([4.0]), "ref_latents": [draw(1, 16, 4, 5, seed=4)]}
    return case("Flux2", model, draw(1, 16, 7, 5, seed=1), given | {"ref_latents_method": "index_timestep_zero"})


def _chroma() -> Case:
    model = Chroma(
        in_channels=64, out_channels=64, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0, num_heads=HEADS,
        depth=1, depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=2, qkv_bias=True, in_dim=64,
        out_dim=WIDTH, hidden_dim=64, n_layers=1, txt_ids_dims=[], vec_in_dim=None, **SETTINGS,
    )  # fmt: skip
    return case("Chroma", model, draw(1, 16, 9, 14, seed=1), {"context": text(), "guidance": torch.zeros(1)})


def _radiance() -> Case:
    model = ChromaRadiance(
        in_channels=3, out_channels=3, context_in_dim=TEXT, hidden_size=WIDTH, mlp_ratio=2.0, num_heads=HEADS, depth=1,
        depth_single_blocks=2, axes_dim=list(AXES), theta=10000, patch_size=4, qkv_bias=True, in_dim=64,
        out_dim=WIDTH, hidden_dim=64, n_layers=1, txt_ids_dims=[], vec_in_dim=None, nerf_hidden_size=16,
        nerf_mlp_ratio=2, nerf_depth=2, nerf_max_freqs=4, nerf_tile_size=8, nerf_final_head_type="conv",
        nerf_embedder_dtype=torch.float32, use_x0=False, use_sequential_txt_ids=True, **SETTINGS,
    )  # fmt: skip
    return case("ChromaRadiance", model, draw(1, 3, 18, 23, seed=1), {"context": text(), "guidance": torch.zeros(1)})


def _qwen(masked: bool = False, method: str = "") -> Case:
    model = QwenImageTransformer2DModel(
        num_layers=3, attention_head_dim=WIDTH // HEADS, num_attention_heads=HEADS, joint_attention_dim=TEXT,
        axes_dims_rope=AXES, **SETTINGS,
    )  # fmt: skip
    given: dict[str, Any] = {"context": text()}
    if masked:
        given["attention_mask"] = torch.tensor([[1, 1, 0, 1, 1, 0, 0]])
    if method:
        given |= {
            "ref_latents": [draw(1, 16, 1, 6, 5, seed=4), draw(1, 16, 1, 3, 4, seed=5)],
            "ref_latents_method": method,
        }
    return case("QwenImage", model, draw(1, 16, 1, 9, 14, seed=1), given)


def _wan(kind: str, given: Mapping[str, Any], timestep: Tensor | None = None, height: int = 7, **settings: Any) -> Case:
    sizes = {"in_dim": 16, "dim": WIDTH, "ffn_dim": 256, "text_dim": TEXT, "num_heads": HEADS, "num_layers": 3}
    model = WanModel(**sizes | SETTINGS | settings)
    x = draw(1, settings.get("in_dim", 16), 3, height, 10, seed=1)
    return case(kind, model, x, {"context": text(), **given}, timestep)


def _vace() -> Case:
    model = VaceWanModel(
        dim=WIDTH,
        ffn_dim=256,
        text_dim=TEXT,
        num_heads=HEADS,
        num_layers=4,
        vace_layers=2,
        vace_in_dim=96,
        **SETTINGS,
    )
    given = {"context": text(), "vace_context": draw(1, 2, 96, 3, 8, 10, seed=4), "vace_strength": [1.0, 0.5]}
    return case("WAN21_Vace", model, draw(1, 16, 3, 8, 10, seed=1), given)


def _lumina(kind: str, given: Mapping[str, Any], **settings: Any) -> Case:
    sizes = {
        "patch_size": 2, "in_channels": 16, "dim": WIDTH, "n_layers": 2, "n_refiner_layers": 2, "n_heads": HEADS,
        "multiple_of": 64, "ffn_dim_multiplier": 2.0, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": list(AXES),
        "axes_lens": [300, 512, 512],
    }  # fmt: skip
    model = NextDiT(**sizes | SETTINGS | settings)
    return case(kind, model, draw(1, 16, 9, 14, seed=1), {"context": text(), "num_tokens": 7, **given})


Z_IMAGE: Mapping[str, Any] = {
    "dim": HEADS * 96,  # its modulation insists on 256 of it
    "axes_dims": [32, 32, 32],
    "n_kv_heads": HEADS,
    "rope_theta": 256.0,
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}

CASES: Mapping[str, Callable[[], Case]] = {
    "flux": _flux,
    "flux, references": lambda: _flux(references=True),
    "flux 2, zero-timestep reference": _flux2,
    "chroma": _chroma,
    "chroma radiance": _radiance,
    "qwen-image": _qwen,
    "qwen-image, masked text": lambda: _qwen(masked=True),
    "qwen-image-edit, zero-timestep references": lambda: _qwen(masked=True, method="index_timestep_zero"),
    "qwen-image-edit, negative index": lambda: _qwen(method="negative_index"),
    "wan, text": lambda: _wan("WAN21_T2V", {}),
    "wan, image": lambda: _wan("WAN21_I2V", {"clip_fea": draw(1, 5, 1280, seed=4)}, model_type="i2v", in_dim=20),
    "wan, reference frame": lambda: _wan(
        "WAN21_FunControl2V", {"reference_latent": draw(1, 16, 8, 10, seed=4)}, height=8, in_dim_ref_conv=16
    ),
    "wan 2.2, a timestep a frame": lambda: _wan("WAN22_T2V", {}, torch.tensor([[0.0, 0.6, 0.6]])),
    "vace, two controls": _vace,
    "lumina 2, grouped heads": lambda: _lumina("Lumina2", {}, n_kv_heads=1),
    "z-image": lambda: _lumina("ZImage", {}, **Z_IMAGE),
    "z-image, reference": lambda: _lumina(
        "ZImage", {"ref_latents": [draw(1, 16, 6, 4, seed=4)], "ref_contexts": [draw(1, 5, TEXT, seed=5)]}, **Z_IMAGE
    ),
}
