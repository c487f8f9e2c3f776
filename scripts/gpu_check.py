"""What is assumed of GPUs, checked on them (see gpu.sh, which runs all of it).

    python -m scripts.gpu_check one                                          # one GPU
    python -m torch.distributed.run --nproc-per-node=2 -m scripts.gpu_check many      # splits; ranks may share a GPU
    python -m torch.distributed.run --nproc-per-node=2 -m scripts.gpu_check pipeline  # PipeFusion

Each line is PASS, FAIL or INFO. The worker's own code denoises with random weights. --device cpu takes a small model through
the same code; what only a GPU can answer is INFO there.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import math
import os
import statistics
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_backend.attention.kernels import CHOICES, choose_kernel
from parallel_backend.attention.merge import PartialAttention
from parallel_backend.attention.packages import package_faults
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.errors import Refused
from parallel_backend.mesh import build_mesh
from parallel_backend.models.comfyui.importing import import_comfyui
from parallel_backend.models.family import Stage
from parallel_backend.plan import ResolvedPlan
from parallel_backend.plan.plan import APPROXIMATE_ATTENTION
from parallel_backend.plan.profiles import CONTEXT_BYTES
from parallel_backend.weights.sharded import Sharded
from parallel_backend.weights.store import Store
from parallel_backend.weights.streamed import Streamed
from parallel_backend.weights.whole import Whole
from parallel_backend.worker.memory.stage_part import stages
from parallel_backend.worker.requests.sampling import sample
from tests.allocations import peak_bytes
from tests.dry.dry_rank import by_formula, inspected, model_of
from tests.dry.full_size import JOBS
from tests.dry.lone_rank import LoneRank, plan_of, request, tensors_of

FLUX, FOUR_BLOCKS, SMALL = "FLUX.1-dev", "FLUX.1-dev, four blocks", "FLUX.1, small"

ROOM_FOR_FLUX = 60e9
"""Bytes of a GPU that take all of FLUX.1-dev twice: ours and ComfyUI's own."""

TYPE = torch.bfloat16
TOLERANCE = 2e-2
FP32_TOLERANCE = 1e-5
SHAPES = (
    (TYPE, 128, 1031, 777, 3),
    (torch.float16, 64, 33, 515, 5),
    (TYPE, 72, 100, 2, 16),
    (TYPE, 512, 257, 300, 1),
    (torch.float32, 128, 45, 67, 2),
)
"""Of attention: type, width of a head, queries, keys, heads."""

SHORT, LONG = 2, 8
"""Steps of two runs, whose difference is timed."""

REPEATS = 3
"""Of what is timed, the fastest of so many."""

EAGER, COMPILED = 1.02, 0.95
"""One rank's step against ComfyUI's own: at most."""

FURTHER = 1.5
"""How much further than ComfyUI's own result ours may be from one in fp32."""

NUMBERS = (1 << 22) + 3
"""Random numbers of which weights are made."""

Work = Callable[[], object]

Run = Callable[[int, Work], Tensor | None]
"""A denoise of so many steps, which tells when a step begins; its result, on the rank that has it."""


def nothing() -> None:
    """Is told when a step begins."""


def error_of(found: Tensor, expected: Tensor) -> float:
    """Relative, L2."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().norm())


class HostClock:
    """Is told when a step begins: how long the host took for the one before it, whatever the device still had to do."""

    def __init__(self, wait: Work) -> None:
        self.milliseconds: list[float] = []
        self._wait = wait
        self._begun = 0.0

    def __call__(self) -> None:
        """A step begins."""
        if self._begun:
            self.milliseconds.append(1e3 * (time.perf_counter() - self._begun))
        self._wait()
        self._begun = time.perf_counter()


class Check:
    """What one rank finds out about its device."""

    def __init__(self, kind: str) -> None:
        self.rank = int(os.environ.get("LOCAL_RANK", 0))
        self.ranks = int(os.environ.get("WORLD_SIZE", 1))
        self.cuda = kind == "cuda"
        self.gpus = torch.cuda.device_count() if self.cuda else 0
        self.apart = self.gpus >= self.ranks
        """Whether each rank has a GPU of its own."""
        self.device = torch.device("cuda", self.rank % self.gpus) if self.cuda else torch.device(kind)
        if self.cuda:
            torch.cuda.set_device(self.device)
        self.name = FOUR_BLOCKS if self.cuda else SMALL
        self.computes_in = "bfloat16" if self.cuda else "float32"  # as ComfyUI does
        self.tolerance = TOLERANCE if self.cuda else FP32_TOLERANCE
        self.compiler = "inductor" if self.cuda else "aot_eager"
        self._numbers = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1)).to(self.device)

    # What is said, and measured.

    def say(self, name: str, passed: bool | None, text: object = "") -> None:
        """A line; None is for information."""
        verdict = "INFO" if passed is None else "PASS" if passed else "FAIL"
        print(f"[{self.rank}] {verdict} {name}: {text}", flush=True)

    def each(self, *checks: Work) -> None:
        """One after another; one that raises is a failure, and the next one runs."""
        for check in checks:
            try:
                check()
            except Exception as error:
                name = getattr(check, "__name__", None) or check.func.__name__  # type: ignore[attr-defined]
                self.say(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            if self.cuda:
                torch.cuda.empty_cache()

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, work: Work, runs: int = 10) -> float:
        """Of one run of several."""
        for _ in range(3):
            work()
        self.wait()
        start = time.perf_counter()
        for _ in range(runs):
            work()
        self.wait()
        return 1e3 * (time.perf_counter() - start) / runs

    def step(self, run: Run) -> tuple[float, float]:
        """Milliseconds of a step, and of the host alone."""
        seconds = {SHORT: math.inf, LONG: math.inf}
        for _ in range(REPEATS):
            for steps in seconds:
                self.wait()
                start = time.perf_counter()
                run(steps, nothing)
                self.wait()
                seconds[steps] = min(seconds[steps], time.perf_counter() - start)
        clock = HostClock(self.wait)
        run(LONG, clock)
        return 1e3 * (seconds[LONG] - seconds[SHORT]) / (LONG - SHORT), statistics.median(clock.milliseconds)

    def peak(self, work: Work) -> int:
        """Bytes of the device that work takes at the most beside what is held before."""
        if not self.cuda:
            return peak_bytes(work)
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        work()
        self.wait()
        return torch.cuda.max_memory_allocated() - held

    # The model, and its runs.

    def values(self, name: str, shape: torch.Size) -> Tensor:
        """Of a parameter: the same on every rank, and such that activations stay near 1."""
        start = zlib.crc32(name.encode()) % NUMBERS
        flat = self._numbers.roll(-start).repeat(math.ceil(shape.numel() / NUMBERS))[: shape.numel()]
        if len(shape) > 1:
            return flat.view(shape) / shape[1] ** 0.5
        return flat * 0.1 if name.endswith("bias") else 1 + 0.2 * flat

    def model(
        self,
        name: str,
        arrange: Callable[[nn.Module, Sequence[nn.Module]], Store] | None = None,
        stage: Stage | None = None,
    ) -> tuple[Any, Store]:
        """A stage of the model, or all of it, and where its weights are."""
        model = model_of(name, whole=True, stage=stage)
        store = Whole(model.module) if arrange is None else arrange(model.module, model.block_modules)
        store.materialise(self.device)
        for key, parameter in model.module.named_parameters():
            run = store.run(key)
            run.values.copy_(self.values(key, parameter.shape).view(-1)[run.start : run.stop])
        store.settle()
        return model, store

    def plan(self, name: str, degrees: dict[str, int] | None = None, patches: int = 0) -> ResolvedPlan:
        """On the devices that there are; ranks may share one."""
        plan = plan_of(JOBS[name].blocks, patches, degrees or {})
        devices = tuple(f"cuda:{rank % self.gpus}" if self.cuda else "cpu" for rank in range(plan.world_size))
        return msgspec.structs.replace(plan, devices=devices)

    def tensors(self, name: str, steps: int) -> dict[str, Tensor]:
        """Of a request, the same on every rank."""
        generator = torch.Generator().manual_seed(2)
        return tensors_of(JOBS[name], 1, steps, lambda *shape: torch.randn(shape, generator=generator).to(self.device))

    def ours(
        self, name: str, plan: ResolvedPlan, model: Any, holding: Any = None, compiler: str = ""
    ) -> tuple[LoneRank, Run]:
        """The worker's denoise."""
        rank = LoneRank(self.device, Meter(device=self.device), model, holding, compiler)

        def run(steps: int, on_step: Work) -> Tensor | None:
            rank.on_step = on_step
            sample(rank, request(JOBS[name], plan, self.computes_in), self.tensors(name, steps))  # type: ignore[arg-type]
            return rank.answer.get("result")

        return rank, run

    def comfyuis(self, name: str, model: Any, compiler: str = "", **options: torch.dtype) -> Run:
        """ComfyUI's own denoise with the same weights: its loader, with its options, its sampler, and its node that compiles."""
        import comfy.sample
        import comfy.samplers
        import comfy.sd
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        patcher = comfy.sd.load_diffusion_model_state_dict(dict(model.module.state_dict()), model_options=options)
        if compiler:
            patcher = TorchCompileModel.execute(patcher, compiler).result[0]
        given = self.tensors(name, 1)
        text, pooled, guidance = (given[f"prompt.0.{key}"] for key in ("context", "y", "guidance"))
        prompt = [[text, {"pooled_output": pooled, "guidance": float(guidance)}]]
        noise, sampler = given["x"].cpu(), comfy.samplers.sampler_object("euler")

        def run(steps: int, on_step: Work) -> Tensor:
            found = comfy.sample.sample_custom(
                patcher, noise, 1.0, sampler, torch.linspace(1, 0, steps + 1), prompt, prompt, torch.zeros_like(noise),
                callback=lambda *_: on_step(), disable_pbar=True, seed=1,
            )  # fmt: skip
            return patcher.model.process_latent_in(found)  # type: ignore[no-any-return]

        return run

    # One GPU.

    def one(self) -> None:
        """What one GPU can answer; last what takes longest."""
        self.each(self.kernels, self.speeds, self.copies, self.needs, self.streamed, self.busy, self.context)
        self.each(self.eager, self.compiled)

    def kernels(self) -> None:
        """Attention and its log-sum-exp against fp64, whole and merged of two halves of the keys."""
        for dtype, width, queries, keys, heads in SHAPES:
            q, k, v = (torch.randn(2, n, heads, width, device=self.device, dtype=dtype) for n in (queries, keys, keys))
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / width**0.5
            expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
            for choice in CHOICES:
                try:
                    kernel = choose_kernel(choice, self.device, dtype, width, package_faults(self.device))
                except Refused as refusal:
                    self.say(f"kernel {choice} {dtype} {width}", None, str(refusal)[:80])
                    continue
                out, lse = kernel.attend(q, k, v)
                merged = PartialAttention(q)
                for half in (slice(0, keys // 2), slice(keys // 2, keys)):
                    merged.add(*kernel.attend(q, k[:, half], v[:, half]))
                errors = [error_of(found, expected) for found in (out, merged.result())]
                errors.append(float((lse.double() - scores.logsumexp(-1)).abs().max()))
                good = None if choice == APPROXIMATE_ATTENTION else max(errors) < TOLERANCE
                self.say(f"kernel {kernel.name} {dtype} {width}", good, [f"{error:.1e}" for error in errors])

    def speeds(self) -> None:
        """Of attention at the model's shape."""
        tokens, heads = self.tokens(), inspected(self.name)[1].shape.heads
        q, k, v = (torch.randn(1, tokens, heads, 128, device=self.device, dtype=TYPE) for _ in range(3))
        tq, tk, tv = (x.transpose(1, 2) for x in (q, k, v))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        ours = choose_kernel("auto", self.device, TYPE, 128, package_faults(self.device))
        each: dict[str, Work] = {
            f"{ours.name}, which auto takes ({ours.reason})": lambda: ours.attend(q, k, v),
            "torch's choice": lambda: torch.nn.functional.scaled_dot_product_attention(tq, tk, tv),
            "cuDNN with LSE": lambda: cudnn(tq, tk, tv, None, True),
        }
        for name, work in each.items():
            try:
                speed = 4 * tokens**2 * heads * 128 / self.milliseconds(work) / 1e9
                self.say(f"attention, {name}", None, f"{speed:.2f} TFLOP/s")
            except RuntimeError as error:
                self.say(f"attention, {name}", None, str(error)[:80])

    def tokens(self) -> int:
        """Of the picture and its text."""
        _, height, width = JOBS[self.name].latent
        return height * width // 4 + JOBS[self.name].prompt["context"][0]

    def copies(self) -> None:
        """How fast memory of the host is copied to the device."""
        there = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        host_side = torch.empty(1 << 28, dtype=torch.uint8)
        sources = {"pageable": host_side} | ({"pinned": host_side.pin_memory()} if self.cuda else {})
        for name, source in sources.items():
            rate = there.nbytes / 1e6 / self.milliseconds(functools.partial(there.copy_, source))
            self.say(f"to the device, {name}", None, f"{rate:.1f} GB/s")

    def needs(self) -> None:
        """What a denoise takes beside its weights, against what plans go by; in patches with keys and values kept."""
        model, _ = self.model(self.name)
        for patches in (1, 4):
            plan = self.plan(self.name, patches=patches)
            self.needed(f"{patches} patches", plan, self.ours(self.name, plan, model)[1])

    def needed(self, name: str, plan: ResolvedPlan, run: Run) -> None:
        """The line of a plan."""
        run(SHORT, nothing)
        peak, formula = self.peak(lambda: run(SHORT, nothing)), by_formula(self.name, plan).working
        good = peak <= formula if self.cuda else None
        self.say(f"memory, {name}", good, f"{peak / 1e6:.0f} MB beside the weights, {formula / 1e6:.0f} by the formula")

    def streamed(self) -> None:
        """A window of half the blocks against all of them on the device."""
        plan = self.plan(self.name)
        alone = Communicator("alike", None, torch.device("cpu"), False, Meter())
        _, all_there = self.ours(self.name, plan, self.model(self.name)[0])
        model, store = self.model(
            self.name, lambda module, blocks: Streamed(module, blocks, alone, self.device, Meter(device=self.device))
        )
        assert isinstance(store, Streamed)
        store.fit(store.kept // 2)
        _, windowed = self.ours(self.name, plan, model, holding=store)
        expected, found = all_there(SHORT, nothing), windowed(SHORT, nothing)
        assert found is not None
        assert expected is not None
        times = [self.step(run)[0] for run in (all_there, windowed)]
        text = (
            f"{times[1]:.1f} ms a step, {times[0]:.1f} with all blocks there; {store.whole / 1e6:.0f} MB of blocks stay"
        )
        self.say("streamed weights", torch.equal(found, expected), text)

    def busy(self) -> None:
        """Whether the host keeps the GPU busy, and nothing waits in the loop."""
        _, run = self.ours(self.name, self.plan(self.name), self.model(self.name)[0])
        run(SHORT, nothing)
        with torch.profiler.profile() as profile:
            run(LONG, nothing)
            self.wait()
        started = [event for event in profile.events() or () if "CUDA" in str(event.device_type)]
        busy = sum(event.device_time for event in started) / 1e3 / LONG
        wall, host = self.step(run)
        text = f"a step takes {wall:.1f} ms, the host {host:.1f}, the GPU {busy:.1f} in {len(started) // LONG} kernels"
        self.say("the GPU is busy", busy > 0.9 * wall if self.cuda else None, text)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            self.watched(run)
        waits = [str(warning.message)[:80] for warning in seen if "synchroniz" in str(warning.message)]
        self.say("nothing waits in the loop", not waits if self.cuda else None, waits[:3])

    def watched(self, run: Run) -> None:
        """Have torch warn of waits, from the first step to the beginning of the last."""
        begun = 0

        def on_step() -> None:
            nonlocal begun
            begun += 1
            if self.cuda:
                torch.cuda.set_sync_debug_mode("warn" if begun < LONG else "default")

        run(LONG, on_step)

    def context(self) -> None:
        """What the device holds beside tensors, now that kernels are loaded; nobody else uses it."""
        if self.cuda:
            free, total = torch.cuda.mem_get_info()
            taken = total - free - torch.cuda.memory_reserved()
            text = f"{taken / 1e6:.0f} MB, {CONTEXT_BYTES / 1e6:.0f} in plans"
            self.say("the context", taken <= CONTEXT_BYTES, text)

    def eager(self) -> None:
        """One rank's step against ComfyUI's own: of the whole model, where there is room for both."""
        roomy = self.cuda and torch.cuda.mem_get_info()[0] > ROOM_FOR_FLUX
        self.beside_comfyui(FLUX if roomy else self.name, "", EAGER)

    def compiled(self) -> None:
        """The same by TorchCompileModel on both sides, which takes ComfyUI minutes for the whole model."""
        self.beside_comfyui(self.name, self.compiler, COMPILED)

    def beside_comfyui(self, name: str, compiler: str, aim: float) -> None:
        """How far ours and ComfyUI's own are from the result in fp32, if the model is small, and how long a step takes each."""
        import comfy.model_management

        model, _ = self.model(name)
        rank, run = self.ours(name, self.plan(name), model, compiler=compiler)
        own = self.comfyuis(name, model, compiler)
        found, other = run(SHORT, nothing), own(SHORT, nothing)
        assert found is not None
        assert other is not None
        how = f"{name}, {f'compiled by {compiler}' if compiler else 'eager'}"
        if name == self.name:
            exact = self.comfyuis(name, model, dtype=torch.float32)(SHORT, nothing)
            assert exact is not None
            ours, theirs = error_of(found, exact), error_of(other, exact)
            text = f"error in {self.computes_in} {ours:.1e}, of ComfyUI's own {theirs:.1e}"
            self.say(f"{how}, the result", ours <= FURTHER * theirs + FP32_TOLERANCE, text)
        else:
            self.say(f"{how}, the result", None, f"{error_of(found, other):.1e} from ComfyUI's own")
        if compiler:
            self.say(f"{how}, all blocks", not rank.uncompiled, rank.uncompiled)
        (step, host), (own_step, own_host) = (self.step(each) for each in (run, own))
        text = f"{step / own_step:.3f}, at most {aim}: {step:.1f} ms (host {host:.1f}), its own {own_step:.1f} ({own_host:.1f})"
        self.say(f"{how}, a step against ComfyUI's", step <= aim * own_step if self.cuda else None, text)
        comfy.model_management.unload_all_models()

    # Several ranks.

    def join(self) -> None:
        """The other ranks, as a worker does."""
        backend = "cpu:gloo,cuda:nccl" if self.cuda else "gloo"
        dist.init_process_group(backend, timeout=datetime.timedelta(days=1))

    def many(self) -> None:
        """Every split against one rank, and whether messages hide behind work."""
        self.join()
        self.each(self.noise, self.splits, self.ring, self.sharded)
        dist.destroy_process_group()

    def noise(self) -> None:
        """Whether all GPUs draw the same."""
        generator = torch.Generator(self.device).manual_seed(7)
        drawn = torch.randn(1, 16, 128, 128, device=self.device, generator=generator)
        mark = hashlib.sha256(drawn.cpu().numpy().tobytes()).digest()[:7]
        marks = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(marks, torch.tensor([int.from_bytes(mark, "big")]))
        self.say("the same noise everywhere", None, len({int(m) for m in marks}) == 1)

    def compare(self, name: str, plan: ResolvedPlan, run: Run, alone: Run) -> None:
        """A split's lines, on the rank that has the result: its error, and its time against one rank's."""
        found, expected = run(SHORT, nothing), alone(SHORT, nothing)
        (wall, host), (base, _) = self.step(run), self.step(alone)
        if found is not None:
            assert expected is not None
            error = error_of(found, expected)
            text = f"error {error:.1e}; {wall:.1f} ms a step (host {host:.1f}), one rank {base:.1f}"
            self.say(name, error < self.tolerance, text)
        self.needed(name, plan, run)

    def splits(self) -> None:
        """Ulysses, Ring and both against one rank."""
        model, _ = self.model(self.name)
        _, alone = self.ours(self.name, self.plan(self.name), model)
        both = [{"ring": 2, "ulysses": self.ranks // 2}] if self.ranks > 2 and self.ranks % 2 == 0 else []
        for degrees in ({"ulysses": self.ranks}, {"ring": self.ranks}, *both):
            plan = self.plan(self.name, degrees)
            rank, run = self.ours(self.name, plan, model)
            free = self.free()
            mesh = rank.mesh(plan)
            self.say(f"communicators, {plan.degrees}", None, f"{(free - self.free()) / 1e6:.0f} MB")
            self.compare(plan.degrees, plan, run, alone)
            word = self.milliseconds(lambda mesh=mesh: mesh.stage.gather(torch.zeros(1, 1, 1), [1] * self.ranks), 50)  # type: ignore[misc]
            self.say(f"the word of Cancel, {plan.degrees}", None, f"{word:.2f} ms")
            mesh.close()

    def free(self) -> int:
        """Bytes of the device."""
        return torch.cuda.mem_get_info()[0] if self.cuda else 0

    def ring(self) -> None:
        """Whether a hop of the ring hides behind attention."""
        heads, tokens = inspected(self.name)[1].shape.heads, self.tokens() // self.ranks
        mesh = build_mesh(self.plan(self.name, {"ring": self.ranks}), self.device, Meter(device=self.device))
        kv = torch.zeros(2 * tokens * heads * 128, device=self.device, dtype=TYPE)
        q = torch.randn(1, tokens, heads, 128, device=self.device, dtype=TYPE)
        attend = choose_kernel("auto", self.device, TYPE, 128, package_faults(self.device)).attend

        def hop(beside: Work = nothing) -> None:
            _, wait = mesh.ring.shift(kv, kv.numel())
            beside()
            wait()

        sent, work = self.milliseconds(hop), self.milliseconds(lambda: attend(q, q, q))
        both = self.milliseconds(lambda: hop(lambda: attend(q, q, q)))
        hidden = both < 1.15 * max(sent, work) if self.apart else None
        self.say("a hop hides behind attention", hidden, f"hop {sent:.2f} attention {work:.2f} both {both:.2f} ms")
        mesh.close()

    def sharded(self) -> None:
        """Weights of which each rank has a part."""
        if self.cuda and not self.apart:
            self.say("sharded weights", None, "are gathered by NCCL, which needs a GPU for each rank")
            return
        everyone = Communicator("weights", dist.group.WORLD, self.device, False, Meter(device=self.device))
        plan = msgspec.structs.replace(self.plan(self.name, {"ulysses": self.ranks}), weights="sharded")
        model, store = self.model(self.name, lambda module, blocks: Sharded(module, blocks, everyone))
        _, run = self.ours(self.name, plan, model, holding=store)
        whole, _ = self.model(self.name)
        self.compare(
            f"sharded weights, {plan.degrees}", plan, run, self.ours(self.name, self.plan(self.name), whole)[1]
        )

    # PipeFusion.

    def pipeline(self) -> None:
        """Stages against one rank, while kernels are loaded, and whether their hops hide behind work."""
        self.join()
        self.each(self.stages, self.hops)
        dist.destroy_process_group()

    def staged(self) -> ResolvedPlan:
        """As many stages as there can be; where a stage has several ranks, these share its tokens."""
        cut = max(stages for stages in range(1, JOBS[self.name].blocks + 1) if self.ranks % stages == 0)
        return self.plan(self.name, {"pipefusion": cut, "ulysses": self.ranks // cut}, patches=2 * cut)

    def stages(self) -> None:
        """The first run of this process, so that kernels are loaded while patches are on their way."""
        plan = self.staged()
        _, run = self.ours(self.name, plan, self.model(self.name, stage=stages(plan)[self.rank])[0])
        run(SHORT, nothing)
        self.wait()
        loading = os.environ.get("CUDA_MODULE_LOADING", "as CUDA does")
        self.say("no hang while kernels are loaded", True, f"{plan.degrees}, loaded {loading}")
        whole, _ = self.model(self.name)
        alone = self.plan(self.name, patches=plan.patches)
        self.compare(f"{plan.degrees}, {plan.patches} patches", plan, run, self.ours(self.name, alone, whole)[1])

    def hops(self) -> None:
        """A patch is received one ahead, worked on, and sent."""
        plan = self.staged()
        mesh = build_mesh(plan, self.device, Meter(device=self.device))
        place, side = mesh.pipefusion, 8192 if self.cuda else 256
        a, b = (torch.randn(side, side, device=self.device, dtype=TYPE) for _ in range(2))
        patch = torch.zeros(
            self.tokens() // plan.patches, 128 * inspected(self.name)[1].shape.heads, device=self.device
        )

        def expect() -> Work:
            return nothing if mesh.first else mesh.from_previous.expect(patch.shape, patch.dtype, place.rank - 1)

        def stream(patches: int, rows: Callable[[int], int]) -> None:
            arrive = expect()
            for number in range(patches):
                following = expect() if number + 1 < patches else nothing
                arrive()
                arrive = following
                a[: rows(number)] @ b
                if not mesh.last:
                    mesh.to_next.send(patch, place.rank + 1)
            mesh.finish_sending()
            self.wait()

        stream(40, lambda number: 64 + 97 * number)  # each size may need a kernel that is not loaded yet
        self.say("no hang while kernels for matrices are loaded", True)
        count = 64
        work = self.milliseconds(lambda: a @ b)
        dist.all_reduce(torch.zeros(1))  # they begin together
        start = time.perf_counter()
        stream(count, lambda _: side)
        each = 1e3 * (time.perf_counter() - start) / count
        hidden = each < 1.05 * work + work * place.size / count if self.apart else None
        self.say("PipeFusion hides its hops", hidden, f"{each:.2f} ms a patch with {work:.2f} ms of work")
        mesh.close()


def main() -> None:
    """Run one of the lists."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", choices=("one", "many", "pipeline"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    import_comfyui()
    with torch.no_grad():
        check = Check(options.device)
        {"one": check.one, "many": check.many, "pipeline": check.pipeline}[options.list]()


if __name__ == "__main__":
    main()
