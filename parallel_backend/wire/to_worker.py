"""Messages from the host to the workers, checked against their schema on arrival. The name of each ends in Request.

The gateway of rank 0 also sends some of them to the other ranks. The replies are in `to_host.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..diffusion import CacheSettings, FunctionRecipe, ModelSpec, PromptSpec, Sampling, Value
from ..plan import ResolvedPlan
from .message import Message


class JoinRequest(Message, frozen=True):
    """Join the process group of this generation.

    Every rank answers with JoinReply when its process group is up. Earlier messages of the rank belong to an earlier client.
    """

    generation: int


PROGRAM = "program"
"""Name of the tensor in a SampleRequest that holds the sampler's program, uint8."""


class SampleRequest(Message, frozen=True):
    """Run a whole denoise.

    Tensors: `x` (the noised latent), `program` (`denoise/program.py`), `sigmas`, the tensors of the prompts, for
    inpainting `mask`, `latent`, `noise`, and for diffusion `log_sigmas`.

    Attributes:
        clean_inpaint: show the model the part outside the mask without noise.
        guidance_functions: change the result of classifier-free guidance, in this order.
        compiler: torch.compile's backend for the blocks; empty for no compilation.
        adapters: id of the adapters to apply to the weights; empty for none.
        working_bytes: estimate of the memory that a rank needs besides the weights.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    sampling: Sampling
    cfg: float
    positive: list[PromptSpec]
    negative: list[PromptSpec] | None
    clean_inpaint: bool = False
    cache: CacheSettings | None = None
    guidance_functions: list[FunctionRecipe] = msgspec.field(default_factory=list)
    compiler: str = ""
    adapters: str = ""
    working_bytes: int = 0


RESIDUAL = "residual."
"""Prefix of the tensors in a ForwardRequest that go only to the ranks that add them."""


class BlockResiduals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Residuals that a ControlNet adds to the image tokens after blocks of the model.

    All tensors are `[batch, image tokens, features]` and have one dtype.

    Attributes:
        blocks: name of the request's tensor for each block, by the block's number.
        batch: the batch of the forward, or 1.
    """

    blocks: dict[int, str]
    batch: int
    dtype: str


class ForwardRequest(Message, frozen=True):
    """Run the model once for each of `calls`. The latents of all calls have one size.

    Tensors of call N: `N.x` (compute dtype), `N.timestep`, and the conditioning as `N.` and the model's name for the tensor.

    Attributes:
        values: for each call, the conditioning that is not a tensor.
        adapters: id of the adapters to apply to the weights; empty for none.
        working_bytes: estimate of the memory that a rank needs besides the weights.
        couples_rows: True if the rows of a call influence one another, so that ranks must not divide its batch.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    calls: int
    values: list[dict[str, Value]]
    adapters: str = ""
    residuals: BlockResiduals | None = None
    working_bytes: int = 0
    couples_rows: bool = False


class DecodeRequest(Message, frozen=True):
    """Decode latents on all ranks. Tensors: `latent`.

    Attributes:
        schedule: how frames are batched.
        shared: True if this machine's shared memory can carry the pixels.
        working_bytes: estimate of the memory that a rank needs besides the weights.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    schedule: str
    shared: bool
    working_bytes: int = 0


class EncodeRequest(Message, frozen=True):
    """Encode pixels on all ranks. Tensors: `pixels`, from -1 to 1. The tensor of the reply is `latent`, the means.

    Attributes:
        schedule: how frames are batched.
        working_bytes: estimate of the memory that a rank needs besides the weights.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    schedule: str
    working_bytes: int = 0


TOKENS = "tokens"
"""Name of the tensor in an EncodeTextRequest that holds the packed tokens as msgpack, uint8."""


class EncodeTextRequest(Message, frozen=True):
    """Encode a prompt, or write text after it, on all ranks.

    Tensors: `tokens`, which are packed (`models/comfyui/features/recipe.py`), and by number the tensors in tokens and options.
    The reply's `value` is the result of ComfyUI's `encode_token_weights`, or the tokens that its `generate` returns.

    Attributes:
        options: the packed list of the options that ComfyUI has set since its last reset.
        adapters: id of the adapters to apply to the weights; empty for none.
        working_bytes: estimate of the memory that a rank needs besides the weights.
        writing: the arguments of ComfyUI's `generate` besides the prompt; None to encode the prompt.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    options: Any
    adapters: str = ""
    working_bytes: int = 0
    writing: dict[str, bool | int | float | None] | None = None


class MeasureMachineRequest(Message, frozen=True):
    """Measure the speeds of devices and links. The plan puts all ranks on one axis."""

    request: int
    plan: ResolvedPlan


class MeasureMemoryRequest(Message, frozen=True):
    """Measure the memory that a job may use on the device of each rank now."""

    request: int
    plan: ResolvedPlan


class MeasureBlocksRequest(Message, frozen=True):
    """Time one block of each kind of a model without its weights. Tensors and values are those of one ForwardRequest call."""

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    values: dict[str, Value]


RECIPE = "recipe"
"""Name of the tensor in a StoreAdaptersRequest that holds the recipe. The other tensors go by their ids."""


class StoreAdaptersRequest(Message, frozen=True):
    """Store adapters that later requests name. The workers do not reply.

    Tensors: new tensors by id, and `recipe` (uint8) with the last of them.

    Attributes:
        forget: names of tensors, sent earlier, that are not used any more.
    """

    forget: list[str]


class ReleaseModelRequest(Message, frozen=True):
    """Release the memory that a model's weights use on the devices of these ranks."""

    request: int
    model: ModelSpec
    ranks: list[int]


class CancelRequest(Message, frozen=True):
    """Cancel a request on the user's behalf. The request ends after the running model call."""

    request: int


class AbandonRequest(Message, frozen=True):
    """Abandon the running request, because its client has left. The gateway sends this."""


class RecoverRequest(Message, frozen=True):
    """Recover from a request that failed with the same error on every rank, and keep the workers.

    No rank has anything in flight. Each rank frees the request's state, answers with RankCostReply, and is idle again.
    """

    request: int


class ShutdownRequest(Message, frozen=True):
    """End the worker."""


RunRequest = SampleRequest | ForwardRequest | DecodeRequest | EncodeRequest | EncodeTextRequest
"""Requests that run a model for the user."""

ToWorker = (
    JoinRequest
    | SampleRequest
    | ForwardRequest
    | DecodeRequest
    | EncodeRequest
    | EncodeTextRequest
    | MeasureMachineRequest
    | MeasureMemoryRequest
    | MeasureBlocksRequest
    | StoreAdaptersRequest
    | ReleaseModelRequest
    | CancelRequest
    | AbandonRequest
    | RecoverRequest
    | ShutdownRequest
)
