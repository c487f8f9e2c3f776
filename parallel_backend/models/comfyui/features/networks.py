"""Networks that run next to a model's blocks (ComfyUI's model patches), in a worker: ComfyUI's own classes on local tokens.

Most networks compute each token separately. So a rank runs them on its own tokens, also on those of a patch, without exchanges.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ....declaration import LatentTokens
from ....weights.adapters.lora import CROSS_ATTENTION, SELF_ATTENTION, AdapterSet, NetworkPatch
from ...sequence_parallel.arguments import positions_of
from ...sequence_parallel.call_layout import CallLayout
from ...sequence_parallel.placement import Placement
from ...sequence_parallel.stream import StagePosition, Stream
from ..importing import import_comfyui

Patches = dict[str, list[Callable[..., Any]]]
"""Functions in the form of ComfyUI's transformer option `patches`: lists by the place where the model calls them."""

SPEAKERS = "x_ref_attn_map"
"""The transformer option with the attention of each token to each speaker."""


class NetworkCall(Protocol):
    """A network with its inputs."""

    def patches(self, call: CallLayout) -> Patches:
        """Return the functions that ComfyUI's model calls in one forward."""


class Networks:
    """The networks of the last request, on a rank's device. A request without networks frees them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._named: tuple[NetworkPatch, ...] = ()
        self._networks: list[NetworkCall] = []

    def of(self, adapters: AdapterSet) -> Sequence[NetworkCall]:
        """Return the networks of a request."""
        if adapters.networks != self._named:
            self._named, self._networks = (), []
            self._networks = [self._make(network, adapters) for network in adapters.networks]
            self._named = adapters.networks
        return self._networks

    def _make(self, network: NetworkPatch, adapters: AdapterSet) -> NetworkCall:
        import_comfyui()
        weights, inputs = (
            {name: adapters.tensors[id].to(self._device) for name, id in named.items()}
            for named in (network.weights, network.inputs)
        )
        kinds: Mapping[str, Callable[..., NetworkCall]] = {
            "AnimaLLLite": AnimaLLLite,
            "QwenDiffSynth": QwenDiffSynth,
            "ZImageControl": ZImageControl,
            "InfiniteTalk": InfiniteTalk,
        }
        return kinds[network.kind](weights, inputs, network.values)


def patches_of(networks: Sequence[NetworkCall], call: CallLayout) -> Patches:
    """Return the patches by which ComfyUI's model calls networks, in the networks' order."""
    joined: Patches = {}
    for network in networks:
        for point, functions in network.patches(call).items():
            joined.setdefault(point, []).extend(functions)
    return joined


class AnimaLLLite:
    """A network that changes the inputs of attention and feed-forward in Cosmos-Predict2's blocks; see ComfyUI's node.

    Args:
        inputs: `image` `[1, height, width, 3]`, and `mask` `[1, height, width]` if the network takes a mask.
        values: the strength, the sigmas between which it runs, and the file's metadata.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        lllite = importlib.import_module("comfy.ldm.anima.lllite")
        operations = importlib.import_module("comfy.ops").manual_cast
        metadata = {name: value for name, value in values.items() if name.startswith("lllite.")}
        module = lllite.AnimaLLLite(weights, metadata, device="meta", dtype=torch.float32, operations=operations)
        module.load_state_dict(weights, assign=True)
        sigmas = values["sigma_start"], values["sigma_end"]
        self._whole = lllite.AnimaLLLitePatch(
            SimpleNamespace(model=module), inputs["image"], inputs.get("mask"), values["strength"], *sigmas
        )
        attention = lllite.AnimaLLLiteAttentionPatch
        self._inside: Patches = {
            "attn1_patch": [attention(self._whole, SELF_ATTENTION)],
            "attn2_patch": [attention(self._whole, CROSS_ATTENTION)],
            "mlp_patch": [lllite.AnimaLLLiteMLPPatch(self._whole)],
        }

    def patches(self, call: CallLayout) -> Patches:
        """Return the patches. Before the first block, each rank computes the picture's effect on all tokens and cuts it."""

        def prepare(args: Any) -> Any:
            out = self._whole(args)
            model_data: dict[Any, Tensor] = args["transformer_options"]["model_patch_data"]
            if self._whole in model_data:
                model_data[self._whole] = _in_block(model_data[self._whole], call)
            return out

        return {"post_input": [prepare], **self._inside}


class QwenDiffSynth:
    """A network that adds residuals to the latent's tokens after each block of Qwen-Image; see ComfyUI's node.

    Args:
        inputs: `encoded` `[1, tokens, features]`, the network's encoding of the picture.
        values: the strength.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        block = importlib.import_module("comfy_extras.nodes_model_patch").BlockWiseControlBlock
        operations = importlib.import_module("comfy.ops").manual_cast
        self._encoded = inputs["encoded"]
        self._strength = values["strength"]
        width, count = self._encoded.shape[2], 1 + max(int(name.partition(".")[0]) for name in weights)
        with torch.device("meta"):
            self._blocks = nn.ModuleList([block(width, operations=operations) for _ in range(count)])
        self._blocks.load_state_dict(weights, assign=True)

    def patches(self, call: CallLayout) -> Patches:
        """Return the patch that runs between blocks, on a stream. Only the stage that has the tokens adds to them."""

        def add(args: Any) -> Any:
            img: Stream = args["img"]
            part = img[:, : self._encoded.shape[1]]
            assert isinstance(part, Stream), "it comes after a block"
            if part.stage_position == StagePosition.LOCAL:
                own = call.own(self._encoded.to(img.dtype), 1, part.placement)
                part.local += self._blocks[args["block_index"]](part.local, own) * self._strength
            return args

        return {"double_block": [add]}


class ZImageControl:
    """A network that adds residuals to the latent's tokens after blocks of Z-Image; see ComfyUI's node.

    The network has blocks of its own, which attend to the whole picture. Every rank runs all of them. Their input from the
    model's stream is gathered once a call. So every rank must hold the model's first block, and the plan must have no patches.

    Args:
        inputs: `encoded` `[1, channels, height, width]`, the picture's latent, and the network's other inputs.
        values: the strength, and the arguments of ComfyUI's class.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        network = importlib.import_module("comfy.ldm.lumina.controlnet").ZImage_Control
        operations = importlib.import_module("comfy.ops").manual_cast
        settings = {name: value for name, value in values.items() if name != "strength"}
        module = network(**settings, device="meta", dtype=torch.float32, operations=operations)
        module.load_state_dict(weights, assign=True)
        kind = importlib.import_module("comfy_extras.nodes_model_patch").ZImageControlPatch
        self._patch = kind.__new__(kind)  # the constructor would need a VAE
        vars(self._patch).update(
            model_patch=SimpleNamespace(model=module),
            vae=SimpleNamespace(spacial_compression_encode=lambda: 1),
            encoded_image=inputs["encoded"],
            encoded_image_size=tuple(inputs["encoded"].shape[-2:]),
            strength=values["strength"],
        )

    def patches(self, call: CallLayout) -> Patches:
        """Return the patches of one forward, and drop the state that the network passes from block to block."""
        patch = self._patch
        patch.temp_data = None

        def add(args: Any) -> Any:
            assert args["x"].shape[-2:] == patch.encoded_image_size, "the host has encoded the picture for this latent"
            tokens = args["img_input"]
            if args["block_index"] == 0 and isinstance(tokens, Stream):  # later blocks do not read the tokens
                args["img_input"] = call.whole(tokens)
            return patch(args)

        return {"noise_refiner": [add], "double_block": [add]}


class InfiniteTalk:
    """A network by which a video's tokens attend to the speech of their frame, after each of Wan's attentions to text.

    See ComfyUI's node.

    Args:
        inputs: `speech` `[1, frames, tokens, features]`. For two speakers also `places` `[2, tokens]`, their positions in a
            frame.
        values: the strength.
    """

    def __init__(self, weights: dict[str, Tensor], inputs: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._talk = importlib.import_module("comfy.ldm.wan.model_multitalk")
        operations = importlib.import_module("comfy.ops").manual_cast
        self._speech = inputs["speech"][0]
        self._speakers = inputs["places"].bool() if "places" in inputs else None
        self._strength = values["strength"]
        count, width = 1 + max(int(name.partition(".")[0]) for name in weights), weights["0.norm_x.weight"].shape[0]
        with torch.device("meta"):
            blocks = [
                self._talk.WanMultiTalkAttentionBlock(width, self._speech.shape[2], operations=operations)
                for _ in range(count)
            ]
        self._blocks = nn.ModuleList(blocks)
        self._blocks.load_state_dict(weights, assign=True)

    def patches(self, call: CallLayout) -> Patches:
        """Return the patches that run within blocks, on this rank's tokens. Tokens of different frames attend separately."""

        def by_speaker(args: Any) -> Any:
            options = args["transformer_options"]
            frames, height, width = options["grid_sizes"]
            first = call.layout.part(_placement(call, options), 0, height * width)
            keys = args["k"][:, : first.counts[call.rank]].flatten(2)
            whole = call.whole(Stream(keys, first, 1, call)).unflatten(2, args["k"].shape[2:])
            options[SPEAKERS] = self._talk.get_attn_map_with_target(
                args["q"], whole, (frames, height, width), ref_target_masks=self._speakers
            )
            return args["x"]

        def add(args: Any) -> Any:
            x, options = args["x"], args["transformer_options"]
            block = self._blocks[options["block_index"]]
            frames, counts = _frames(call, options)
            speakers = self._by_speaker(options.pop(SPEAKERS, None), call, options)
            begin, added = 0, []
            for frame, tokens in zip(frames, block.norm_x(x).split(counts, dim=1), strict=True):
                length = tokens.shape[1]
                speech = self._speech[None, None, frame].to(x.dtype)
                of_them = None
                if speakers is not None:  # two more tokens give ComfyUI's code the extremes of the whole video
                    of_them = torch.cat([speakers[0][:, begin : begin + length], speakers[1]], dim=1)
                    tokens = torch.cat([tokens, tokens[:, :1].expand(-1, 2, -1)], dim=1)
                out = block.audio_cross_attn(tokens, speech, (1, 1, tokens.shape[1]), of_them)
                added.append(out[:, :length])
                begin += length
            return x + torch.cat(added, dim=1) * self._strength

        return {"attn2_patch": [add]} | ({} if self._speakers is None else {"attn1_patch": [by_speaker]})

    def _by_speaker(self, local: Tensor | None, call: CallLayout, options: Any) -> tuple[Tensor, Tensor] | None:
        """Return each token's attention to each speaker, `[2, tokens]`, and the maximum and minimum over all tokens, `[2, 2]`.

        Return None without `local`, which is the case for a single speaker.
        """
        if local is None:
            return None
        placement = _placement(call, options)
        count = placement.counts[call.rank]
        whole = call.whole(Stream(local[:, :count].T[None].contiguous(), placement, 1, call))[0]
        return local, torch.stack([whole.amax(0), whole.amin(0)], dim=1)


def _placement(call: CallLayout, options: Any) -> Placement:
    """Return the placement of a video's tokens."""
    frames, height, width = options["grid_sizes"]
    return call.layout.of(frames * height * width, LatentTokens())


def _frames(call: CallLayout, options: Any) -> tuple[list[int], list[int]]:
    """Return the frames of this rank's tokens, and the number of tokens of each frame."""
    placement, (_, height, width) = _placement(call, options), options["grid_sizes"]

    def find() -> tuple[list[int], list[int]]:
        of_each = positions_of(placement, call.rank) // (height * width)
        frames, counts = torch.unique_consecutive(of_each, return_counts=True)
        return frames.tolist(), counts.tolist()

    return call.layout.once(("frames", placement), find)


def _in_block(tensor: Tensor, call: CallLayout) -> Tensor:
    """Return the rows of a tensor `[batch, latent tokens, features]` for the tokens that blocks have on this rank."""
    placement = call.layout.of(tensor.shape[1], LatentTokens())
    chosen = call.selection(("in a block", placement), lambda: positions_of(placement, call.rank))
    return chosen(tensor, 1)
