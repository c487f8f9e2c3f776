"""Every message, schema-checked on arrival. Host to worker: `ToWorker`; worker to host: `ToHost`."""

from __future__ import annotations

import msgspec

from ..diffusion import CacheSettings, GuidanceFunction, ModelSpec, Prompt, Sampling, Value
from ..plan import ResolvedPlan
from ..plan.predict.measure import BlockTimes, Machine

PROTOCOL = 16
"""Raised whenever a message or the framing changes; both sides must agree."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages; tensors travel beside the message, by name."""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank runs on, and the versions that must be the same on all of them; `code` is the pack's own.

    `comfyui` is empty where no ComfyUI was named, which some models need; `comfyui_files` tells its files by content
    (`models/comfyui/content/files.py`). `kernel_faults` is how installed packages of
    attention kernels fail there, by name.
    """

    host: str
    device: str
    torch: str
    diffusers: str
    code: str
    comfyui: str = ""
    comfyui_files: bytes = b""
    kernel_faults: dict[str, str] = {}


class Join(Message, frozen=True):
    """Every rank answers with Ready once its process group is up; what it sent before belongs to someone else."""

    generation: int


class Gone(Message, frozen=True):
    """From the gateway: the client has left, so give up what it asked for."""


PROGRAM = "program"
"""The tensor of a Sample message that holds what the sampler does, uint8."""


class Sample(Message, frozen=True):
    """Run a whole denoise, with the adapters of this id ("" for none) in the weights.

    `working` is what a rank is thought to need beside the weights, in bytes. With `clean_inpaint` the part outside the mask
    is shown to the model as it is, without noise. `compiler` is torch.compile's backend for the blocks, empty for none.
    `guidance_functions` change what classifier-free guidance gives, one after the other.

    Tensors: `x` (the noised latent), `program` (`denoise/program.py`), `sigmas`, the prompts' tensors, for
    inpainting `mask`, `latent`, `noise`, and for diffusion `log_sigmas`.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    sampling: Sampling
    cfg: float
    positive: list[Prompt]
    negative: list[Prompt] | None
    clean_inpaint: bool = False
    cache: CacheSettings | None = None
    guidance_functions: list[GuidanceFunction] = []
    compiler: str = ""
    adapters: str = ""
    working: int = 0


RESIDUAL = "residual."
"""Begins the names of a Forward message's tensors that only go to the ranks that add them."""


class Residuals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is added to the image tokens after blocks of the model: the request's tensor by the block's number.

    All tensors are `[batch, image tokens, features]`, `batch` that of the forward or 1, of one dtype.
    """

    blocks: dict[int, str]
    batch: int
    dtype: str


class Forward(Message, frozen=True):
    """Run the model once for each of `calls`, with the adapters of this id ("" for none) in the weights.

    Tensors of call N: `N.x` (compute dtype), `N.timestep`, and `N.` the conditioning by the model's names; `values[N]` is
    what the conditioning holds besides. All calls have latents of one size.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    calls: int
    values: list[dict[str, Value]]
    adapters: str = ""
    residuals: Residuals | None = None
    working: int = 0


class Decode(Message, frozen=True):
    """Decode latents on all ranks. Tensors: `latent`.

    `schedule` says which frames go together, `shared` whether the pixels can come in shared memory, `working` what a rank is
    thought to need beside the weights, in bytes.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    schedule: str
    shared: bool
    working: int = 0


class Encode(Message, frozen=True):
    """Encode pixels on all ranks. Tensors: `pixels`, from -1 to 1. The answer's tensor is `latent`, the means.

    `working` is as Decode's.
    """

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    schedule: str
    working: int = 0


class MeasureMachine(Message, frozen=True):
    """Measure how fast devices and links are. The plan joins all ranks on one axis."""

    request: int
    plan: ResolvedPlan


class MeasureMemory(Message, frozen=True):
    """Ask every rank how much memory a job may take on its device now."""

    request: int
    plan: ResolvedPlan


class MeasureBlocks(Message, frozen=True):
    """Time one block of each kind of a model, without its weights. Tensors and values as for one call of Forward."""

    request: int
    model: ModelSpec
    plan: ResolvedPlan
    compute_dtype: str
    values: dict[str, Value]


RECIPE = "recipe"
"""The tensor of an Adapters message that holds the recipe; the others go by their ids."""


class Adapters(Message, frozen=True):
    """Adapters that later requests name; not answered. Tensors: new ones by id, `recipe` with the last of them (uint8).

    `forget` names tensors sent before that are not used any more.
    """

    forget: list[str]


class Release(Message, frozen=True):
    """Give back the memory that a model's weights take on the devices of these ranks."""

    request: int
    model: ModelSpec
    ranks: list[int]


class Cancel(Message, frozen=True):
    """The user cancels the request, which ends with the running model call."""

    request: int


class GoOn(Message, frozen=True):
    """To every rank: all of them have failed alike with this request and have nothing in flight, so it alone is given up.

    Each rank forgets what the request has left, answers with Report, and is idle again.
    """

    request: int


class Shutdown(Message, frozen=True):
    """End the worker."""


class Hello(Message, frozen=True):
    """A worker's first message on its connection."""

    generation: int
    facts: Facts


class Ready(Message, frozen=True):
    """The process group is up on this rank; the answer to Join."""

    generation: int


class Waiting(Message, frozen=True):
    """From the gateway: not all ranks are there yet; `refused` says why one was turned away, if one was."""

    missing: tuple[int, ...]
    refused: str


class Welcome(Message, frozen=True):
    """From the gateway to a new client: all ranks, in order. It may join, or leave with that."""

    members: tuple[Facts, ...]


class Busy(Message, frozen=True):
    """From the gateway to a client that wants to join: another one has."""

    client: str


class Lost(Message, frozen=True):
    """From the gateway: the connection to a rank has ended, and with it the group."""

    rank: int
    reason: str


class Pulse(Message, frozen=True):
    """What the rank is doing, and a counter that grows as long as it gets anywhere; sent every second at least.

    `waiting` is whether it waits for other ranks at this moment.
    """

    phase: str
    step: int
    progress: int
    waiting: bool


class Loading(Message, frozen=True):
    """Of the weights of all ranks, `done` of `total` bytes are there."""

    request: int
    done: int
    total: int


class Progress(Message, frozen=True):
    """What the sampler tells of a step, once its first model call is done. Tensors: `denoised`, `x`."""

    request: int
    step: int


class Pixels(Message, frozen=True):
    """A piece of what is being decoded: an item of the batch, from its frame `start` on; pieces come in order.

    The tensor `pixels`, `[3, (frames,) height, width]`, comes with the message from another machine; on this one its
    `dtype` and `shape` do, with the descriptor of shared memory.
    """

    request: int
    item: int
    start: int
    dtype: str
    shape: tuple[int, ...]


class HeldModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model and the bytes of its weights on one rank's device."""

    model: ModelSpec
    nbytes: int


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a request's `seconds` went on one rank, all counted from when it had the request.

    `waiting` has the microseconds that it waited for others in each bin of `width` seconds, by kind of traffic; bins of
    nothing at the end are left out. `phases` are those it went through and when each began, `steps` when each step of the
    denoise did.
    """

    seconds: float
    width: float
    waiting: dict[str, list[int]]
    phases: list[tuple[str, float]]
    steps: list[float]


class Report(Message, frozen=True):
    """What a request cost on one rank: seconds, bytes sent by kind, bytes held at the end and at the peak.

    `weights` are those of the request's model, `held` those of all models on the device, `on_host` those that had to
    leave it and wait in host memory; `restored` came back from there during the request, `read` from disk. `compiling` are the
    seconds in which it compiled blocks.
    """

    request: int
    rank: int
    seconds: float
    waiting: float
    sent: dict[str, int]
    read: int
    weights: int
    cache: int
    peak: int
    held: list[HeldModel]
    on_host: int
    restored: int
    times: Times
    compiling: float = 0.0


class Done(Message, frozen=True):
    """The request is finished. Tensors: `result`, unless there is none. `skipped` counts a denoise's calls that a cache saved.

    `uncompiled` says of kinds of blocks that were to be compiled, and of what expands GGUF's weights, why they could not be,
    once for each.
    """

    request: int
    skipped: int = 0
    uncompiled: tuple[str, ...] = ()


class MachineMeasured(Message, frozen=True):
    """The answer to MeasureMachine; `again` says that workers which start now have faster links than these."""

    request: int
    machine: Machine
    again: bool = False


class MemoryMeasured(Message, frozen=True):
    """The answer to MeasureMemory: of each rank the bytes that are free to it, with what it holds and would give up."""

    request: int
    free: tuple[int, ...]


class BlocksMeasured(Message, frozen=True):
    """The answer to MeasureBlocks."""

    request: int
    times: BlockTimes


class Declined(Message, frozen=True):
    """The request cannot work on these ranks, which are idle again; the reason is for the user."""

    request: int
    reason: str


class WasCancelled(Message, frozen=True):
    """The request was cancelled on all ranks, which are idle again."""

    request: int


class Shortage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's memory, in bytes, when it ran out.

    `asked` is 0 where that is not known; `part` is what the request's model takes on this rank; `held` are all models
    whose weights were on the device.
    """

    asked: int
    free: int
    part: int
    held: list[HeldModel]


class Issued(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many operations of one kind a rank has issued in a request, all of which these ranks have to issue."""

    name: str
    ranks: tuple[int, ...]
    count: int


class Failed(Message, frozen=True):
    """A rank's own account of its failure; `at` is seconds since the epoch, `shortage` tells of memory that ran out.

    `trace` is empty where `reason` is a sentence for the user. `error` is the type of what was raised. `issued` has the
    operations of the request; it is None where the rank cannot go on, whatever the others say.
    """

    rank: int
    device: str
    phase: str
    step: int
    shortage: Shortage | None
    reason: str
    trace: str
    at: float
    error: str = ""
    issued: list[Issued] | None = None


ToWorker = (
    Join
    | Gone
    | Sample
    | Forward
    | Adapters
    | Decode
    | Encode
    | MeasureMachine
    | MeasureMemory
    | MeasureBlocks
    | Release
    | Cancel
    | GoOn
    | Shutdown
)
ToHost = (
    Hello
    | Ready
    | Waiting
    | Welcome
    | Busy
    | Lost
    | Pulse
    | Loading
    | Progress
    | Pixels
    | Report
    | Done
    | MachineMeasured
    | MemoryMeasured
    | BlocksMeasured
    | Declined
    | WasCancelled
    | Failed
)
