"""ComfyUI's text encoders on the meta device, as ComfyUI's own loader makes them, and the file tensors of their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import Refused
from ...weights.files.checkpoint import Checkpoint
from ...weights.files.keymap import KeyMap, Piece
from ...weights.layers.quantised import PARTS
from .dynamic_loading import file_dtypes
from .file_values import FileValues, ValueUnknown, file_values, on_meta, storage_number
from .importing import import_comfyui
from .quantised_layers import OfParts, entry_of_part

OPTIONAL = (".logit_scale", ".transformer.text_projection.weight")
"""Ends of the names of parameters that files may lack. ComfyUI's loader does not warn of them, and leaves them uninitialised."""


@dataclass(frozen=True)
class TextEncoder:
    """A text encoder of ComfyUI on the meta device.

    Attributes:
        clip: ComfyUI's CLIP object, with its tokenizer.
        checkpoint: the tensors of all files, by `N.name` for tensor `name` of file N.
        keys: for each parameter that files hold, its rows in `checkpoint`.
        constants: functions that return the values of the other parameters, which no file holds or which are computed.
    """

    clip: Any
    checkpoint: Checkpoint
    keys: KeyMap
    constants: Mapping[str, Callable[[], Tensor]]

    @property
    def module(self) -> nn.Module:
        """Return the encoder itself."""
        return self.clip.cond_stage_model  # type: ignore[no-any-return]


def read_text_encoder(
    checkpoints: Sequence[Checkpoint],
    kind: str,
    device: torch.device,
    dynamic: bool,
    embeddings: Sequence[str] = (),
) -> TextEncoder:
    """Return the text encoder that ComfyUI's loader makes of files, on the meta device.

    Args:
        checkpoints: the headers of the files, in the order of ComfyUI's loader.
        kind: the type that a user picks in ComfyUI's loader.
        device: the device that will compute.
        dynamic: True if ComfyUI's own loader would load the encoder dynamically.
        embeddings: the folders of textual inversion embeddings, for the tokenizer.

    Raises:
        Refused: the files make no text encoder of this type, or one that is not supported.
    """
    import_comfyui()
    import comfy.sd
    import comfy.utils

    for each in checkpoints:
        _refuse_blocks(each)
    entries = {
        f"{number}.{name}": entry for number, each in enumerate(checkpoints) for name, entry in each.entries.items()
    }
    files = [each.meta_tensors() for each in checkpoints]
    filed = {
        storage_number(tensor): (f"{number}.{name}", tensor)
        for number, tensors in enumerate(files)
        for name, tensor in tensors.items()
    }
    named = ", ".join(each.path.name for each in checkpoints)
    pairs = [(tensor, entries[name]) for name, tensor in filed.values()]
    try:
        with file_values(pairs) as values, _Copies() as copies:
            states = []
            for tensors, each in zip(files, checkpoints, strict=True):
                state, _ = comfy.utils.convert_old_quants(dict(tensors), model_prefix="", metadata=dict(each.metadata))
                states.append(state)
            converted = [dict(state) for state in states]  # ComfyUI's loader changes its own
            clip = comfy.sd.load_text_encoder_state_dicts(
                states,
                embedding_directory=list(embeddings) or None,
                clip_type=getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
                model_options={
                    "load_device": device,
                    "offload_device": device,
                    "initial_device": torch.device("meta"),
                },
                disable_dynamic=True,
            )
            sources = _Sources(filed, copies, values)
            _load_buffers(clip.cond_stage_model, sources)
            parts = _take_apart(clip.cond_stage_model, converted)
            keys, constants = _keys_of(clip.cond_stage_model, sources, parts, named)
            for name in parts.keys() & keys.keys():
                entries[name] = entry_of_part(entries[keys[name].name], clip.cond_stage_model.get_parameter(name).dtype)
                keys[name] = Piece(name, 0, entries[name].shape[0], ())
    except KeyError as missing:
        raise Refused(f"{named} lacks the tensor {missing}: choose a text encoder of the type {kind}.") from None
    except ValueUnknown as error:
        raise Refused(
            f"{named} needs values during its construction ({error}), which is not supported: use Load CLIP."
        ) from None
    except RuntimeError as error:
        raise Refused(
            f"{named} has tensors of other sizes than ComfyUI's text encoder of the type {kind} "
            f"({str(error).splitlines()[-1].strip().rstrip('.')}): choose another file or type."
        ) from None
    checkpoint = replace(
        checkpoints[0], entries=entries, files=tuple(path for each in checkpoints for path in each.files)
    )
    if dynamic:
        _keep_dtypes(clip.cond_stage_model, file_dtypes(clip.cond_stage_model, checkpoint, keys))
    return TextEncoder(clip, checkpoint, keys, constants)


def _keep_dtypes(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the named parameters of a module on the meta device these dtypes."""
    for name, dtype in dtypes.items():
        owner, _, last = name.rpartition(".")
        parameter = nn.Parameter(module.get_parameter(name).to(dtype), requires_grad=False)
        module.get_submodule(owner).register_parameter(last, parameter)


def _refuse_blocks(checkpoint: Checkpoint) -> None:
    """Raise Refused if a file holds GGUF's blocks, which ComfyUI's own loader does not read."""
    if any(entry.dtype is None for entry in checkpoint.entries.values()):
        raise Refused(
            f"{checkpoint.path.name} holds GGUF blocks, which ComfyUI's Load CLIP does not read: choose another file."
        )


class _Copies(TorchDispatchMode):
    """A dispatch mode that records the tensors that are copied into tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the operation's result, and record a copy."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and on_meta(args[0]):
            self._copied[storage_number(args[0])] = args[0], args[1]
        return result

    def into(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that was copied into all of a tensor, or None if there was none."""
        target, source = self._copied.get(storage_number(tensor), (None, None))
        whole = (
            target is not None and target.shape == tensor.shape and source is not None and source.shape == tensor.shape
        )
        return source if whole else None


@dataclass(frozen=True)
class _Sources:
    """The sources of a module's tensors: tensors of files, or values that ComfyUI's constructor has set.

    Attributes:
        filed: the files' tensors and their names, by storage.
        copies: the copies into parameters.
        values: the values of tensors that are computed from the files' tensors.
    """

    filed: Mapping[int, tuple[str, Tensor]]
    copies: _Copies
    values: FileValues

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that gives a tensor its values, or None if nothing does."""
        if not on_meta(tensor):
            return tensor
        if (copied := self.copies.into(tensor)) is not None:
            return copied
        return tensor if self.values.known(storage_number(tensor)) else None

    def computed(self, source: Tensor) -> Tensor:
        """Return the values of a source. Read the files' tensors that it is computed from."""
        values: Tensor = self.values.valued(source) if on_meta(source) else source
        return values

    def piece(self, source: Tensor) -> Piece | None:
        """Return the rows of a file's tensor that a source is, or None if it is something else."""
        if not on_meta(source) or storage_number(source) not in self.filed:
            return None
        name, whole = self.filed[storage_number(source)]
        row = whole.stride(0) if whole.ndim else 1
        rows = source.shape[0] if source.ndim else 1
        fits = source.dtype == whole.dtype and source.shape[1:] == whole.shape[1:] and source.stride() == whole.stride()
        if not fits or source.storage_offset() % max(row, 1):
            return None
        start = source.storage_offset() // max(row, 1)
        return Piece(name, start, start + rows, tuple(source.shape[1:]))


def _load_buffers(module: nn.Module, sources: _Sources) -> None:
    """Turn the buffers that files have values for into parameters, so that they are loaded too."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if on_meta(buffer) and buffer.numel() and sources.of(buffer) is not None:
                delattr(part, name)
                part.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


def _take_apart(module: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Split the weights of a module's quantised layers into parts.

    Args:
        states: the files' tensors by ComfyUI's names of the parts.

    Returns:
        The file's tensor of each part, by the part's name in the module.
    """
    from comfy.quant_ops import QuantizedTensor

    places = {storage_number(tensor): (state, name) for state in states for name, tensor in state.items()}
    parts: dict[str, Tensor] = {}
    for name, layer in list(module.named_modules()):
        if isinstance(getattr(layer, "weight", None), QuantizedTensor):
            kind = type(layer)
            layer.__class__ = type(kind.__name__, (OfParts, kind), {"_apply": nn.Module._apply})
            assert isinstance(layer, OfParts)
            state, filed = places[storage_number(layer.take_apart()["weight"])]
            parts |= {f"{name}.{PARTS}.{part}": state[filed.removesuffix("weight") + part] for part in layer.kinds}
    return parts


def _keys_of(
    module: nn.Module, sources: _Sources, parts: Mapping[str, Tensor], named: str
) -> tuple[dict[str, Piece], dict[str, Callable[[], Tensor]]]:
    """Return the pieces of files and the other values that make a module's parameters.

    Args:
        parts: the files' tensors of the parts of quantised weights, by the names of the parts.

    Raises:
        Refused: nothing gives a parameter or a buffer its values.
    """
    keys: dict[str, Piece] = {}
    constants: dict[str, Callable[[], Tensor]] = {}
    for name, parameter in list(module.named_parameters()):
        source = sources.of(parts.get(name, parameter))
        if source is None and name.endswith(OPTIONAL):
            source = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if source is None:
            raise Refused(f"{named} lacks the tensor {name}: choose a complete text encoder of this type.")
        piece = sources.piece(source)
        if piece is None:
            constants[name] = functools.partial(sources.computed, source.detach())
        else:
            keys[name] = piece
    for name, buffer in module.named_buffers():
        if on_meta(buffer) and buffer.numel():
            raise Refused(
                f"{named} makes an encoder whose {name} no file holds, which is not supported: use Load CLIP."
            )
    return keys, constants
