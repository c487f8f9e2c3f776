"""Mutation testing: faults that are planted one at a time, and the tests of the quick run that catch each.

python -m tests.mutants [NAME ...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.comfyui import REPO

SECONDS = 90
"""Seconds after which a test fails. A planted fault may make ranks wait for each other."""

NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache", ".hypothesis", "images")


@dataclass(frozen=True)
class Mutant:
    """A fault in one file.

    Attributes:
        name: says what is wrong, in words.
        file: the file, from the root of the repository.
        code: the right code, which occurs once in the file.
        fault: the code that takes its place.
        tests: the tests of the quick run that should fail: arguments for pytest.
    """

    name: str
    file: str
    code: str
    fault: str
    tests: tuple[str, ...]

    def plant(self, folder: Path) -> None:
        """Change the file in a copy of the repository."""
        path = folder / self.file
        source = path.read_text(encoding="utf-8")
        assert source.count(self.code) == 1, f"{self.file} has the code of {self.name} {source.count(self.code)} times"
        path.write_text(source.replace(self.code, self.fault), encoding="utf-8")

    def remove(self, folder: Path) -> None:
        """Restore the file in a copy of the repository."""
        shutil.copyfile(REPO / self.file, folder / self.file)


@dataclass(frozen=True)
class Verdict:
    """The result of running the tests with a mutant: the test that failed first, or an empty text, and the seconds."""

    mutant: Mutant
    caught_by: str
    seconds: float


def run(mutant: Mutant, folder: Path) -> Verdict:
    """Run a mutant's tests in a copy of the repository, until one fails.

    Raises:
        RuntimeError: the tests neither passed nor failed, for example because none was found.
    """
    begin = time.monotonic()
    mutant.plant(folder)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        f"--timeout={SECONDS}",
        *mutant.tests,
    ]
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    try:
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    finally:
        mutant.remove(folder)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return Verdict(mutant, failed[1] if failed else "", time.monotonic() - begin)


def copy_of_the_repository(folder: str) -> Path:
    """Copy the repository to a folder, without its history."""
    return Path(shutil.copytree(REPO, Path(folder) / "repository", ignore=NOT_COPIED, symlinks=True))


def main(names: Sequence[str]) -> int:
    """Print a row for each mutant, and return 1 if one survived."""
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of_the_repository(folder)
        print("| fault | file | caught by | s |\n| --- | --- | --- | --- |", flush=True)
        for mutant in MUTANTS:
            if names and mutant.name not in names:
                continue
            verdict = run(mutant, copied)
            survivors += not verdict.caught_by
            caught_by = verdict.caught_by or "**no test**"
            print(f"| {mutant.name} | {mutant.file} | {caught_by} | {verdict.seconds:.0f} |", flush=True)
    return int(survivors > 0)


LAYOUT = ("tests/test_layout.py",)
ATTENTION = ("tests/attention/test_sequence_parallel.py",)
MODELS = ("tests/models/test_sequence_parallel.py",)
SAMPLERS = ("tests/denoise/test_samplers.py",)
PRODUCTS = ("tests/engine/test_products.py",)
PROMPTS = ("tests/denoise/test_prompts.py",)
STOCK_NODES = ("tests/features/test_stock_nodes_on_flux.py",)
PARITY = ("tests/features/test_flux_parity.py",)

MUTANTS = (
    Mutant(
        "a rank's run is one item short",
        "parallel_backend/layout.py",
        "slice(start * total // ends[-1], stop * total // ends[-1])",
        "slice(start * total // ends[-1], max(0, stop * total // ends[-1] - 1))",
        LAYOUT,
    ),
    Mutant(
        "a rank has no head where there are as many as ranks",
        "parallel_backend/layout.py",
        "int(self.heads >= self.ulysses)",
        "int(self.heads > self.ulysses + 1)",
        LAYOUT,
    ),
    Mutant(
        "a rank lacks the last key head of its queries",
        "parallel_backend/layout.py",
        "-(-heads.stop // group)",
        "heads.stop // group",
        LAYOUT,
    ),
    Mutant(
        "the blocks of a merge are weighed the other way round",
        "parallel_backend/attention/online_softmax.py",
        "torch.sigmoid(lse - self._lse)",
        "torch.sigmoid(self._lse - lse)",
        ATTENTION,
    ),
    Mutant(
        "a merge keeps the larger log-sum-exp",
        "parallel_backend/attention/online_softmax.py",
        "torch.logaddexp(self._lse, lse)",
        "torch.maximum(self._lse, lse)",
        ATTENTION,
    ),
    Mutant(
        "a ring rank takes the next rank's number of keys",
        "parallel_backend/attention/sequence_parallel.py",
        "source = (ring.rank - hop) % ring.size",
        "source = (ring.rank + hop) % ring.size",
        ATTENTION,
    ),
    Mutant(
        "the prefix counts at every hop of a ring",
        "parallel_backend/attention/sequence_parallel.py",
        "hop_prefix = prefix if hop == 0 else None",
        "hop_prefix = prefix",
        (*ATTENTION, "tests/models/test_prefix.py"),
    ),
    Mutant(
        "replicated queries are merged without the log-sum-exp",
        "parallel_backend/attention/sequence_parallel.py",
        "merged.add(result[..., :-1], result[..., -1].transpose(1, 2))",
        "merged.add(result[..., :-1], torch.zeros_like(result[..., -1].transpose(1, 2)))",
        (*ATTENTION, *MODELS),
    ),
    Mutant(
        "keys and values change places on their way",
        "parallel_backend/attention/ulysses.py",
        "q, k, v = decode(received.transpose(0, 1)).split(local_counts, dim=2)",
        "q, v, k = decode(received.transpose(0, 1)).split(local_counts, dim=2)",
        ATTENTION,
    ),
    Mutant(
        "outputs of the heads come back in another order",
        "parallel_backend/attention/ulysses.py",
        "return [piece.view(local, batch, heads, channels).transpose(0, 1) for piece, heads in pieces]",
        "return [piece.view(local, batch, heads, channels).transpose(0, 1) for piece, heads in pieces][::-1]",
        ATTENTION,
    ),
    Mutant(
        "a part of a stream takes the first token of the next",
        "parallel_backend/models/sequence_parallel/placement.py",
        "(positions < stop)",
        "(positions <= stop)",
        MODELS,
    ),
    Mutant(
        "the last tokens of a patch belong to nobody",
        "parallel_backend/models/sequence_parallel/placement.py",
        "math.ceil(positions.numel() / unit)",
        "positions.numel() // unit",
        LAYOUT,
    ),
    Mutant(
        "tokens are in the order of the ranks",
        "parallel_backend/models/sequence_parallel/placement.py",
        "return torch.cat(together.ranks).argsort()",
        "return torch.arange(torch.cat(together.ranks).numel())",
        ("tests/attention/test_function_attention.py", "tests/models/test_function_override.py"),
    ),
    Mutant(
        "the branches of guidance change places",
        "parallel_backend/denoise/guidance.py",
        "negatives[0] + (positive - negatives[0]) * self._cfg",
        "positive + (negatives[0] - positive) * self._cfg",
        PRODUCTS,
    ),
    Mutant(
        "every prompt counts as much",
        "parallel_backend/denoise/guidance.py",
        "weights[branch] += strength",
        "weights[branch] += 1.0",
        STOCK_NODES,
    ),
    Mutant(
        "a rank takes its own branch for both",
        "parallel_backend/denoise/guidance.py",
        "averages = [part.view_as(x) for part in both.chunk(self._axis.size, dim=1)]",
        "averages = averages * self._axis.size",
        PRODUCTS,
    ),
    Mutant(
        "a prompt's range leaves out the step that it begins with",
        "parallel_backend/denoise/prompts.py",
        "sigma > prompt.start",
        "sigma >= prompt.start",
        PROMPTS,
    ),
    Mutant(
        "prompts share a batch in another order than ComfyUI's",
        "parallel_backend/denoise/prompts.py",
        "return [self._batch(tuple(reversed(group))) for group in groups.values()]",
        "return [self._batch(tuple(group)) for group in groups.values()]",
        PROMPTS,
    ),
    Mutant(
        "prompts with different text masks share a batch",
        "parallel_backend/denoise/prompts.py",
        "None if mask is None else tuple(self._tensors[mask].flatten().tolist())",
        "None",
        PROMPTS,
    ),
    Mutant(
        "the latent outside of a mask is denoised",
        "parallel_backend/denoise/patch_sampler.py",
        "return denoised * self.mask + self.latent * (1.0 - self.mask)",
        "return denoised",
        PARITY,
    ),
    Mutant(
        "the model sees the original without noise outside of a mask",
        "parallel_backend/denoise/patch_sampler.py",
        "self.latent if self.clean else",
        "self.latent if not self.clean else",
        PARITY,
    ),
    Mutant(
        "fresh noise repeats the initial noise",
        "parallel_backend/denoise/noise.py",
        'seed + 1 if self.device.type == "cpu" else seed',
        "seed",
        SAMPLERS,
    ),
    Mutant(
        "a Brownian path is walked the other way",
        "parallel_backend/denoise/noise.py",
        "(increment if start < end else -increment)",
        "increment",
        SAMPLERS,
    ),
    Mutant(
        "patches get noise of another patch",
        "parallel_backend/denoise/noise.py",
        "noise = torch.cat([self.patch.of(drawn[rows]).flatten() for rows in self.rows])",
        "noise = torch.cat([self.patch.of(drawn[rows].flip(-2)).flatten() for rows in self.rows])",
        ("tests/denoise/test_shared_noise.py",),
    ),
    Mutant(
        "one step more is exact than the plan says",
        "parallel_backend/denoise/pipeline.py",
        "call.step < self._warmup_steps",
        "call.step <= self._warmup_steps",
        PRODUCTS,
    ),
    Mutant(
        "patches go on with stale keys after a change of prompts",
        "parallel_backend/denoise/pipeline.py",
        " or prompts != previous",
        "",
        (*PRODUCTS, *PARITY),
    ),
    Mutant(
        "the first stage keeps the latent of the step before",
        "parallel_backend/denoise/pipeline.py",
        "self._patches[number].region.of(self._latent).copy_(x)",
        "self._patches[number].region.of(self._latent)",
        PRODUCTS,
    ),
    Mutant(
        "a timestep lacks its scale",
        "parallel_backend/denoise/process.py",
        "return sigma * self.timestep_scale",
        "return sigma",
        ("tests/features/test_every_product.py", "tests/families/test_sd3.py", "tests/families/test_auraflow.py"),
    ),
    Mutant(
        "a velocity is taken for noise",
        "parallel_backend/denoise/process.py",
        "output * (sigma / (sigma**2 + 1) ** 0.5)",
        "output * sigma",
        ("tests/engine/test_cogvideox.py",),
    ),
    Mutant(
        "a chunk of a file ends one byte late",
        "parallel_backend/weights/loading/rounds.py",
        "end = min(stop, begin + CHUNK_BYTES)",
        "end = min(stop, begin + CHUNK_BYTES) + 1",
        ("tests/weights/test_sharded.py", "tests/engine/test_loading.py"),
    ),
    Mutant(
        "a LoRA stays in the weights after its removal",
        "parallel_backend/weights/adapters/merging.py",
        "if adapters.id == self._merged.id:",
        "if adapters.id in (self._merged.id, NONE.id):",
        ("tests/models/test_adapters.py", "tests/features/test_lora_on_flux.py"),
    ),
    Mutant(
        "weights in fp8 lose their scale",
        "parallel_backend/weights/files/scaled_fp8.py",
        "    return replace(entry, scale=scale)",
        "    return entry",
        ("tests/weights/test_formats.py",),
    ),
    Mutant(
        "an autoencoder pads a picture with ones",
        "parallel_backend/vae/rows.py",
        "frames[..., :top, :] = 0",
        "frames[..., :top, :] = 1",
        ("tests/vae/test_exact.py", "tests/vae/test_comfyui.py"),
    ),
    Mutant(
        "the rows above a rank's are taken for those below",
        "parallel_backend/vae/rows.py",
        "if run.stop <= mine.start:",
        "if run.stop < mine.start:",
        ("tests/vae/test_exact.py", "tests/vae/test_comfyui.py"),
    ),
    Mutant(
        "a route reads a file by its whole path",
        "nodes/routes/body.py",
        "os.path.isabs(name) or ",
        "",
        ("tests/page/test_routes.py",),
    ),
    Mutant(
        "a class's verdict holds for its next version",
        "parallel_backend/host/proofs.py",
        "        sources,\n        code_digest(),",
        "        code_digest(),",
        ("tests/proof",),
    ),
    Mutant(
        "a derived declaration holds for the class's next version",
        "parallel_backend/derive/declaration_cache.py",
        "(settings, tuple(sources), code_digest(),",
        "(settings, code_digest(),",
        ("tests/derive/test_files.py", "tests/derive/test_again.py"),
    ),
    Mutant(
        "each rank adds a ControlNet's output for rank 0's tokens",
        "parallel_backend/models/comfyui/features/controlnet.py",
        "everyone.send(part.of(tensors[name]), rank,",
        "everyone.send(mine.of(tensors[name]), rank,",
        ("tests/features/test_controlnet_on_flux.py",),
    ),
    Mutant(
        "a step cache skips the step that its range begins with",
        "parallel_backend/denoise/step_cache.py",
        "if sigma <= self._settings.start and groups",
        "if sigma < self._settings.start and groups",
        ("tests/features/test_step_caches.py",),
    ),
    Mutant(
        "a recorded answer fits every question of its shape",
        "nodes/model/recorded_answers.py",
        "torch.equal(first, second)",
        "first.shape == second.shape",
        ("tests/test_recorded_answers.py",),
    ),
    Mutant(
        "a process without the secret is let in",
        "parallel_backend/wire/handshake.py",
        "elif not hmac.compare_digest(proof,",
        "elif not proof and hmac.compare_digest(proof,",
        ("tests/wire",),
    ),
    Mutant(
        "rows that change one another are computed apart",
        "parallel_backend/worker/requests/single_forward.py",
        " or message.couples_rows",
        "",
        PRODUCTS,
    ),
    Mutant(
        "a model's output with NaN passes for a picture",
        "parallel_backend/host/runs/finite.py",
        "    if wrong == 0:\n        return\n    raise NotFinite(\n        f\"{when}: the model's",
        "    if wrong >= 0:\n        return\n    raise NotFinite(\n        f\"{when}: the model's",
        ("tests/faults/test_numbers.py",),
    ),
)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
