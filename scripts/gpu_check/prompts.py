"""Checks of prompts in a real ComfyUI on the device: the pictures of its own loader, and faults that leave nothing behind."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.comfyui_folder import FOLDER
from parallel_backend.worker.process.environment import FAULT_FILE
from tests.faults.fault_file import FaultFile

from .one import FURTHER
from .report import Report

REPO = Path(__file__).parents[2]
SPRITES = REPO / "workflows" / "sprites"
MODEL = "sprites-flux-schnell.safetensors"
LAYERS = ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear1")
"""Layers that the LoRA changes."""

TOLERANCE = 1e-5
OPTIONAL = "#non essential dependencies:"
LONG = 1000
"""Steps of a run that is cancelled or killed midway."""

DYNAMIC = "DynamicVRAM support detected and enabled"
"""Line of ComfyUI's log which says that ComfyUI loads models dynamically."""

SECONDS = 60
"""Seconds that a prompt, or the end of one, may take."""

SHORT_OF = re.compile(r"memory|GB free")
"""Pattern of a message which says that memory ran out, or that the plan needs too much."""

ROOM = 1 << 26
"""Bytes of a card that are left to a job that must run out of memory."""


WEIGHTS = {"bf16": "default", "fp8 weights": "fp8_e4m3fn"}
"""Dtypes of the loaders' weights, for graphs that compute in bf16."""

VIDEO_PROMPTS = {"positive": 7, "negative": 4}
"""Branches of a video's graph, with the token count of each text."""


def typed(graph: dict[str, Any], stored: str, computed: str) -> dict[str, Any]:
    """Return a graph whose loader stores weights in one dtype and whose model computes in another."""
    graph["model"]["inputs"]["weight_dtype"] = stored
    graph["fp32"]["inputs"]["dtype"] = computed
    return graph


def missing(requirements: str) -> list[str]:
    """Return the required packages in ComfyUI's requirements.txt that are not installed."""
    needed = re.findall(r"^[\w.-]+", requirements.partition(OPTIONAL)[0], re.MULTILINE)
    found = {(each.metadata["Name"] or "").lower().replace("_", "-") for each in metadata.distributions()}
    return [name for name in needed if name.lower().replace("_", "-") not in found]


class Prompts(Report):
    """Checks with the sprites' graph in a ComfyUI that is started for them, if its packages are installed."""

    def run(self) -> None:
        """Check pictures under each plan and after each fault, then check that nothing is left."""
        folder = Path(os.environ[FOLDER])
        if lacking := missing((folder / "requirements.txt").read_text()):
            self.say("prompts through ComfyUI", None, f"not run: {', '.join(lacking)} are not installed")
            return
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at the time limit"))  # ComfyUI then ends too
        self.each(functools.partial(self.with_comfyui, folder))

    def with_comfyui(self, folder: Path) -> None:
        """Run all prompts, and report the processes and files that remain at the end."""
        comfyui = importlib.import_module("scripts.comfyui")  # imports packages that may be missing
        shared = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory() as base:
            temporary = Path(base, "temporary")
            temporary.mkdir()
            self.fault = FaultFile(Path(base))
            environment = {"TMPDIR": str(temporary), FAULT_FILE: str(self.fault.path)}
            arguments = ("--fp32-vae",) if self.cuda else ("--cpu",)
            self.server: Any = comfyui.ComfyUI(folder, base, args=arguments, env=environment)
            self.fill()
            with self.server:
                self.new = 0
                self.own = self.latent(self.graph())
                self.say("ComfyUI loads dynamically", None, DYNAMIC in self.server.log)
                self.each(self.pictures, self.types, self.lora, self.unload, self.vae)
                self.each(self.cancel, self.kill, self.memory)
                workers = self.workers()
            gone = not any(process.is_running() and process.status() != "zombie" for process in workers)
            left = [*temporary.glob("comfyui-parallel-*"), *(set(os.listdir("/dev/shm")) - shared)]
            self.say(
                "nothing is left behind",
                gone and not left,
                f"{len(workers)} workers ended; {[str(each) for each in left]}",
            )

    def fill(self) -> None:
        """Put models, prompts, a LoRA and a latent into ComfyUI's folders."""
        from tests.support.tiny.comfyui import TINY, save_tiny
        from tests.vae.comfy_vaes import save_image_vae

        server, models = self.server, self.server.base_dir / "models"
        server.add_model("diffusion_models", [SPRITES / MODEL])
        server.add_model("vae_approx", SPRITES.glob("taef1_*.safetensors"))
        server.add_input(SPRITES.glob("*.safetensors"))
        save_image_vae(models / "vae" / "flux.safetensors")
        save_tiny(models / "diffusion_models", "wan")
        for side, tokens in VIDEO_PROMPTS.items():
            [(text, options)] = TINY["wan"].prompt(tokens, seed=tokens)
            save_file({"cond": text, **options}, server.input_dir / f"wan-{side}.safetensors")
        generator = torch.Generator().manual_seed(4)
        lora: dict[str, Tensor] = {}
        with safe_open(SPRITES / MODEL, "pt") as file:
            for layer in LAYERS:
                rows, columns = file.get_slice(f"{layer}.weight").get_shape()
                lora[f"diffusion_model.{layer}.lora_A.weight"] = torch.randn(4, columns, generator=generator) / columns
                lora[f"diffusion_model.{layer}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
        save_file(lora, models / "loras" / "random.safetensors")
        latent = {
            "latent_tensor": torch.randn(1, 16, 16, 16, generator=generator),
            "latent_format_version_0": torch.tensor([]),
        }
        save_file(latent, server.input_dir / "random.latent")

    def devices(self, ranks: int) -> str:
        """Return the devices of workers that share this machine's first device."""
        return ",".join(["0"] * ranks) if self.cuda else f"cpu:{ranks}"

    def graph(self, ranks: int = 0, **sampler: int) -> dict[str, Any]:
        """Return the sprites' graph with ComfyUI's own loader, or on `ranks` ranks.

        Each parallel graph is new to ComfyUI's cache.
        """
        name = "sprites_parallel_api" if ranks else "sprites_api"
        graph: dict[str, Any] = json.loads((REPO / "scripts" / f"{name}.json").read_text())
        graph["sampler"]["inputs"] |= sampler
        if ranks:
            self.plan(graph, ranks)
        return graph

    def plan(self, graph: dict[str, Any], ranks: int) -> None:
        """Give a graph a plan of which ComfyUI has no cached result.

        The plan has a new value of an input that has no effect without PipeFusion.
        """
        self.new += 1
        plan = {"devices": self.devices(ranks), "ulysses": 0, "ring": 0, "attention": "auto", "warmup_steps": self.new}
        graph["plan"] = {"class_type": "ParallelPlan", "inputs": plan}

    def latent(self, graph: dict[str, Any]) -> Tensor:
        """Return the latent that a graph samples."""
        run = self.server.queue(graph, timeout=SECONDS).check()
        (file,) = self.server.files(run, "save_latent")
        return load_file(file)["latent_tensor"].double()

    def error(self, graph: dict[str, Any], own: Tensor) -> float:
        """Return the relative L2 error of a graph's latent."""
        return float((self.latent(graph) - own).norm() / own.norm())

    def same(self, name: str, ranks: int = 2) -> None:
        """Check that a picture equals ComfyUI's own."""
        started = time.perf_counter()
        error = self.error(self.graph(ranks), self.own)
        text = f"error {error:.1e} in fp32 on {self.devices(ranks)}, {time.perf_counter() - started:.1f} s"
        self.say(name, error <= TOLERANCE, text)

    def pictures(self) -> None:
        """Check pictures on one worker and on two workers that share the device."""
        for ranks in (1, 2):
            self.same(f"a sprite, {ranks} workers", ranks)

    def video(self, ranks: int = 0) -> dict[str, Any]:
        """Return a graph of a small Wan, with ComfyUI's own loader or on `ranks` ranks."""
        graph = self.graph(ranks, steps=4)
        graph["model"]["inputs"]["unet_name"] = "wan.safetensors"
        if ranks:
            graph["model"]["class_type"] = "LoadParallelDiffusionModel"
        for side in VIDEO_PROMPTS:
            graph[side]["inputs"]["conditioning"] = f"wan-{side}.safetensors"
        size = {"width": 80, "height": 72, "length": 9, "batch_size": 1}
        graph["latent"] = {"class_type": "EmptyHunyuanLatentVideo", "inputs": size}
        return {name: node for name, node in graph.items() if name not in ("vae", "image", "save_image")}

    def types(self) -> None:
        """Check bf16 compute, with weights as in the file and in fp8: the error against fp32 must match ComfyUI's own."""
        for name, make in (("a sprite", self.graph), ("a Wan video", self.video)):
            for title, stored in WEIGHTS.items():
                exact = self.latent(typed(make(), stored, "fp32"))
                theirs = self.error(typed(make(), stored, "bf16"), exact)
                ours = self.error(typed(make(2), stored, "bf16"), exact)
                text = f"error {ours:.1e}, ComfyUI's {theirs:.1e}"
                self.say(f"{name}, {title}", 0 < ours <= FURTHER * theirs + TOLERANCE, text)

    def lora(self) -> None:
        """Check a LoRA that changes the picture, and the picture without it afterwards."""
        graphs = self.graph(), self.graph(2)
        for graph in graphs:
            graph["lora"] = {
                "class_type": "LoraLoaderModelOnly",
                "inputs": {"model": ["model", 0], "lora_name": "random.safetensors", "strength_model": 1.0},
            }
            graph["fp32"]["inputs"]["model"] = ["lora", 0]
        first = copy.deepcopy(graphs[0])
        first["sampler"]["inputs"]["steps"] = 1
        self.latent(first)  # loaded dynamically, weights with a LoRA are rounded after their first use
        changed = self.latent(graphs[0])
        far, error = float((changed - self.own).norm() / self.own.norm()), self.error(graphs[1], changed)
        self.say("a LoRA", error <= TOLERANCE < far, f"error {error:.1e}; it changes the latent by {far:.1e}")
        self.same("without the LoRA again")

    def vae(self) -> None:
        """Check a decode that two workers divide by rows."""
        from PIL import Image

        own: dict[str, Any] = {
            "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "flux.safetensors"}},
            "latent": {"class_type": "LoadLatent", "inputs": {"latent": "random.latent"}},
            "image": {"class_type": "VAEDecode", "inputs": {"samples": ["latent", 0], "vae": ["vae", 0]}},
            "save": {"class_type": "SaveImage", "inputs": {"images": ["image", 0], "filename_prefix": "vae"}},
        }
        ours = copy.deepcopy(own)
        ours["vae"] = {
            "class_type": "LoadParallelVAE",
            "inputs": {"vae_name": "flux.safetensors", "frame_batches": "comfyui", "plan": ["plan", 0]},
        }
        self.plan(ours, 2)
        pixels = []
        for graph in (own, ours):
            run = self.server.queue(graph, timeout=SECONDS).check()
            (file,) = self.server.files(run, "save")
            with Image.open(file) as image:
                pixels.append(torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).int())
        most = int((pixels[0] - pixels[1]).abs().max())
        self.say("a parallel VAE", most <= 1, f"largest difference {most} of 255")

    def unload(self) -> None:
        """Check that the workers follow ComfyUI's Unload, and the picture afterwards."""
        before = len(self.server.log)
        deadline = time.monotonic() + SECONDS
        while not (said := re.findall(rf"{MODEL} released; (.*)", self.server.log[before:])):
            if time.monotonic() > deadline:
                break
            self.server.free()  # repeated, because ComfyUI ignores the request while it collects garbage after a prompt
            time.sleep(1)
        self.say("Unload", bool(said), said)
        self.same("after Unload")

    def begin(self, on_step: Callable[[], object]) -> Any:
        """Return the ended run of a long graph, in whose third step `on_step` is called."""
        graph = self.graph(2, steps=LONG)
        return self.server.queue(graph, on_progress=lambda step: step.value == 3 and on_step(), timeout=SECONDS)

    def cancel(self) -> None:
        """Cancel a run midway."""
        run = self.begin(self.server.interrupt)
        self.say("Cancel", run.status == "interrupted", run.status)
        self.same("after Cancel")

    def workers(self) -> list[Any]:
        """Return the workers' processes."""
        return [process for process in self.server.children() if process.name().startswith("parallel-rank")]

    def kill(self) -> None:
        """Kill a worker midway through a run."""
        run = self.begin(lambda: self.workers()[0].kill())
        message = run.error.exception_message if run.error else ""
        self.say("kill -9", run.status == "error" and "killed" in message, message[:120])
        self.same("after kill -9")

    def memory(self) -> None:
        """Let a job run out of memory, and check that the next job has enough.

        On a card, a tensor takes the memory away. On the CPU, a worker is told to fail.
        """
        ballast: list[Tensor] = []
        if self.cuda:
            ballast.append(torch.empty(torch.cuda.mem_get_info()[0] - ROOM, dtype=torch.uint8, device="cuda"))
        else:
            self.fault.arm("rank=1,phase=sampling,kind=oom")
        graph = self.graph(2)
        graph["latent"]["inputs"] |= {"width": 2048, "height": 2048}
        run = self.server.queue(graph, timeout=SECONDS)
        ballast.clear()
        torch.cuda.empty_cache()
        message = run.error.exception_message if run.error else ""
        self.say("out of memory", run.status == "error" and SHORT_OF.search(message) is not None, message[:120])
        self.same("after out of memory")
