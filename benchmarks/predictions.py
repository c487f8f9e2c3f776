"""Writes docs/measured/plan-predictions.md: published times beside predictions.

    python -m benchmarks.predictions           # write the page
    python -m benchmarks.predictions --fit     # print the constants that the fitted rows give

The measurements are in published.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from parallel_backend import markdown
from parallel_backend.plan.predict.certainty import ERRORS

from .compared import OURS, Compared, compared, errors, fit, median, spread, within
from .published import FITTED, published

PAGE = Path(__file__).parents[1] / "docs" / "measured" / "plan-predictions.md"

NOTES = """\
The cost model has few constants, and each has a physical meaning:

- **Of a card** (`cards.json`): the rates of a matmul and of attention that run alone for a short time, as others measured them,
  and the memory's speed by the data sheet. The origin stands beside each. The RTX PRO 5000's rates of attention and fp8 come
  from the page that has most of its rows.
- **Fitted**: the share of such a rate that a whole model reaches, 0.77 on A100, H100 and B200, whose power limit slows long runs
  (taken for the H200 too), and 0.93 on the L40 (taken for all other cards); and the bandwidth of PCIe 4, on the L40's rows. A
  copy through host memory is taken to reach two thirds of it. NVLink's latency and a hop's idle time were fitted on two H100,
  and the overlap of transfers without NVLink on CogVideoX's Ring 2 on L40.
- **Counted**: kernels of a block and what they read and write (`tests/dry`), and the bytes of each exchange.
- **Measured**: the host time of a kernel, on the computer of one H200.

Another stack's kernels differ from ours. Its row on one GPU gives a factor, and its rows on several GPUs are predicted from that.
ComfyUI's kernels are ours, so its rows have no factor; packs and programs that run ComfyUI (dgx-monarch, buqi, INT8-Fast,
SwarmUI) count as ComfyUI.

The plan command shows a range: 80 % of ComfyUI's rows on which nothing was fitted are within it, by the kind of weights
(`parallel_backend/plan/predict/certainty.py`). Most of them took longer than predicted.
"""

TABLE_NOTES = """\
The error of seconds is empty where the row itself gives the factor of its stack. Times of whole requests count text encoder and
VAE, by an assumption for each model (`BESIDE` in `benchmarks/compared.py`). Each error above 40 % has its
reason, and what a source does not say is marked as presumed.
"""


FACTOR_NOTES = """\
A factor is the published time of a row on one GPU over ours. Far from 1 are weights that diffusers, cache-dit, SGLang and
edge-dit.cpp stream without overlap (1.6 to 15), kernels of stable-diffusion.cpp and edge-dit.cpp that multiply GGUF blocks
without expanding them (0.2 to 0.7), and CogVideoX of diffusers on the A100 (0.4), which is probably its smaller model.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join(_lines())


HEAD = (
    "job",
    "who",
    "GPUs",
    "plan (links, as the source names them)",
    "published (s)",
    "predicted",
    "error",
    "speed-up published",
    "predicted",
    "error",
    "",
)


def _lines() -> Iterator[str]:
    data = published()
    yield "# The cost model against published measurements"
    yield ""
    yield "Written by `python -m benchmarks.predictions` from `benchmarks/published.json`, which has each row's source and date."
    yield ""
    yield "## How good predictions are"
    yield ""
    heads = (
        "",
        "rows",
        "median error of seconds",
        "80 % are within",
        "rows",
        "median error of speed-ups",
        "80 % are within",
    )
    table = []
    for title, fitted in (("rows on which no constant was fitted", False), ("all other rows", True)):
        seconds, gains = errors(fitted, gains=False), errors(fitted, gains=True)
        parts = [(str(len(each)), _percent(median(each)), _percent(within(each, 0.8))) for each in (seconds, gains)]
        table.append((title, *itertools.chain(*parts)))
    yield markdown.table(heads, table)
    yield "Of the rows on which nothing was fitted, by card; seconds of another stack follow from its row on one GPU:"
    yield ""
    yield markdown.table(("card", "rows", "median error of seconds", "of speed-ups"), _by_card())
    yield NOTES
    yield "## Factors of other stacks"
    yield ""
    yield FACTOR_NOTES
    yield markdown.table(("stack", "rows on one GPU", "median factor", "least", "most"), _by_stack())
    yield "## All rows"
    yield ""
    yield TABLE_NOTES
    for card in dict.fromkeys(row.card for row in data.rows):
        yield f"### {card}" + (" (fitted)" if card in FITTED else "")
        yield ""
        yield markdown.table(HEAD, map(_cells, (entry for entry in compared() if entry.row.card == card)))
    yield "## Left out"
    yield ""
    yield markdown.table(
        ("rows", "stack", "reason", "source"),
        ((str(out.rows), out.stack, out.reason, out.source) for out in data.left_out),
    )


def _by_card() -> Iterator[Sequence[str]]:
    for card in dict.fromkeys(row.card for row in published().rows):
        found = [entry for entry in compared() if entry.row.card == card and not entry.row.fitted]
        seconds = [entry.error for entry in found if entry.error is not None]
        gains = [entry.gain_error for entry in found if entry.gain_error is not None]
        if seconds or gains:
            yield card, str(len(seconds)), *(_percent(median(each)) if each else "" for each in (seconds, gains))


def _by_stack() -> Iterator[Sequence[str]]:
    factors = defaultdict[str, list[float]](list)
    for entry in compared():
        if entry.row.gpus == 1 and entry.row.stack != OURS:
            factors[entry.row.stack].append(entry.row.seconds / entry.seconds)
    for stack, found in sorted(factors.items()):
        yield stack, str(len(found)), *(f"{value:.2f}" for value in (statistics.median(found), min(found), max(found)))


def _cells(entry: Compared) -> Sequence[str]:
    row = entry.row
    seconds = _seconds(entry.seconds), _signed(entry.error)
    gains = ("", "") if entry.gain is None else tuple(f"{gain:.2f}" for gain in entry.gain)
    return (
        row.job,
        row.stack,
        str(row.gpus),
        row.plan + f" ({row.links})" * bool(row.links),
        _seconds(row.seconds),
        *seconds,
        *gains,
        _signed(entry.gain_error),
        "; ".join(filter(None, (row.presumed, row.why))),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.0f} %"


def main() -> None:
    """Write the page, or print the fit."""
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--fit", action="store_true", help="print the fitted constants instead")
    if line.parse_args().fit:
        for name, value in fit():
            print(f"{name}: {value:.3g}")
        for kind in ERRORS:
            print(f"error that 80 % stay within, {kind}: {spread(kind):.3g}")
        return
    PAGE.write_text(page(), encoding="utf-8")
    print("\n".join(page().splitlines()[:40]))


if __name__ == "__main__":
    main()
