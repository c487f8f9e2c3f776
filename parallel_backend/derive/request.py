"""The request to the process that derives a declaration for ComfyUI (a file), and its reply (one line of JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from ..conditioning import arguments, flatten
from ..declaration import Declaration
from ..diffusion import Value
from .call_kind import CallKind
from .prompt import PromptExample

QUESTION = "request_bytes"
"""The metadata entry of the file that holds the request without its tensors."""


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: dict[str, Value]
    latent: tuple[int, ...]
    kind: CallKind


class DeriveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to derive a declaration of a file's model class for some calls.

    The process first tries the `known` declarations and takes the first that holds for the calls. `limit` is the most bytes
    that the small model's weights may have. `seconds` is the time limit for the proof of one plan.
    """

    file: str
    calls: tuple[_Call, ...]
    known: tuple[Declaration, ...]
    limit: float
    seconds: float


class DeriveReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A declaration that was proved for `kinds` of calls, or the reason why there is none (`failure`).

    `proof` describes the proof in words. `compiled` is true if the proof also held with compiled blocks. `lasting` is true if
    the reason lies in the class and these calls, so that another try would fail too.
    """

    seconds: float
    declaration: Declaration | None = None
    kinds: tuple[CallKind, ...] = ()
    proof: str = ""
    failure: str = ""
    lasting: bool = False
    compiled: bool = False


def request_bytes(
    file: str,
    prompts: Sequence[PromptExample],
    known: Sequence[Declaration],
    limit: float,
    seconds: float,
) -> bytes:
    """Return a request with its tensors, in the file format that `read_request` reads.

    Raises:
        Refused: a prompt holds a value that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    calls = []
    for number, prompt in enumerate(prompts):
        own: dict[str, Tensor] = {}
        values: dict[str, Value] = {}
        for name, value in prompt.entries.items():
            flatten(name, value, own, values)
        tensors |= {f"{number}.{name}": tensor.contiguous().cpu().clone() for name, tensor in own.items()}
        calls.append(_Call(values, prompt.latent, prompt.kind))
    question = msgspec.json.encode(DeriveRequest(file, tuple(calls), tuple(known), limit, seconds)).decode()
    return save(tensors, metadata={QUESTION: question})


def read_request(path: Path) -> tuple[DeriveRequest, list[PromptExample]]:
    """Return the request in a file, and its prompts."""
    prompts = []
    with safe_open(path, framework="pt") as file:
        request_bytes = msgspec.json.decode(file.metadata()[QUESTION], type=DeriveRequest)
        names = list(file.keys())
        for number, call in enumerate(request_bytes.calls):
            begin = f"{number}."
            tensors = {name.removeprefix(begin): file.get_tensor(name) for name in names if name.startswith(begin)}
            prompts.append(PromptExample(arguments(tensors, call.values), call.latent, call.kind))
    return request_bytes, prompts


ANSWER = msgspec.json.Decoder(DeriveReply)
