"""Checks of one GPU, and of one rank's step against ComfyUI's own."""

from __future__ import annotations

import functools
import statistics
import warnings
from typing import Any

import torch
from torch import Tensor

from parallel_backend.attention.kernels import choose_kernel, is_approximate
from parallel_backend.attention.online_softmax import OnlineSoftmax
from parallel_backend.attention.packages import package_failures
from parallel_backend.comm.communicator import Communicator
from parallel_backend.comm.meter import Meter
from parallel_backend.plan.predict.profiles import CONTEXT_BYTES
from parallel_backend.weights.stores.host_copy import pin
from parallel_backend.weights.stores.streamed import Streamed
from tests.dry.dry_rank import inspected

from .bench import FLUX, FP32_TOLERANCE, LONG, REPEATS, SHORT, TOLERANCE, TYPE, Bench, Run, error_of, nothing
from .report import Work

ROOM_FOR_FLUX = 60e9
"""Free bytes of a GPU that hold FLUX.1-dev twice: the pack's and ComfyUI's own."""

SHAPES = (
    (TYPE, 128, 1031, 777, 3),
    (torch.float16, 64, 33, 515, 5),
    (TYPE, 72, 100, 2, 16),
    (TYPE, 512, 257, 300, 1),
    (torch.float32, 128, 45, 67, 2),
)
"""Shapes of attention: dtype, width of a head, queries, keys, heads."""

EAGER, COMPILED = 1.02, 0.95
"""Largest allowed time of one rank's step, relative to ComfyUI's own step."""

PROTOTYPE = "prototype feature"
"""Part of torch's warning when its check for synchronisation is turned on. This warning reports no synchronisation."""

FURTHER = 1.5
"""Largest allowed error against an fp32 result, relative to the error of ComfyUI's own result."""


class One(Bench):
    """Checks of one GPU."""

    def run(self) -> None:
        """Run the checks, the longest last."""
        self.each(self.kernels, self.speeds, self.copies, self.pins, self.needs, self.streamed, self.busy, self.context)
        self.each(self.exact, self.eager)

    def kernels(self) -> None:
        """Compare attention and its log-sum-exp with fp64, whole and merged from two halves of the keys."""
        for dtype, width, queries, keys, heads in SHAPES:
            q, k, v = (torch.randn(2, n, heads, width, device=self.device, dtype=dtype) for n in (queries, keys, keys))
            scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / width**0.5
            expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
            for choice, kernel in self.attention_kernels(dtype, width):
                out, lse = kernel.attend(q, k, v)
                merged = OnlineSoftmax(q)
                for half in (slice(0, keys // 2), slice(keys // 2, keys)):
                    merged.add(*kernel.attend(q, k[:, half], v[:, half]))
                errors = [error_of(found, expected) for found in (out, merged.result())]
                errors.append(float((lse.double() - scores.logsumexp(-1)).abs().max()))
                good = None if is_approximate(choice) else max(errors) < TOLERANCE
                self.say(f"kernel {kernel.name} {dtype} {width}", good, [f"{error:.1e}" for error in errors])

    def speeds(self) -> None:
        """Report the speed of attention at the model's shape."""
        tokens, heads = self.tokens(), inspected(self.name)[1].shape.heads
        q, k, v = (torch.randn(1, tokens, heads, 128, device=self.device, dtype=TYPE) for _ in range(3))
        tq, tk, tv = (x.transpose(1, 2) for x in (q, k, v))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        ours = choose_kernel("auto", self.device, TYPE, 128, package_failures(self.device))
        each: dict[str, Work] = {
            f"{ours.name}, the choice of auto ({ours.reason})": lambda: ours.attend(q, k, v),
            "torch's choice": lambda: torch.nn.functional.scaled_dot_product_attention(tq, tk, tv),
            "cuDNN with LSE": lambda: cudnn(tq, tk, tv, None, True),
        }
        for name, work in each.items():
            try:
                speed = 4 * tokens**2 * heads * 128 / self.milliseconds(work) / 1e9
                self.say(f"attention, {name}", None, f"{speed:.2f} TFLOP/s")
            except RuntimeError as error:
                self.say(f"attention, {name}", None, str(error)[:80])

    def copies(self) -> None:
        """Report the rate of copies from host memory to the device."""
        there = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        host_side = torch.empty(1 << 28, dtype=torch.uint8)
        sources = {"pageable": host_side} | ({"pinned": host_side.pin_memory()} if self.cuda else {})
        for name, source in sources.items():
            rate = 1e3 * there.nbytes / self.milliseconds(functools.partial(there.copy_, source))
            self.say(f"to the device, {name}", None, f"{rate / 1e9:.1f} GB/s")

    def pins(self) -> None:
        """Check that pinning memory twice fails, and that a kernel after the failure works."""
        if not self.cuda:
            self.say("memory pinned twice", None, "not run: it needs a GPU")
            return
        memory = torch.empty(1 << 30, dtype=torch.uint8)
        pin(memory)
        pinned_once = memory.is_pinned()
        pin(memory)
        total = float(torch.ones(8, device=self.device).sum())
        self.say(
            "memory pinned twice",
            total == 8,
            f"pinned once: {pinned_once}; a kernel after the second pin gives {total}",
        )

    def exact(self) -> None:
        """Check that one rank's result equals ComfyUI's own with fp32 throughout."""
        kept, self.computes_in = self.computes_in, "float32"
        model, _ = self.model(self.name)
        _, run = self.ours(self.name, self.plan(self.name), model)
        found, expected = run(SHORT, nothing), self.comfyuis(self.name, model, dtype=torch.float32)(SHORT, nothing)
        self.computes_in = kept
        assert found is not None and expected is not None
        error = error_of(found, expected)
        self.say(f"{self.name} in fp32, the result", error <= FP32_TOLERANCE, f"error {error:.1e}")

    def needs(self) -> None:
        """Compare a denoise's memory beyond the weights with the plan's estimate, also in patches that keep keys and values."""
        model, _ = self.model(self.name)
        for patches in (1, 4):
            plan = self.plan(self.name, patches=patches)
            self.needed(f"{patches} patches", plan, self.ours(self.name, plan, model)[1])

    def streamed(self) -> None:
        """Compare a window of the two largest blocks with all four blocks on the device."""
        self.windowed(self.name)

    def windowed(self, name: str) -> None:
        """Compare a window of two blocks, which are copied in and dropped, with all blocks on the device."""
        plan = self.plan(name)
        alone = Communicator("subgroup", None, torch.device("cpu"), False, Meter())
        _, all_there = self.ours(name, plan, self.model(name)[0])
        meter = Meter(device=self.device)
        model, store = self.model(name, lambda module, blocks: Streamed(module, blocks, alone, self.device, meter))
        assert isinstance(store, Streamed)
        store.fit(0)
        _, windowed = self.ours(name, plan, model, access=store)
        expected, found = all_there(SHORT, nothing), windowed(SHORT, nothing)
        assert found is not None
        assert expected is not None
        resident, streamed = map(statistics.median, self.by_turns((all_there, windowed), REPEATS))
        before = meter.sent["weights"]
        windowed(1, nothing)
        copied = meter.sent["weights"] - before
        copying = 1e3 * copied / self.host_rate()
        hidden = 1 - (streamed - resident) / copying
        text = (
            f"error {error_of(found, expected):.1e}; {streamed:.1f} ms a step, {resident:.1f} with all blocks on the device; "
            f"copying {copied / 1e6:.0f} MB takes {copying:.1f} ms, {hidden:.0%} of which overlaps with computing"
        )
        self.say(f"streamed weights, {name}", copied > 0 and torch.equal(found, expected), text)

    def host_rate(self) -> float:
        """Return the bytes/s from pinned host memory to the device."""
        there = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
        source = torch.empty_like(there, device="cpu", pin_memory=self.cuda)
        return 1e3 * there.nbytes / self.milliseconds(lambda: there.copy_(source, non_blocking=True))

    def busy(self) -> None:
        """Check that the host keeps the GPU busy, and that the loop has no synchronisation."""
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
        messages = [str(warning.message) for warning in seen]
        waits = [each[:80] for each in messages if "synchroniz" in each and PROTOTYPE not in each]
        self.say("no synchronisation in the loop", not waits if self.cuda else None, waits[:3])

    def watched(self, run: Run) -> None:
        """Make torch warn of synchronisation, from the first step to the beginning of the last."""
        begun = 0

        def on_step() -> None:
            nonlocal begun
            begun += 1
            if self.cuda:
                torch.cuda.set_sync_debug_mode("warn" if begun < LONG else "default")

        run(LONG, on_step)

    def context(self) -> None:
        """Compare the device memory beyond tensors, with all kernels loaded, with the plan's constant.

        Nothing else may use the card.
        """
        if self.cuda:
            free, total = torch.cuda.mem_get_info()
            used = total - free - torch.cuda.memory_reserved()
            text = f"{used / 1e6:.0f} MB, plans allow {CONTEXT_BYTES / 1e6:.0f} MB"
            self.say("the context", used <= CONTEXT_BYTES, text, context=float(used))

    def roomy(self) -> bool:
        """Return True if the card has room for all of FLUX.1-dev twice."""
        return self.cuda and torch.cuda.mem_get_info()[0] > ROOM_FOR_FLUX

    def eager(self) -> None:
        """Compare one rank's step with ComfyUI's own, of the whole model if the card has room for both."""
        self.beside_comfyui(FLUX if self.roomy() else self.name, "", EAGER)

    def beside_comfyui(self, name: str, compiler: str, aim: float) -> None:
        """Compare the results with fp32 if the model is small, and time a step of the pack's and of ComfyUI's own."""
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
            eager = self.comfyuis(name, model)(SHORT, nothing) if compiler else other
            assert exact is not None
            assert eager is not None
            ours, theirs, uncompiled = (error_of(each, exact) for each in (found, other, eager))
            text = f"error in {self.computes_in} {ours:.1e}, ComfyUI's {theirs:.1e}, ComfyUI's eager {uncompiled:.1e}"
            # ComfyUI compiles the whole model and rounds less often. Outside of blocks, our result rounds as ComfyUI's eager
            # model does.
            self.say(f"{how}, the result", ours <= FURTHER * max(theirs, uncompiled) + FP32_TOLERANCE, text)
        else:
            self.say(f"{how}, the result", None, f"relative difference from ComfyUI's own {error_of(found, other):.1e}")
        if compiler:
            self.say(f"{how}, all blocks", not rank.uncompiled, rank.uncompiled)
        times = self.by_turns((run, own))
        step, own_step = map(statistics.median, times)
        each = [
            f"{statistics.median(found):.1f} ms ({min(found):.1f} to {max(found):.1f}, host {self.host_step(denoise):.1f})"
            for found, denoise in zip(times, (run, own), strict=True)
        ]
        text = f"ratio {step / own_step:.3f}, at most {aim} allowed: ours {each[0]}, ComfyUI's {each[1]}"
        self.say(f"{how}, a step against ComfyUI's", step <= aim * own_step if self.cuda else None, text)
        comfy.model_management.unload_all_models()

    def comfyuis(self, name: str, model: Any, compiler: str = "", **options: torch.dtype) -> Run:
        """Return ComfyUI's own denoise with the same weights: its loader with options, its sampler, and its compile node."""
        import comfy.sample
        import comfy.samplers
        import comfy.sd
        from comfy_extras.nodes_torch_compile import TorchCompileModel

        patcher = comfy.sd.load_diffusion_model_state_dict(dict(model.module.state_dict()), model_options=options)
        if compiler:
            patcher = TorchCompileModel.execute(patcher, compiler).result[0]
        tensors = self.tensors(name, 1)
        text, pooled, guidance = (tensors[f"prompt.0.{key}"] for key in ("context", "y", "guidance"))
        prompt = [[text, {"pooled_output": pooled, "guidance": float(guidance)}]]
        noise, sampler = tensors["x"].cpu(), comfy.samplers.sampler_object("euler")

        def run(steps: int, on_step: Work) -> Tensor:
            found = comfy.sample.sample_custom(
                patcher, noise, 1.0, sampler, torch.linspace(1, 0, steps + 1), prompt, prompt, torch.zeros_like(noise),
                callback=lambda *_: on_step(), disable_pbar=True, seed=1,
            )  # fmt: skip
            return patcher.model.process_latent_in(found)  # type: ignore[no-any-return]

        return run


class Compiled(One):
    """Checks of one GPU with TorchCompileModel on both sides."""

    def run(self) -> None:
        """Compare few blocks, then the whole model, which may take a compiler longer than the visit."""
        self.each(self.compiled, self.whole)

    def compiled(self) -> None:
        """Compare one rank's step of few blocks with ComfyUI's own."""
        self.beside_comfyui(self.name, self.compiler, COMPILED)

    def whole(self) -> None:
        """Compare one rank's step of all of FLUX.1-dev with ComfyUI's own, if the card has room for both."""
        if self.roomy():
            self.beside_comfyui(FLUX, self.compiler, COMPILED)
        else:
            self.say(f"{FLUX}, compiled by {self.compiler}", None, "not run: it needs a card with 60 GB free")


class Whole(One):
    """Checks of all of FLUX.1-dev in host memory."""

    def run(self) -> None:
        """Compare a window of two blocks with all blocks on the device, if the card has room for them."""
        if self.roomy():
            self.each(functools.partial(self.windowed, FLUX))
        else:
            self.say(f"streamed weights, {FLUX}", None, "not run: it needs a card with 60 GB free")
