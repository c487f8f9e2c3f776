"""The Backend, which nodes call. It keeps one group of workers for each set of devices and starts a group when it is needed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..attention.kernels import describe
from ..conditioning import Conditioning
from ..diffusion import ModelSpec
from ..errors import Cancelled, NotFinite, Refused, RequestFailed, WorkerFailed
from ..models.diffusers.diffusers_family import check_diffusers, in_range, of_diffusers
from ..models.families import FAMILIES
from ..plan import ParallelPlan, ResolvedPlan
from ..plan.predict.measure import Machine, forget_all
from ..plan.resolve import in_rows, is_automatic, planned_devices
from ..vae import AUTOENCODERS
from ..weights.adapters.lora import NONE, AdapterSet
from ..wire.frames import Frame
from ..wire.to_worker import (
    BlockResiduals,
    DecodeRequest,
    EncodeRequest,
    EncodeTextRequest,
    ForwardRequest,
    ReleaseModelRequest,
    RunRequest,
    SampleRequest,
)
from .planning.comparison import Comparison, FreeMemory, compare
from .planning.devices import Devices
from .planning.events import CostEvent, OnEvent, PlanEvent, StartingEvent, ignore
from .planning.measurements import Measurements
from .planning.planner import MeasuredChoice, Planner, PlanRequest
from .runs.finite import FiniteCheck, caused_by_pipefusion, check_finite
from .runs.journal import Journal, RunRecord
from .runs.report import compiled, released, restored, table
from .workers import diagnosis
from .workers.group import Deadlines, WorkerGroup
from .workers.launcher import sweep_folders, wants_kernels_early, worker_environment
from .workers.pending_request import IsCancelled, PendingRequest, Request, RequestContext, RequestReply
from .workers.processes import ForkServer, ForkServerStuck
from .workers.remote import is_remote
from .workers.status import BackendStatus, starting
from .workers.versions import check_members_diffusers, check_torch

log = logging.getLogger(__name__)

__all__ = ["Backend", "Deadlines"]


OnProgress = Callable[[int, Tensor, Tensor], None]
"""A callback that receives a step's number, the denoised latent and x."""

OnPixels = Callable[[int, int, Tensor], None]
"""A callback that receives decoded pixels in order: the item of the batch, its first frame in the pixels, and the pixels."""


def _imports_of(model: ModelSpec) -> tuple[str, ...]:
    """Return the modules that a model needs and whose import takes seconds."""
    if model.text is not None:
        return ()
    return (FAMILIES.get(model.family) or AUTOENCODERS[model.family]).imports


class Backend:
    """The workers of one ComfyUI. Its methods block. Any thread may call them, one thread at a time.

    Attributes:
        deadlines: the time limits, which may be changed. Running workers keep those that they started with.

    Args:
        on_event: receives an event for everything that a user may wait for.
    """

    def __init__(self, deadlines: Deadlines | None = None, on_event: OnEvent = ignore) -> None:
        self.deadlines = deadlines or Deadlines()
        self._on_event = on_event
        self._server: ForkServer | None = None
        self._groups: dict[tuple[str, ...], WorkerGroup] = {}
        self._users: list[tuple[weakref.ref[object], ModelSpec]] = []
        self._generations = itertools.count(1)
        self._requests = itertools.count(secrets.randbits(48))  # random: remote workers also serve other clients
        self._lock = threading.RLock()
        self._planner = Planner()
        self._devices = Devices()
        self._measurements = Measurements(self._ask, self._number, on_event)
        self._journal = Journal()
        self._starting: tuple[str, ...] = ()
        self._closing = threading.Event()
        threading.Thread(target=sweep_folders, name="parallel-sweep", daemon=True).start()

    def sample(
        self,
        tensors: Mapping[str, Tensor],
        on_progress: OnProgress,
        caller: RequestContext,
        adapters: AdapterSet = NONE,
        **fields: Any,
    ) -> RequestReply:
        """Run a whole denoise with adapters in the weights.

        The reply's tensor `result` is the final latent, fp32 on the CPU.

        Args:
            fields: the other fields of the SampleRequest.

        Raises:
            Refused: an input cannot work.
            Cancelled: the caller has cancelled.
            NotFinite: the model's output holds NaN or infinity.
            RequestFailed: the request's data made all workers raise the same error.
            WorkerFailed: a worker failed. The next call starts new workers.
        """
        check = FiniteCheck(tensors["sigmas"].cpu(), fields["compute_dtype"])

        def on_message(frame: Frame) -> None:
            check(frame)
            on_progress(frame.message.step, frame.tensors["denoised"], frame.tensors["x"])

        message = SampleRequest(request=self._number(), adapters=adapters.id, **fields)
        exchange = PendingRequest(message, tensors, adapters, caller, on_message)
        try:
            answer = self._request(exchange)
            check(answer.frame)
        except NotFinite as error:
            if message.plan.pipefusion > 1 and self._is_finite_without_pipefusion(exchange, check.messages):
                raise caused_by_pipefusion(error, message.plan) from error
            raise
        return answer

    def _is_finite_without_pipefusion(self, exchange: PendingRequest, messages: int) -> bool:
        """Repeat a denoise without PipeFusion on the same devices, and return True if its numbers are finite.

        Return False as well if the denoise fails there for another reason.

        Args:
            messages: the number of messages to check; the repeated denoise is cancelled after them.

        Raises:
            Cancelled: the caller has cancelled.
        """
        message = exchange.message
        assert isinstance(message, SampleRequest)
        plan = message.plan.without_pipefusion()
        log.warning(
            "Parallel: NaN under %s; repeating the steps under %s to find the cause", message.plan.degrees, plan.degrees
        )
        check = FiniteCheck(exchange.tensors["sigmas"].cpu(), message.compute_dtype)

        def is_cancelled() -> bool:
            return check.messages >= messages or exchange.caller.is_cancelled()

        caller = replace(exchange.caller, is_cancelled=is_cancelled)
        again = msgspec.structs.replace(message, request=self._number(), plan=plan)
        try:
            check(self._ask(replace(exchange, message=again, caller=caller, on_message=check)).frame)
        except Cancelled:
            if check.messages < messages:
                raise
        except (NotFinite, Refused, RequestFailed, WorkerFailed) as error:
            log.warning("Parallel: the repeated steps failed: %s", error)
            return False
        return True

    def forward(
        self,
        calls: Sequence[Conditioning],
        caller: RequestContext,
        adapters: AdapterSet = NONE,
        residuals: tuple[BlockResiduals, Mapping[str, Tensor]] | None = None,
        **fields: Any,
    ) -> RequestReply:
        """Run the model once for each call, with adapters in the weights. Raises as `sample` does.

        The reply's tensor `result` is the outputs, joined along the batch, in the compute dtype, on the CPU.

        Args:
            residuals: the residuals that a ControlNet adds, and their tensors, for the calls' batches one after the other.
            fields: the other fields of the ForwardRequest.
        """
        added, added_tensors = residuals or (None, {})
        message = ForwardRequest(
            request=self._number(),
            adapters=adapters.id,
            calls=len(calls),
            values=[dict(call.values) for call in calls],
            residuals=added,
            **fields,
        )
        tensors = {
            f"{number}.{name}": tensor for number, call in enumerate(calls) for name, tensor in call.tensors.items()
        }
        tensors |= added_tensors
        answer = self._request(PendingRequest(message, tensors, adapters, caller))
        check_finite(answer.frame.tensors["result"], "One model call", message.compute_dtype)
        return answer

    def decode(
        self,
        vae: ModelSpec,
        requested_plan: ParallelPlan,
        schedule: str,
        latent: Tensor,
        on_pixels: OnPixels,
        caller: RequestContext,
        working_bytes: int = 0,
    ) -> RequestReply:
        """Decode a batch of latents. The pixels `[3, (frames,) height, width]` go to `on_pixels`. Raises as `sample` does.

        Args:
            working_bytes: estimate of the memory that a worker needs besides the weights.
        """

        def on_message(frame: Frame) -> None:
            on_pixels(frame.message.item, frame.message.start, frame.tensors["pixels"])

        with self._lock:
            plan = self._in_rows(requested_plan)
            shared = not is_remote(plan.devices[0])
            message = DecodeRequest(self._number(), vae, plan, schedule, shared, working_bytes)
            return self._request(PendingRequest(message, {"latent": latent}, NONE, caller, on_message))

    def encode(
        self,
        vae: ModelSpec,
        requested_plan: ParallelPlan,
        schedule: str,
        pixels: Tensor,
        caller: RequestContext,
        working_bytes: int = 0,
    ) -> RequestReply:
        """Encode a batch of pictures or clips. The reply's tensor `latent` is their means. Raises as `sample` does."""
        with self._lock:
            message = EncodeRequest(self._number(), vae, self._in_rows(requested_plan), schedule, working_bytes)
            return self._request(PendingRequest(message, {"pixels": pixels}, NONE, caller))

    def encode_text(
        self,
        encoder: ModelSpec,
        requested_plan: ParallelPlan,
        options: Any,
        tensors: Mapping[str, Tensor],
        caller: RequestContext,
        adapters: AdapterSet = NONE,
        working_bytes: int = 0,
        writing: dict[str, bool | int | float | None] | None = None,
    ) -> RequestReply:
        """Encode a prompt, given as the tensors and the fields of an EncodeTextRequest. Raises as `sample` does."""
        with self._lock:
            plan = self._in_rows(requested_plan)
            message = EncodeTextRequest(self._number(), encoder, plan, options, adapters.id, working_bytes, writing)
            return self._request(PendingRequest(message, tensors, adapters, caller))

    def _in_rows(self, requested_plan: ParallelPlan) -> ResolvedPlan:
        """Return the plan of work that is cut by rows. For automatic devices, running workers are preferred."""
        devices = planned_devices(self.placed_on_devices(requested_plan), torch.cuda.device_count())
        if is_automatic(requested_plan):
            devices = next((running for running, group in self._groups.items() if group.alive()), devices)
        return in_rows(requested_plan, devices)

    def plan(
        self,
        question: PlanRequest,
        compute_dtype: str,
        example: Conditioning,
        reclaimable: Callable[[str], int],
        is_cancelled: IsCancelled,
    ) -> ResolvedPlan:
        """Return the plan for a job and the memory that is free now. The workers measure the memory, so they may be started.

        Args:
            example: one forward of the job.
            reclaimable: returns the bytes that this process holds on a device of this machine and would give up for the job.

        Raises:
            Refused: no plan can work. The message says what can.
            Cancelled, WorkerFailed: as `sample` does.
        """
        self._journal.begins()

        def choose() -> MeasuredChoice:
            return self._planner.choose(
                question,
                measure_memory=lambda plan: self._measurements.memory(plan, reclaimable, is_cancelled),
                measure_machine=lambda plan: self._measurements.machine(plan, is_cancelled),
                measure_blocks=lambda plan: self._measurements.blocks(
                    question.spec, plan, compute_dtype, example, is_cancelled
                ),
            )

        answer = choose()
        if self._loads_kernels_late(answer.choice.plan):
            self._measurements.memory(answer.choice.plan, reclaimable, is_cancelled)  # starts the plan's workers
            answer = choose()  # by the memory left with all kernels loaded
        self._on_event(PlanEvent(question, answer.choice, answer.memory))
        return answer.choice.plan

    def couples_rows(self, spec: ModelSpec) -> bool:
        """Return True if a model that was planned for computes the rows of a batch together."""
        return self._planner.couples_rows(spec)

    def kernel_faults(self, devices: tuple[str, ...]) -> Mapping[str, str]:
        """Return the errors of attention kernel packages in the running workers on these devices, by package name."""
        return {
            name: failure for member in self._groups[devices].members for name, failure in member.kernel_faults.items()
        }

    def measure(self, plan: ResolvedPlan, is_cancelled: IsCancelled) -> Machine:
        """Measure the speeds of a plan's devices and of their links now. Raises Cancelled, WorkerFailed, Refused."""
        return self._measurements.measure(plan, is_cancelled)

    def placed_on_devices(self, plan: ParallelPlan) -> ParallelPlan:
        """Return a plan that names the devices behind its `devices`; see Devices.placed_on_devices."""
        return self._devices.placed_on_devices(plan)

    def check_loadable(self, imports: Sequence[str], devices: Sequence[str]) -> None:
        """Raise Refused if a model's imports need a diffusers that this machine's workers would not find.

        Workers on other machines are asked with the first request.
        """
        if of_diffusers(imports) and not is_remote(devices[0]):
            check_diffusers()

    def resident_bytes(self, model: ModelSpec, device: str) -> int:
        """Return the bytes of this model's weights that all workers on a device hold there."""
        return sum(group.resident_bytes(model, device) for group in list(self._groups.values()))

    def release(self, model: ModelSpec, leaves: Callable[[str], bool] = lambda device: True) -> None:
        """Take a model off the devices for which `leaves` returns True. It stays in host memory if there is room.

        This never fails: workers that have ended hold nothing.
        """
        with self._lock:
            for devices, group in list(self._groups.items()):
                ranks = [rank for rank, device in enumerate(devices) if leaves(device)]
                if not any(group.resident_bytes(model, devices[rank]) for rank in ranks):
                    continue
                if group.alive():
                    try:
                        answer = group.execute(PendingRequest(ReleaseModelRequest(self._number(), model, ranks)))
                        log.info("Parallel: %s", released(model, answer.reports))
                    except WorkerFailed as failure:
                        log.warning("%s", failure)
                if not group.alive():
                    del self._groups[devices]

    def status(self) -> BackendStatus:
        """Return the state of all workers and the memory they hold. This never waits, so it may be called at any time."""
        groups = [group.status() for group in list(self._groups.values())]
        if devices := self._starting:
            groups.append(starting(devices))
        return BackendStatus(groups, self._journal.runs, self._journal.failure)

    def last_run(self) -> RunRecord | None:
        """Return the record of the last finished run, or None before the first. This never waits."""
        return self._journal.record()

    def free(self) -> None:
        """Take all models off the workers' devices, as `release` does. Raises Refused while the workers are busy."""
        with self._idle():
            for model in {model for group in self._groups.values() for model in group.models()}:
                self.release(model)

    def stop(self) -> None:
        """End all workers. The next request starts new ones. Raises Refused while the workers are busy."""
        with self._idle():
            for group in self._groups.values():
                group.stop()
            self._groups.clear()

    def measure_again(self, is_cancelled: IsCancelled) -> Machine:
        """Forget all measurements, and measure the devices of the running workers anew. Plans are chosen by the new ones.

        Raises:
            Refused: the workers are busy, or there are none.
            Cancelled, WorkerFailed: as `sample` does.
        """
        with self._idle():
            devices = next((devices for devices, group in self._groups.items() if group.alive()), None)
            if devices is None:
                raise Refused("no workers are running, so there is nothing to measure with: run a graph first.")
            forget_all()
            self._planner.forget()
            return self._measurements.machine(in_rows(ParallelPlan(), devices), is_cancelled)

    def compare(self, free_memory: FreeMemory, report: Callable[[str], None], is_cancelled: IsCancelled) -> Comparison:
        """Measure the gain of the last denoise's plan over one device; see comparison.compare.

        Raises:
            Refused: the workers are busy, or there is nothing to compare.
            Cancelled, WorkerFailed: as `sample` does.
        """
        with self._idle():
            denoise = self._journal.denoise
            try:
                return compare(denoise, self._ask, self._number, free_memory, report, is_cancelled)
            finally:  # the one device holds the whole model
                if denoise is not None and (group := self._groups.pop(denoise.message.plan.devices[:1], None)):
                    group.stop()

    @contextlib.contextmanager
    def _idle(self) -> Iterator[None]:
        """Hold the lock inside the context. Raise Refused if another thread holds it."""
        if not self._lock.acquire(blocking=False):
            raise Refused("the workers are busy: wait until they are done, or cancel the run.")
        try:
            yield
        finally:
            self._lock.release()

    def retain(self, user: object, model: ModelSpec) -> None:
        """Keep a model on the devices while it has users. It is released when its last user is garbage collected."""
        with self._lock:
            self._users = [(reference, spec) for reference, spec in self._users if reference() is not None]
            self._users.append((weakref.ref(user), model))
        weakref.finalize(user, self._begin_to_abandon, model).atexit = False

    def _begin_to_abandon(self, model: ModelSpec) -> None:
        """Release an unused model in a separate thread.

        The garbage collector may call this during a request, which holds the lock.
        """
        threading.Thread(target=self._release_if_unused, args=(model,), name="parallel-abandon", daemon=True).start()

    def _release_if_unused(self, model: ModelSpec) -> None:
        with self._lock:
            if not any(spec == model and reference() is not None for reference, spec in self._users):
                self.release(model)

    def prepare(self) -> None:
        """Start the fork server in advance (its imports take seconds). Do nothing if it runs or a request is active.

        This never waits and never fails. An error comes again with the first request, which reports it.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._closing.is_set():
                with contextlib.suppress(WorkerFailed):
                    self._fork_server()
        finally:
            self._lock.release()

    def close(self) -> None:
        """End all workers, and cancel all requests from now on, also the running one.

        Workers that are too busy to stop soon end with this process.
        """
        self._closing.set()
        if not self._lock.acquire(timeout=self.deadlines.leave):
            return
        try:
            for group in self._groups.values():
                group.stop()
            self._groups.clear()
            if self._server is not None:
                self._server.close(self.deadlines.leave)
                self._server = None
        finally:
            self._lock.release()

    def _number(self) -> int:
        """Return the number of a new request."""
        return next(self._requests)

    def _request(self, exchange: PendingRequest) -> RequestReply:
        """Do as `_ask` does, and report the request's costs to the observer, the journal and the log."""
        with self._lock:
            self._journal.forget_failure()
            message, answer = exchange.message, self._ask(exchange)
            assert isinstance(message, RunRequest)
            self._on_event(CostEvent(message.plan, answer.reports))
            if came_back := restored(message.model, answer.reports):
                log.info("Parallel: %s", came_back)
            if took := compiled(answer.reports):
                log.info("Parallel: %s", took)
            self._journal.ran(exchange, answer, self._planner.latest)
            if not isinstance(message, ForwardRequest):
                log.info("Parallel: %s\n%s", describe(message.plan), table(answer.reports, message.plan.devices))
            return answer

    def _ask(self, exchange: PendingRequest) -> RequestReply:
        """Have a request carried out by the workers of its plan."""

        def is_cancelled() -> bool:
            return self._closing.is_set() or exchange.caller.is_cancelled()

        message = exchange.message
        assert not isinstance(message, ReleaseModelRequest), "a plan says which workers"
        with self._lock:
            if self._closing.is_set():
                raise Cancelled
            for_diffusers = False
            if (model := getattr(message, "model", None)) is not None:
                self.check_loadable(_imports_of(model), message.plan.devices)
                for_diffusers = of_diffusers(_imports_of(model))
            for last_try in (False, True):
                group = self._group(message.plan, self._imports(message), for_diffusers, is_cancelled)
                if for_diffusers:
                    check_members_diffusers(group.members)
                try:
                    return group.execute(replace(exchange, caller=replace(exchange.caller, is_cancelled=is_cancelled)))
                except RequestFailed as failure:
                    self._journal.failed(str(failure))
                    raise
                except WorkerFailed as failure:
                    if last_try or not group.died_idle:
                        self._journal.failed(str(failure))
                        raise
                    log.warning("%s", failure)  # a worker had ended unnoticed, and new workers can do the request
                finally:
                    if not group.alive():
                        del self._groups[message.plan.devices]
            raise AssertionError("the last try returns or raises")

    def _group(
        self, plan: ResolvedPlan, imports: Sequence[str], for_diffusers: bool, is_cancelled: IsCancelled
    ) -> WorkerGroup:
        """Return the running group on a plan's devices, or a new group. Groups that share a device with the new one stop.

        A running group that loads kernels late is replaced if the plan wants them early. For a model of diffusers', a group is
        also replaced if it was started before the right diffusers was installed.
        """
        group = self._groups.get(plan.devices)
        remote = is_remote(plan.devices[0])
        if group is not None and group.alive() and not self._loads_kernels_late(plan):
            installed_since = for_diffusers and not remote and not in_range(group.members[0].diffusers)
            if not installed_since:
                return group
        for devices in [devices for devices in self._groups if set(devices) & set(plan.devices)]:
            self._groups[devices].stop()
            del self._groups[devices]
        if remote:
            self._devices.forget(plan.devices)  # asked again, unless the group turns out to be unchanged
        else:
            check_torch()
        started = time.monotonic()
        log.info("Parallel: starting %d worker(s) on %s", plan.world_size, ", ".join(dict.fromkeys(plan.devices)))

        def looked_on() -> bool:
            self._on_event(StartingEvent(plan.world_size, time.monotonic() - started))
            if not remote and self._server is not None:
                self._server.check_forking(self.deadlines.silence)
            return is_cancelled()

        def start() -> WorkerGroup:
            generation, early = next(self._generations), wants_kernels_early(plan) and not remote
            return WorkerGroup(self._fork_server, plan.devices, generation, self.deadlines, looked_on, early, imports)

        self._on_event(StartingEvent(plan.world_size, 0.0))
        self._starting = plan.devices
        try:
            try:
                group = start()
            except ForkServerStuck:
                log.warning("Parallel: the process that starts the workers is stuck; a new one replaces it")
                self._end_fork_server()
                group = start()
        except WorkerFailed as failure:
            in_time = time.monotonic() - started < self.deadlines.start
            if isinstance(failure, ForkServerStuck) or not in_time:
                self._end_fork_server()
            self._journal.failed(str(failure))
            raise
        finally:
            self._starting = ()
        log.info("Parallel: workers ready after %.1f s", time.monotonic() - started)
        self._groups[plan.devices] = group
        if remote:
            self._devices.learn(plan.devices)
        return group

    def _loads_kernels_late(self, plan: ResolvedPlan) -> bool:
        """Return True if the plan wants kernels early, and the running workers on its devices load them at first use."""
        group = self._groups.get(plan.devices)
        wants = wants_kernels_early(plan) and not is_remote(plan.devices[0])
        return wants and group is not None and not group.kernels_early

    def _imports(self, message: Request) -> list[str]:
        """Return the modules that take seconds to import, of the models in use and of a request's model."""
        models = [spec for reference, spec in self._users if reference() is not None]
        if model := getattr(message, "model", None):
            models.append(model)
        return sorted({module for model in models for module in _imports_of(model)})

    def _end_fork_server(self) -> None:
        """End the fork server if it has not forked all requested workers. The next workers get another fork server."""
        if self._server is not None and self._server.waited_for():
            self._server.close(0)
            self._server = None

    def _fork_server(self) -> ForkServer:
        if self._server is None or not self._server.alive():
            try:
                self._server = ForkServer(worker_environment())
            except OSError as error:
                raise diagnosis.unstartable(error) from error
        return self._server
