"""Counts one step's demands on a GPU at full size, without a GPU: kernels, collectives, bytes, memory, waits.

    python -m benchmarks.dry_run [--json] [--only TEXT] [--but CASE] [--short] [--own] [--beside]

The worker's own code runs on CUDA tensors without data (tests/dry); no processes run the other ranks. COMFYUI_PATH names
ComfyUI's folder. --short runs two blocks of each kind, and three latent frames of a clip, instead of all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from parallel_backend.comfyui_folder import ARGUMENTS, FOLDER
from parallel_backend.models.comfyui.importing import import_comfyui
from tests.dry.dry_decode import dry_decode
from tests.dry.dry_rank import Result, dry_run, own_kernels

FLUX, FLUX2, WAN, QWEN = "FLUX.1-dev", "FLUX.2-dev", "Wan 2.2 14B", "Qwen-Image"
Z_IMAGE, HUNYUAN, MINIMAX, COGVIDEOX = "Z-Image", "HunyuanVideo 1.5", "MiniMax-H3", "CogVideoX 1.5"
LTX = "LTX-2"

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{model}, {plan}": (model, degrees)
    for model, plan, degrees in (
        (FLUX, "one rank", {}),
        (FLUX, "ulysses 2", {"ulysses": 2}),
        (FLUX, "ulysses 2, streamed weights", {"ulysses": 2, "weights": "streamed"}),
        (FLUX, "ulysses 2, sharded weights", {"ulysses": 2, "weights": "sharded"}),
        (FLUX, "ulysses 4", {"ulysses": 4}),
        (FLUX, "ulysses 4, heads in 3 chunks", {"ulysses": 4, "head_chunks": 3}),
        (FLUX, "ulysses 4, exchange fp8", {"ulysses": 4, "exchange": "fp8"}),
        (FLUX, "ring 4", {"ring": 4}),
        (FLUX, "ring 2 x ulysses 4", {"ring": 2, "ulysses": 4}),
        (FLUX, "pipefusion 4, first stage", {"pipefusion": 4}),
        (FLUX, "pipefusion 4, second stage", {"pipefusion": 4, "rank": 1}),
        (FLUX, "pipefusion 4, last stage", {"pipefusion": 4, "rank": 3}),
        (FLUX2, "one rank", {}),
        (FLUX2, "ulysses 2", {"ulysses": 2}),
        (FLUX2, "ulysses 4", {"ulysses": 4}),
        (FLUX2, "ulysses 8", {"ulysses": 8}),
        (WAN, "one rank", {}),
        (WAN, "ulysses 2", {"ulysses": 2}),
        (WAN, "ulysses 2, heads in 4 chunks", {"ulysses": 2, "head_chunks": 4}),
        (WAN, "ring 2 x ulysses 2", {"ring": 2, "ulysses": 2}),
        (WAN, "cfg 2 x ulysses 4", {"cfg": 2, "ulysses": 4}),
        (WAN, "pipefusion 2, first stage", {"pipefusion": 2}),
        (WAN, "pipefusion 2, last stage", {"pipefusion": 2, "rank": 1}),
        (QWEN, "one rank", {}),
        (QWEN, "ulysses 2", {"ulysses": 2}),
        (QWEN, "ulysses 4", {"ulysses": 4}),
        (QWEN, "ulysses 8", {"ulysses": 8}),
        (Z_IMAGE, "one rank", {}),
        (Z_IMAGE, "ring 2 x ulysses 2", {"ring": 2, "ulysses": 2}),
        (HUNYUAN, "one rank", {}),
        (HUNYUAN, "ulysses 8", {"ulysses": 8}),
        (MINIMAX, "one rank", {}),
        (MINIMAX, "ulysses 2", {"ulysses": 2}),
        (MINIMAX, "ulysses 4", {"ulysses": 4}),
        (MINIMAX, "ulysses 8", {"ulysses": 8}),
        (COGVIDEOX, "one rank", {}),
        (COGVIDEOX, "ulysses 2", {"ulysses": 2}),
        (COGVIDEOX, "ring 2 x ulysses 2", {"ring": 2, "ulysses": 2}),
        (COGVIDEOX, "cfg 2 x ring 2 x ulysses 2", {"cfg": 2, "ring": 2, "ulysses": 2}),
    )
}

IN_BLOCKS: Mapping[str, Mapping[str, Any]] = {
    f"{FLUX} in Q4_K, {'with' if room else 'no'} room, {plan}": {"stored": "Q4_K", "room": room, **degrees}
    for plan, degrees in (("one rank", {}), ("pipefusion 4, first stage", {"pipefusion": 4}))
    for room in (0, 1 << 40)
}
"""Cases of FLUX.1-dev with its blocks' matrices in a type of GGUF's, expanded by eager operations.

With room, the matrices stay expanded.
"""

DECODES: Mapping[str, tuple[str, int]] = {
    f"{autoencoder}, {'one rank' if ranks == 1 else f'{ranks} ranks'}": (autoencoder, ranks)
    for autoencoder, ranks in (
        ("FLUX.1's VAE", 1),
        ("FLUX.1's VAE", 4),
        ("FLUX.2's VAE", 1),
        ("FLUX.2's VAE", 4),
        ("Wan 2.1's VAE", 1),
        ("Wan 2.1's VAE", 4),
    )
}


def results(only: str, but: Sequence[str], whole: bool) -> Iterator[tuple[str, Result]]:
    """Yield the result of each case whose name contains `only`, except the cases in `but`."""
    for case, (model, degrees) in CASES.items():
        if only in case and case not in but:
            yield case, dry_run(model, whole=whole, **degrees)
    for case, settings in IN_BLOCKS.items():
        if only in case and case not in but:
            yield case, dry_run(FLUX, whole=whole, **settings)
    for case, (autoencoder, ranks) in DECODES.items():
        if only in case and case not in but:
            yield case, dry_decode(autoencoder, ranks=ranks, whole=whole)


def beside(model: str) -> dict[str, dict[str, int]]:
    """Return kernels by name: those that a rank's step has more of than ComfyUI's own forward, and those it has less of.

    The step includes sampler and preview.
    """
    own, ours = own_kernels(model), Counter(dry_run(model).names)
    return {"more": dict(ours - own), "less": dict(own - ours)}


def main() -> None:
    """Print a table, or lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each case")
    parser.add_argument("--only", default="", help="only cases whose name contains TEXT", metavar="TEXT")
    parser.add_argument(
        "--but", default=[], action="append", help="leave out this case (may be repeated)", metavar="CASE"
    )
    parser.add_argument(
        "--short", action="store_true", help="run only two blocks of each kind, and three latent frames"
    )
    parser.add_argument("--own", action="store_true", help="count the kernels of ComfyUI's own forwards instead")
    parser.add_argument(
        "--beside", action="store_true", help="compare the kernels of one rank with those of ComfyUI's own forward"
    )
    options = parser.parse_args()
    os.environ[FOLDER] = os.environ["COMFYUI_PATH"]
    os.environ[ARGUMENTS] = json.dumps(["--cpu", "--use-pytorch-cross-attention"])
    import_comfyui()
    if options.own:
        for model in sorted({model for model, _ in CASES.values() if options.only in model and model != COGVIDEOX}):
            print(json.dumps({"case": model, "kernels": own_kernels(model).total()}), flush=True)
        return
    if options.beside:
        for model in (FLUX, FLUX2, WAN, QWEN, MINIMAX, LTX):
            if options.only in model:
                print(json.dumps({"case": model, **beside(model)}), flush=True)
        return
    if not options.json:
        print(
            "| A step of | Kernels | Kernels a block | Collectives | Sent, MB | Peak, MB | By the formula, MB | Waits |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for case, found in results(options.only, options.but, not options.short):
        if options.json:
            print(json.dumps({"case": case, **asdict(found)}))
        else:
            blocks = ", ".join(str(kernels) for kernels in found.blocks.values())
            sizes = f"{found.sent / 1e6:.0f} | {found.peak / 1e6:.0f} | {found.formula / 1e6:.0f}"
            print(f"| {case} | {found.kernels} | {blocks} | {found.collectives} | {sizes} | {len(found.waits)} |")
        for wait in found.waits:
            print(f"{case} waits: {wait}", file=sys.stderr)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
