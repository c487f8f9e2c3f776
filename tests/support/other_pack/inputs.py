"""Nodes that give inputs for which no file of a test's size exists: encoders, autoencoders, networks, masks, prompts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import comfy.clip_vision
import comfy.hooks
import comfy.ops
import folder_paths
import node_helpers
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.wan.uni3c import WanUni3CControlnet
from comfy.model_patcher import ModelPatcher
from safetensors.torch import load_file
from torch import Tensor, nn

import nodes

from .registry import node

SOUND_RATE = 16000


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return random numbers, always the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- text encoders


class Text:
    """A text encoder that gives each text seven random tokens.

    For LTX-2.3 it marks them as unprocessed: the model does the rest.
    """

    def __init__(self, width: int, unprocessed: bool) -> None:
        self._width = width
        self._more = {"unprocessed_ltxav_embeds": True} if unprocessed else {}
        self.cond_stage_model = nn.Module()
        self.tokenizer = None

    def tokenize(self, text: str, **_: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, text: str, **_: Any) -> list[list[Any]]:
        seed = sum(map(ord, text))
        pooled = {"pooled_output": drawn(1, 768, seed=seed), **self._more}
        return [[drawn(1, 7, self._width, seed=seed), pooled]]

    def generate(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return "a better prompt"

    def clone(self) -> Text:
        return self

    def add_patches(self, *_: Any) -> list[str]:
        return []


class FixedText:
    """A text encoder that returns a fixed prompt, with every third token marked as a picture's."""

    def __init__(self, prompt: Any) -> None:
        self._prompt = prompt

    def tokenize(self, _: str, **__: Any) -> None:
        return None

    def encode_from_tokens_scheduled(self, _: Any) -> Any:
        tags = (torch.arange(self._prompt[0][0].shape[1]) % 3 > 0).long()
        return node_helpers.conditioning_set_values(self._prompt, {"minimax_token_tags": tags})


@node("PackClip", "CLIP", width="INT", unprocessed="BOOLEAN")
def give_text_encoder(width: int, unprocessed: bool) -> Text:
    return Text(width, unprocessed)


# -- autoencoders


class Decoder:
    """A video VAE that shows the mean of a latent's channels, each value as a square over some frames."""

    def __init__(self, size: int, frames: Callable[[int], int]) -> None:
        self._size = size
        self._frames = frames

    def decode(self, latent: Tensor) -> Tensor:
        _, _, length, height, width = latent.shape
        size = (self._frames(length), height * self._size, width * self._size)
        pixels = nn.functional.interpolate(latent.mean(dim=1, keepdim=True).sigmoid(), size)
        return pixels.movedim(1, -1).expand(*pixels.shape[:1], *size, 3)


class SoundDecoder:
    """A sound VAE with the sizes of LTX-2's.

    Latents are `[batch, channels, length, rows]` or `[batch, channels, rows, length]`.
    """

    audio_sample_rate = output_sample_rate = SOUND_RATE
    latent_channels = 8
    latent_frequency_bins = 16

    def __init__(self, length: int) -> None:
        self._length = length
        self.first_stage_model = self

    def num_of_latents_from_frames(self, frames: int, rate: float) -> int:
        return max(1, round(frames / rate * 25))

    def decode(self, latent: Tensor) -> Tensor:
        heard = latent.movedim(self._length, 1).flatten(2).mean(dim=2).repeat_interleave(SOUND_RATE // 25, dim=1)
        return torch.stack((heard.tanh(), heard.sin()), dim=2)


class Encoder:
    """A VAE that encodes to a random latent. The latent's shape depends on the input's shape."""

    audio_sample_rate = SOUND_RATE

    def __init__(self, shape: Callable[..., tuple[int, ...]]) -> None:
        self._shape = shape

    def encode(self, given: Tensor) -> Tensor:
        return drawn(*self._shape(*given.shape), seed=int(given.sum()))


VAES: dict[str, Callable[[], Any]] = {
    "HunyuanVideo 1.5": lambda: Decoder(16, lambda length: 4 * length - 3),
    "Wan 2.2": lambda: Decoder(16, lambda length: 4 * length - 3),
    "MiniMax-H3": lambda: Decoder(16, lambda length: 5 + (length - 2) // 5 * 17),
    "MiniMax-H3's sound": lambda: SoundDecoder(3),
    "LTX-2's sound": lambda: SoundDecoder(2),
}


@node("PackVae", "VAE", kind=list(VAES))
def give_decoder(kind: str) -> Any:
    return VAES[kind]()


@node("PackEncoders", ("CLIP", "VAE", "VAE", "VAE"), conditioning="CONDITIONING")
def give_encoders(conditioning: Any) -> tuple[Any, ...]:
    """Give the encoders of text, videos and sounds of MiniMax-H3, and of sounds of LTX-2."""
    shapes: tuple[Callable[..., tuple[int, ...]], ...] = (
        lambda n, height, width, _: (1, 24, 1 if n == 1 else 2 + (n - 5) // 17 * 5, height // 16, width // 16),
        lambda _, samples, __: (1, 32, 2, samples // 400),
        lambda _, samples, __: (1, 8, samples // 400, 16),
    )
    return FixedText(conditioning), *(Encoder(shape) for shape in shapes)


@node("PackVoxels", ("VOXEL", "VAE"), batch="INT")
def give_voxels(batch: int) -> tuple[Any, Any]:
    """Give shapes as voxels, and a VAE that makes one voxel of each where TRELLIS.2's makes more."""

    def finer(shape: Any, upsample_times: int) -> Tensor:
        return torch.cat([shape.coords[:, :1], shape.coords[:, 1:] << upsample_times], dim=1)

    chance = torch.rand(batch, 32, 32, 32, generator=torch.Generator().manual_seed(3))
    model = SimpleNamespace(upsample_shape=finer)
    vae = SimpleNamespace(prepare_decode=lambda shape: None, first_stage_model=model, vae_dtype=torch.float32)
    return SimpleNamespace(data=chance < 0.002), vae


# -- networks beside a model


def network_of(name: str, **settings: Any) -> ModelPatcher:
    """Return a network of one of the classes in the module of ComfyUI's model patch nodes."""
    kind = getattr(sys.modules[nodes.NODE_CLASS_MAPPINGS["ModelPatchLoader"].__module__], name)
    return random_network(kind, **settings)


def random_network(kind: Callable[..., Any], **settings: Any) -> ModelPatcher:
    """Return a network with random weights, always the same."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = kind(**settings, operations=comfy.ops.manual_cast)
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / max(parameter[0].numel(), 4) ** 0.5)
    return on_cpu(model)


def on_cpu(model: nn.Module) -> ModelPatcher:
    return ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


class ControlPatch(nn.Linear):
    """A network whose output for a picture is added after each block, as DiffSynth's patches for Qwen-Image do."""

    additional_in_dim = 0
    project_modules: tuple[nn.Module, ...] = ()

    def __init__(self) -> None:
        super().__init__(1, 1)

    def process_input_latent_image(self, latent: Tensor) -> Tensor:
        return latent.flatten(2).transpose(1, 2)

    def control_block(self, img: Tensor, _: Tensor, __: int) -> Tensor:
        return img


@node("PackNetwork", "MODEL_PATCH", blocks="INT")
def give_qwen_network(blocks: int) -> ModelPatcher:
    """Give a network for Qwen-Image with the given number of blocks. ComfyUI's loader assumes sixty."""
    return network_of("QwenImageBlockWiseControlNet", num_layers=blocks)


@node("PackSpeech", ("MODEL_PATCH", "AUDIO_ENCODER_OUTPUT"), blocks="INT", width="INT")
def give_speech(blocks: int, width: int) -> tuple[ModelPatcher, Any]:
    """Give InfiniteTalk's network with the given number of blocks, and speech. ComfyUI's loader makes forty."""
    sizes = {"intermediate_dim": 8, "in_dim": width, "out_dim": 24, "context_tokens": 4, "num_layers": blocks}
    speech = {"encoded_audio_all_layers": [*drawn(13, 1, 24, 768)]}
    return network_of("MultiTalkModelPatch", **sizes), speech


@node("PackZImageNetwork", "MODEL_PATCH", blocks="INT")
def give_z_image_network(blocks: int) -> ModelPatcher:
    """Give a network for Z-Image with the given number of blocks.

    Nothing reads its weights, and they take no memory until they are read.
    """
    return on_cpu(ZImage_Control(n_control_layers=blocks, dtype=torch.bfloat16, operations=comfy.ops.manual_cast))


@node("PackUni3C", "MODEL_PATCH", width="INT")
def give_uni3c(width: int) -> ModelPatcher:
    """Give Uni3C's network for a Wan of the given width, with small layers inside."""
    sizes = {"conv_out_dim": 48, "dim": 48, "ffn_dim": 48, "num_heads": 1, "num_layers": 2, "mid_channels": 8}
    return random_network(WanUni3CControlnet, **sizes, time_embed_dim=width, out_proj_dim=width)


@node("PackChangedPatch", "MODEL_PATCH", model_patch="MODEL_PATCH")
def change_network(model_patch: ModelPatcher) -> ModelPatcher:
    changed = model_patch.clone()
    changed.add_object_patch("pack", None)
    return changed


@node("PackCountedControl", "CONTROL_NET", control_net="CONTROL_NET")
def count_runs(control_net: Any) -> Any:
    """Make a ControlNet log each run of its network."""
    control_net.control_model.register_forward_pre_hook(
        lambda *_: logging.info("Pack: the network of a ControlNet runs")
    )
    return control_net


# -- other objects, and prompts with tensors


class StyleModel:
    """A style model that turns a picture into tokens, as FLUX Redux does."""

    def get_cond(self, _: Any) -> Tensor:
        return drawn(1, 5, 64)


def vision() -> Any:
    """Return the output of a CLIP vision model for a picture."""
    output = comfy.clip_vision.Output()
    output.last_hidden_state = drawn(1, 5, 1152)  # HunyuanVideo 1.5's width
    output.penultimate_hidden_states = drawn(1, 5, 1280)  # Wan's
    output.image_embeds = torch.zeros(1, 32)
    output.all_hidden_states = torch.zeros(1, 20, 5, 1280)
    return output


OBJECTS: dict[str, Callable[[], Any]] = {
    "CLIP": lambda: None,
    "CLIP_VISION_OUTPUT": vision,
    "STYLE_MODEL": StyleModel,
    "GLIGEN": lambda: None,
    "MODEL_PATCH": lambda: on_cpu(ControlPatch()),
    "LORA_MODEL": dict,
    "AUDIO_ENCODER_OUTPUT": lambda: {"encoded_audio_all_layers": [torch.zeros(1, 8, 16)] * 3, "audio_samples": 8000},
    "AUDIO": lambda: {"waveform": torch.zeros(1, 2, 8000), "sample_rate": 16000},
    "TRACKS": lambda: {"track_path": torch.zeros(5, 1, 2), "track_visibility": torch.ones(5, 1, dtype=torch.bool)},
}


@node("PackObjects", tuple(OBJECTS))
def give_objects() -> tuple[Any, ...]:
    return tuple(make() for make in OBJECTS.values())


@node("PackVision", "CLIP_VISION_OUTPUT", width="INT")
def give_vision(width: int) -> Any:
    """Give the output of a CLIP vision model for a picture, with an embedding of the given width."""
    output = vision()
    output.image_embeds = drawn(1, width)
    return output


@node("PackSound", "AUDIO_ENCODER_OUTPUT", layers="INT", width="INT")
def give_sound(layers: int, width: int) -> Any:
    """Give the output of a sound encoder: layers of the given width, and music as WanDancer's encoder gives it."""
    music = {"audio_feature": drawn(1, 20, 35), "fps": 30.0}
    return {"encoded_audio_all_layers": [*drawn(layers, 1, 24, width)], "audio_samples": 8000, **music}


@node("PackPrompt", "CONDITIONING", conditioning="CONDITIONING", file="STRING")
def put_on_prompt(conditioning: Any, file: str) -> Any:
    """Put a file's tensors on a prompt, in place of ComfyUI's nodes that need a VAE or a vision model."""
    given: dict[str, Any] = {}
    for name, tensor in load_file(folder_paths.get_annotated_filepath(file)).items():
        if name.startswith("clip_vision_output"):
            given[name] = comfy.clip_vision.Output()
            given[name].penultimate_hidden_states = given[name].last_hidden_state = tensor
        elif name == "gligen":
            given[name] = ("position", OBJECTS["MODEL_PATCH"](), [])
        elif name == "hooks":
            given[name] = comfy.hooks.HookGroup()
        elif not tensor.ndim or name in ("vace_strength", "reference_latents_method", "elevation", "azimuth"):
            given[name] = tensor.tolist()
        elif name.startswith("vace_"):  # one entry per control video
            given[name] = list(tensor.unbind())
        else:
            given[name] = tensor
    return node_helpers.conditioning_set_values(conditioning, given)


@node("PackMask", "MASK", value="STRING")
def make_mask(value: str) -> Tensor:
    """Make a mask whose upper half has a value that arithmetic may result in, such as NaN."""
    mask = torch.ones(1, 64, 64)
    mask[:, :32] = float(value)
    return mask


@node("PackGuidance", "CONDITIONING", conditioning="CONDITIONING", value="STRING")
def give_guidance(conditioning: Any, value: str) -> Any:
    """Give a prompt a guidance that arithmetic may result in, such as NaN."""
    return node_helpers.conditioning_set_values(conditioning, {"guidance": float(value)})


@node("PackEverything", "CONDITIONING", conditioning="CONDITIONING")
def everything(conditioning: Any) -> Any:
    """Return a prompt whose text has the numbers of the prompt's text and of all its entries."""
    ((text, entries),) = conditioning
    tensors = [text, *(entries[name] for name in sorted(entries) if isinstance(entries[name], Tensor))]
    return [[torch.cat([tensor.flatten().float() for tensor in tensors]).view(1, -1, 1), {}]]
