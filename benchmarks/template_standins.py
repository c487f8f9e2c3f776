"""Stand-ins for encoders, VAEs and files, to run a template without them: zeros of the shapes that a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PICTURE = (128, 128)
FRAMES = 9
PICTURES = ("QwenImage", "Anima")
"""Classes of pictures whose latents have a dimension for frames."""
PRESENT = "stand-in"
"""Key of the output of the stand-in for a ControlNet."""

TOKENS = 7

ENCODED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "HiDream": {"conditioning_llama3": torch.zeros(1, 32, TOKENS, 4096)},
        "Anima": {"t5xxl_ids": torch.arange(5), "t5xxl_weights": torch.ones(5)},
        "HunyuanVideo15": {"conditioning_byt5small": torch.zeros(1, 3, 1472)},
        "QwenImage": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        "ZImage": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        "Lumina2": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        "LTXV": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        "LTXAV": {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
    }
)
"""Outputs of a class's text encoder besides text and pooled text, as ComfyUI's own encoders give them."""

VAES: Mapping[str, tuple[int, int]] = MappingProxyType({"LTXV": (32, 8), "LTXAV": (32, 8), "MiniMaxH3": (16, 4)})
"""Pixels per latent row, and frames per latent frame, for classes whose latent format does not have them."""

LLLITE: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "lllite_conditioning1.conv1.weight": (16, 3),
        "lllite_conditioning1.conv3.weight": (32,),
        "lllite_conditioning1.proj.weight": (16,),
        "lllite_dit_blocks_0_self_attn_q_proj.down.weight": (16, 2048),
        "lllite_dit_blocks_0_self_attn_q_proj.cond_to_film.weight": (32, 16),
    }
)
"""Shapes from which ComfyUI's class LLLite derives its layers."""


class StandIns:
    """The stand-ins for the model of one template."""

    def __init__(self, patcher: Any, kind: str) -> None:
        config = patcher.remote.config
        self.kind = kind
        self._skeleton = patcher.model.diffusion_model.skeleton
        self.width = config.text_widths[-1]
        self.pooled = config.pooled_width
        self.format = patcher.model.latent_format
        self.frames = 1 if self.format.latent_dimensions < 3 or kind in PICTURES else FRAMES

    def of(self, kind: str) -> Any:
        """Return a stand-in for a type; None if there is none."""
        match kind:
            case "CONDITIONING":
                return self.text()
            case "CLIP":
                return Clip(self)
            case "VAE":
                return Vae(self)
            case "AUDIO_VAE":
                return SoundVae(self)
            case "LATENT":
                return {"samples": Vae(self).encode(torch.zeros(self.frames, *PICTURE, 3))}
            case "IMAGE":
                return torch.zeros(self.frames, *PICTURE, 3)
            case "MASK":
                return torch.ones(1, *PICTURE)
            case "AUDIO":
                return {"waveform": torch.zeros(1, 2, 16000), "sample_rate": 16000}
            case "CLIP_VISION":
                return SimpleNamespace(encode_image=lambda *_, **__: vision())
            case "CLIP_VISION_OUTPUT":
                return vision()
            case "STYLE_MODEL":
                return SimpleNamespace(get_cond=lambda _: torch.zeros(1, 5, self.width))
            case "AUDIO_ENCODER_OUTPUT":
                return {"encoded_audio_all_layers": [torch.zeros(1, 8, 1024)] * 25, "audio_samples": 16000}
            case "MODEL_PATCH":
                return model_patch(self.kind, self._skeleton)
            case "CONTROL_NET":
                return control_net()
        return None

    def text(self) -> list[list[Any]]:
        """Return a CONDITIONING of the model's own text encoder."""
        more = {"pooled_output": torch.zeros(1, self.pooled or 768)} | dict(ENCODED.get(self.kind, {}))
        return [[torch.zeros(1, TOKENS, self.width), more]]


class Clip:
    """A stand-in for a text encoder."""

    patcher = SimpleNamespace(model_options={}, load_device=torch.device("cpu"))
    cond_stage_model = SimpleNamespace()

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def clone(self) -> Clip:
        """Return this object."""
        return self

    def tokenize(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return some tokens for each encoder."""
        return {name: [[(0, 1.0)]] for name in ("l", "g", "t5xxl", "llama", "byt5")}

    def set_tokenizer_option(self, *_: Any) -> None:
        """Do nothing."""

    def clip_layer(self, _: int) -> None:
        """Do nothing."""

    def encode_from_tokens_scheduled(self, *_: Any, add_dict: Mapping[str, Any] | None = None, **__: Any) -> Any:
        """Return a CONDITIONING."""
        return [[text, more | dict(add_dict or {})] for text, more in self._stand_ins.text()]

    def encode_from_tokens(self, *_: Any, return_dict: bool = False, return_pooled: bool = False, **__: Any) -> Any:
        """Return text, and pooled text if it is asked for."""
        ((text, more),) = self._stand_ins.text()
        if return_dict:
            return {"cond": text, **more}
        return (text, more["pooled_output"]) if return_pooled else text


class Vae:
    """A stand-in for the model's own VAE, or for a sound VAE."""

    def __init__(self, stand_ins: StandIns) -> None:
        found = stand_ins.format
        self.latent_channels = found.latent_channels
        video = found.latent_dimensions > 2
        self._space, self._time = VAES.get(stand_ins.kind, (found.spacial_downscale_ratio, 4 if video else 0))
        self._dims = found.latent_dimensions
        self.downscale_index_formula = (self._time, self._space, self._space)
        self.audio_sample_rate = 16000
        self.first_stage_model = Sound()

    def throw_exception_if_invalid(self) -> None:
        """Raise nothing: the VAE is valid."""

    def spacial_compression_encode(self) -> int:
        """Return the pixels per latent row."""
        return self._space

    spacial_compression_decode = spacial_compression_encode

    def temporal_compression_decode(self) -> int:
        """Return the frames per latent frame."""
        return self._time

    def encode(self, pixels: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return a latent of zeros. Accepts sound `[batch, channels, length]` too."""
        if pixels.ndim == 3:
            return torch.zeros(1, 8, 16, 16)
        pixels = pixels if pixels.ndim == 4 else pixels[0]
        count, height, width = pixels.shape[:3]
        rows = height // self._space, width // self._space
        if self._dims < 3:
            return torch.zeros(count, self.latent_channels, *rows)
        return torch.zeros(1, self.latent_channels, (count - 1) // self._time + 1 if self._time else count, *rows)

    encode_tiled = encode

    def decode(self, samples: Any, *_: Any, **__: Any) -> Tensor:
        """Return black pictures."""
        return torch.zeros(FRAMES, *PICTURE, 3)

    decode_tiled = decode


class SoundVae(Vae):
    """A stand-in for a sound VAE such as LTX-2's."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__(stand_ins)
        self.latent_channels = Sound.latent_channels


class Sound:
    """A stand-in for LTX-2's sound autoencoder."""

    latent_channels = 8
    latent_frequency_bins = 16
    sample_rate = output_sample_rate = 16000
    mel_hop_length = 160

    def num_of_latents_from_frames(self, frames: int, rate: float) -> int:
        """Return about 25 latents per second."""
        return max(1, round(frames / rate * 25))


class Speech(torch.nn.Module):
    """A stand-in for the network that embeds the speech of each frame."""

    seq_len = 5

    def forward(self, first: Tensor, others: Tensor) -> Tensor:
        """Return zeros `[speakers, frames, tokens, features]`."""
        return torch.zeros(first.shape[0], first.shape[1] + others.shape[1], 32, 768)


def model_patch(kind: str, skeleton: Any) -> Any:
    """Return a network without weights that runs next to the blocks of a class's models."""
    import comfy_extras.nodes_model_patch as nodes
    from comfy.ldm.anima.lllite import AnimaLLLite
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy.model_patcher import ModelPatcher
    from comfy.ops import manual_cast

    settings = {"device": "meta", "dtype": torch.bfloat16, "operations": manual_cast}
    module: Any = torch.nn.Module()
    with torch.device("meta"):
        if kind == "ZImage":
            module = ZImage_Control(n_control_layers=15, additional_in_dim=17, refiner_control=True, **settings)
        elif kind == "QwenImage":
            module = nodes.QwenImageBlockWiseControlNet(len(skeleton.transformer_blocks), **settings)
        elif kind == "WAN21_I2V":
            module = nodes.MultiTalkModelPatch(in_dim=skeleton.dim, num_layers=len(skeleton.blocks), **settings)
            module.audio_proj = Speech()
        elif kind == "Anima":
            module = AnimaLLLite({name: torch.empty(shape) for name, shape in LLLITE.items()}, {}, **settings)
    if kind == "QwenImage":  # its first layer runs at once, on the picture
        module.img_in = manual_cast.Linear(64, skeleton.inner_dim)
    return ModelPatcher(module, torch.device("cpu"), torch.device("cpu"))


def control_net() -> Any:
    """Return a ControlNet that adds nothing."""
    from comfy.controlnet import ControlBase

    class Control(ControlBase):  # type: ignore[misc]
        """A ControlNet that only reports its presence."""

        concat_mask = True

        def copy(self) -> Any:
            copied = Control()
            self.copy_to(copied)
            return copied

        def get_control(self, *_: Any) -> dict[str, list[Tensor]]:
            return {PRESENT: [torch.zeros(1)]}

        def get_models(self) -> list[Any]:
            return []

    return Control()


def vision() -> Any:
    """Return the output of a CLIP vision model for a picture."""
    from comfy.clip_vision import Output

    found = Output()
    for name, shape in {
        "last_hidden_state": (1, 257, 1280), "penultimate_hidden_states": (1, 257, 1280), "image_embeds": (1, 1024),
        "mm_projected": (1, 729, 4096),
    }.items():  # fmt: skip
        setattr(found, name, torch.zeros(shape))
    found.image_sizes = [(3, 224, 224)]
    return found
