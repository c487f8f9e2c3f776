"""ParallelCLIP: ComfyUI's CLIP with its weights in the workers.

ComfyUI's class makes tokens of prompts and conditioning of encoded prompts. Only the encoder's weights are elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import comfy.model_management
import comfy.sd
import folder_paths
import msgspec
import torch
from torch import Tensor, nn

from ...parallel_backend.diffusion import ModelSpec, TextEncoderFiles
from ...parallel_backend.errors import Cancelled, Refused
from ...parallel_backend.host import Backend
from ...parallel_backend.host.planning.planner import GIGABYTE
from ...parallel_backend.host.runs.encoder_room import EncoderRoom
from ...parallel_backend.models.comfyui.divided_blocks import bytes_by_rank, bytes_of
from ...parallel_backend.models.comfyui.features.recipe import packed, unpacked
from ...parallel_backend.models.comfyui.text_encoder import TextEncoder, read_text_encoder
from ...parallel_backend.plan import ParallelPlan
from ...parallel_backend.plan.resolve import planned_devices
from ...parallel_backend.weights.adapters.lora import AdapterSet
from ...parallel_backend.weights.files.checkpoint import Checkpoint, read_header
from ...parallel_backend.weights.files.digest import file_digest
from ...parallel_backend.weights.formats import FLOAT8
from ...parallel_backend.wire.to_worker import TOKENS
from ..memory.devices import available_memory, free_devices
from ..memory.loaded_models import MainShare, Shares, device_name
from ..model.features.adapter_requests import loads_dynamically, patched_keys
from ..model.features.lora import AdapterReader
from ..model.refusals import CLIP
from ..model.remote_model import caller, interruption
from ..progress import say
from ..runtime import progress

FAMILY = "comfyui text encoder"
"""The family's name in a ModelSpec."""


def load_clip(backend: Backend, paths: Sequence[str], kind: str, plan: ParallelPlan) -> ParallelCLIP:
    """Return a CLIP for files, of which only the headers are read.

    Args:
        backend: the Backend whose workers load the weights.
        paths: the files, in the order of ComfyUI's loader.
        kind: the type that the user has picked.
        plan: the requested plan.

    Raises:
        Refused: the files make no supported text encoder of this type, or the plan's devices do not exist or are too small.
    """
    devices = planned_devices(backend.placed_on_devices(plan), torch.cuda.device_count())
    device = comfy.model_management.text_encoder_device()
    checkpoints = [read_header(path) for path in paths]
    encoder = read_encoder(checkpoints, kind)
    first, *further = (
        ModelSpec(
            FAMILY, str(path), *each.fingerprint(), "float32", file_digest(path), dynamic=loads_dynamically(device)
        )
        for path, each in zip(paths, checkpoints, strict=True)
    )
    spec = msgspec.structs.replace(first, text=TextEncoderFiles(kind, tuple(further)))
    held = bytes_by_rank(encoder.module, len(devices))
    memory = available_memory(backend.status().groups)
    room = EncoderRoom(devices, tuple(held), bytes_of(encoder.module), memory, plan.memory_limit * GIGABYTE)
    room.check()
    say(room.in_words())
    return ParallelCLIP(encoder.clip, RemoteTextEncoder(backend, spec, plan, devices, max(held)), device)


def read_encoder(checkpoints: Sequence[Checkpoint], kind: str) -> TextEncoder:
    """Return the text encoder of files for ComfyUI's device, on the meta device. Raise Refused as `read_text_encoder` does."""
    device = comfy.model_management.text_encoder_device()
    embeddings = folder_paths.get_folder_paths("embeddings")
    return read_text_encoder(checkpoints, kind, device, loads_dynamically(device), embeddings)


@dataclass(frozen=True)
class RemoteTextEncoder:
    """A text encoder in the workers. The workers start and load the weights at its first use."""

    backend: Backend
    spec: ModelSpec
    requested_plan: ParallelPlan
    devices: tuple[str, ...]
    weight_bytes: int

    def bytes_on(self, device: torch.device) -> int:
        """Return the bytes of weights that all workers on a device of this process hold when the weights are loaded."""
        return self.devices.count(device_name(device)) * self.weight_bytes

    def encode(
        self,
        tokens: Any,
        options: Sequence[Mapping[str, Any]],
        adapters: AdapterSet,
        working: int,
        writing: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of ComfyUI's `encode_token_weights`, or the tokens of its `generate`, in the workers.

        Args:
            tokens: the tokens, as ComfyUI's tokenizer makes them.
            options: the options that ComfyUI has set.
            adapters: the adapters to apply to the weights.
            working: bytes that a worker needs besides the weights.
            writing: the arguments of `generate` besides the tokens; None to encode.

        Raises:
            Refused: the tokens hold an object that cannot be sent.
        """
        tensors: dict[str, Tensor] = {}
        try:
            packed_tokens = msgspec.msgpack.encode(packed(tokens, tensors))
            packed_options = packed([dict(each) for each in options], tensors)
        except TypeError as error:
            raise Refused(f"the prompt cannot be sent to the workers ({error}): use {CLIP.loader}.") from None
        tensors[TOKENS] = torch.frombuffer(bytearray(packed_tokens), dtype=torch.uint8)
        free_devices(self.backend, self.spec, self.devices, self.weight_bytes + working)
        try:
            answer = self.backend.encode_text(
                self.spec, self.requested_plan, packed_options, tensors, caller(), adapters, working, writing
            )
        except Cancelled:
            raise interruption() from None
        return unpacked(answer.frame.message.value, answer.frame.tensors)


class ParallelCLIP(comfy.sd.CLIP):  # type: ignore[misc]
    """A CLIP of Load Parallel CLIP.

    Args:
        clip: ComfyUI's CLIP, with its encoder on the meta device.
        remote: the encoder in the workers.
        device: the device on which ComfyUI would encode.
    """

    patcher: Any

    def __init__(self, clip: Any, remote: RemoteTextEncoder, device: torch.device) -> None:
        super().__init__(no_init=True)
        for name, value in vars(clip).items():
            setattr(self, name, value)
        module = clip.cond_stage_model
        shares = Shares(remote, device, comfy.model_management.get_all_torch_devices())
        self.patcher = ParallelClipPatcher(module, load_device=device, offload_device=device)
        self.patcher.is_clip = True
        self.patcher.hook_mode = clip.patcher.hook_mode
        sizes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        _RemoteCalls(module, remote, shares, AdapterReader(sizes, {}, prefix=""))

    def clone(self, *args: Any, **kwargs: Any) -> ParallelCLIP:
        """Return a copy that shares the weights and has its own patches."""
        copy = super().clone(*args, **kwargs)
        copy.__class__ = ParallelCLIP
        return copy  # type: ignore[no-any-return]

    def load_model(self, tokens: Any = None) -> Any:
        """Make this CLIP the one that encodes next, as the copies of a CLIP share the encoder. The workers load the weights."""
        self.cond_stage_model.calls.begin(self.patcher, tokens)
        return super().load_model(tokens or {})

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        """Encode a prompt as ComfyUI does. Refuse hooks that change the weights in the course of a schedule."""
        if self.patcher.forced_hooks is not None and self.use_clip_schedule:
            raise CLIP.refusal("Encoding a prompt with a schedule of hooks")
        with progress().run("Encoding the prompt"):
            return super().encode_from_tokens_scheduled(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the tokens of a text that the encoder writes, as ComfyUI does."""
        with progress().run("Writing text"):
            return super().generate(*args, **kwargs)

    def load_sd(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse code that loads other weights."""
        raise CLIP.refusal("Loading other weights")

    def get_sd(self) -> NoReturn:
        """Refuse code that reads the weights."""
        raise CLIP.refusal("Reading the weights")

    def state_dict_for_saving(self) -> NoReturn:
        """Refuse nodes that save a CLIP."""
        raise CLIP.refusal("Saving the text encoder")

    def get_key_patches(self) -> NoReturn:
        """Refuse nodes that merge text encoders."""
        raise CLIP.refusal("Merging text encoders")


class ParallelClipPatcher(MainShare):
    """The patcher of a ParallelCLIP, which records LoRA and its kin."""

    def adapters(self) -> AdapterSet:
        """Return the weight patches (LoRA and its kin) in the form that the workers read."""
        reader, held = self.model.calls.reader, dict(self.model.named_parameters())
        for key in self.patches:
            if key not in held or held[key].dtype in FLOAT8:
                raise CLIP.refusal(f"Applying a LoRA to {key}, whose weights are quantised,")
        return reader.read(self.patches, self.patches_uuid, functools.partial(patched_keys, self))  # type: ignore[no-any-return]

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> Any:
        """Record LoRA and its kin.

        Raises:
            Refused: the patches merge text encoders, or the workers cannot apply them.
        """
        if any(isinstance(value, list) for value in patches.values()):
            raise CLIP.refusal("Merging text encoders")
        added = super().add_patches(patches, strength_patch, strength_model)
        self.adapters()
        return added

    def set_injections(self, key: str, injections: Any) -> None:
        """Refuse injections, which hook into the encoder's modules (a LoRA in bypass mode does)."""
        raise CLIP.refusal(f"Injecting {key}")

    def add_hook_patches(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse LoRA hooks."""
        raise CLIP.refusal("Applying LoRA hooks")

    def add_object_patch(self, name: str, obj: Any) -> NoReturn:
        """Refuse object patches: they would replace a part of the encoder here, and not in the workers."""
        raise CLIP.refusal(f"Replacing {name}")

    def add_weight_wrapper(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse functions that change weights at their use."""
        raise CLIP.refusal("Wrapping weights")

    def get_key_patches(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse nodes that merge text encoders."""
        raise CLIP.refusal("Merging text encoders")

    def patch_weight_to_device(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse code that reads a changed weight here."""
        raise CLIP.refusal("Reading the weights")

    def deepclone_multigpu(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse Select CLIP Device."""
        raise CLIP.refusal("Moving the text encoder to another device")


class _RemoteCalls:
    """The methods that replace those of ComfyUI's encoder. Copies of a CLIP share them.

    Args:
        module: ComfyUI's encoder on the meta device, whose methods are replaced.
        remote: the encoder in the workers.
        shares: the weights on ComfyUI's devices.
        reader: translates LoRA and its kin.
    """

    def __init__(self, module: Any, remote: RemoteTextEncoder, shares: Shares, reader: AdapterReader) -> None:
        self.reader = reader
        self._remote = remote
        self._options: list[Mapping[str, Any]] = []
        self._patcher: ParallelClipPatcher | None = None
        self._working = 0
        self._estimate = getattr(module, "memory_estimation_function", None)
        own_reset, own_set = module.reset_clip_options, module.set_clip_options

        def reset_clip_options() -> None:
            self._options = []
            own_reset()

        def set_clip_options(options: Mapping[str, Any]) -> None:
            if sent := {name: value for name, value in options.items() if name != "execution_device"}:
                self._options.append(sent)
            own_set(options)

        for part in module.modules():
            part.register_forward_pre_hook(_refuse_call)
        replaced: dict[str, object] = {
            "calls": self,
            "remote": remote,
            "shares": shares,
            "reset_clip_options": reset_clip_options,
            "set_clip_options": set_clip_options,
            "encode_token_weights": self._encode,
            **({"generate": self._write} if hasattr(module, "generate") else {}),
        }
        for name, value in replaced.items():
            setattr(module, name, value)
        remote.backend.retain(module, remote.spec)

    def begin(self, patcher: ParallelClipPatcher, tokens: Any) -> None:
        """Record whose adapters the next prompt is encoded with, and ComfyUI's estimate of its memory."""
        self._patcher = patcher
        self._working = int(self._estimate(tokens, device=patcher.load_device)) if self._estimate else 0

    def _encode(self, tokens: Any) -> Any:
        return self._run(tokens, None)

    def _write(self, tokens: Any, **writing: Any) -> Any:
        return self._run(tokens, writing)

    def _run(self, tokens: Any, writing: dict[str, Any] | None) -> Any:
        if self._patcher is None:
            raise CLIP.refusal("Encoding without loading the text encoder")
        return self._remote.encode(tokens, self._options, self._patcher.adapters(), self._working, writing)


def _refuse_call(module: nn.Module, _: Any) -> NoReturn:
    """Refuse a call of a part of the encoder in this process, which has no weights."""
    raise CLIP.refusal(f"Calling the text encoder's {type(module).__name__}")
