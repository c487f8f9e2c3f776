"""Counts ComfyUI's own workflow templates that run with the loader swapped, and the reasons why others do not.

    COMFYUI_PATH=... python -m benchmarks.templates > docs/guide/templates.md
    COMFYUI_PATH=... python -m benchmarks.templates --newer >> docs/guide/templates.md    # with a newer ComfyUI: differences

A template counts by the models that it loads; `template_models` has the class of each file. Each template then runs up to the
workers (`template_runs`). The census takes some minutes on two cores; it needs no GPU, no network and none of the files.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.template_graphs import LOADERS, Node, read, template_files
from benchmarks.template_models import OTHERS, REFUSED_NODES, SIZES, class_of, file_of
from parallel_backend.models.declared import DECLARATIONS
from scripts.comfyui import REPO
from scripts.tested import comfyui_name

if TYPE_CHECKING:
    from benchmarks.template_runs import Verdict  # imports ComfyUI

STOCK = "UNETLoader"
"""Load Diffusion Model. The aim is counted in templates with this node."""

ROW = re.compile(r"^\| `(\w+)` \| .+ \| (.+) \|$", re.MULTILINE)
TEMPLATE = re.compile(r"^\| (\S+) \| (`.+`) \| (.+) \| (.*) \|$", re.MULTILINE)
NEWER = "## With ComfyUI "
"""Beginning of the page's part about a newer ComfyUI."""

RUNS, NOTED, REFUSED, OTHER = "runs", "runs, with a note", "refused", "not a picture or video transformer"
UNSHARDED = "runs unsharded, by its class"
OUTCOMES = (RUNS, NOTED, UNSHARDED, REFUSED, OTHER)


@dataclass(frozen=True)
class Row:
    """The result of one template.

    `split` is true if the template has Load Diffusion Model. `assumed` are nodes that could not run and passed on their inputs.
    """

    name: str
    models: tuple[str, ...]
    outcome: str
    why: str
    split: bool
    assumed: tuple[str, ...] = ()


def reasons() -> dict[str, str]:
    """Return the text of docs/guide/models.md about each class."""
    return dict(ROW.findall((REPO / "docs" / "guide" / "models.md").read_text(encoding="utf-8")))


def loaded(graph: Mapping[str, Node]) -> dict[str, str]:
    """Return the models that a template loads, by their loaders.

    Raises:
        ValueError: the table does not have a file.
    """
    found = {}
    for name, node in graph.items():
        if node.kind in LOADERS:
            model = class_of(file_of(node.widgets))
            if model is None:
                raise ValueError(f"{file_of(node.widgets)} has no row in template_models.CLASSES: add one")
            found[name] = model
    return found


def by_class(models: Iterable[str], said: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the outcome and its reason if the models' classes alone decide it, else None."""
    kinds = dict.fromkeys(model.partition(" ")[0] for model in models)
    unsharded = [kind for kind in kinds if said[kind].startswith("unsharded")]
    others = [kind for kind in kinds if kind in OTHERS and kind not in unsharded]
    lacking = [kind for kind in kinds if kind not in (*others, *unsharded) and kind not in DECLARATIONS]
    if lacking:
        return REFUSED, "; ".join(f"{kind}: {said[kind].removeprefix('no: ')}" for kind in lacking)
    if len(others) == len(kinds):
        return OTHER, "; ".join(f"{kind}: {OTHERS[kind]}" for kind in others)
    if len(others) + len(unsharded) == len(kinds):
        return UNSHARDED, "; ".join(f"{kind}: {brief(said[kind])}" for kind in unsharded)
    return None


def brief(said: str) -> str:
    """Return the first clause of the models page's text about a class."""
    return re.split("[,;]", said, maxsplit=1)[0]


def by_nodes(graph: Mapping[str, Node], settled: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the outcome, changed to a refusal if the classes alone decided it and the template has a refused node."""
    refused = dict.fromkeys(REFUSED_NODES[node.kind] for node in graph.values() if node.kind in REFUSED_NODES)
    return (REFUSED, "; ".join(refused)) if refused and settled is not None and settled[0] == UNSHARDED else settled


def census(comfyui: Path, files: Sequence[Path]) -> list[Row]:
    """Go over the templates. Run those whose outcome their classes do not decide."""
    from benchmarks.template_runs import Host, Trial

    said = reasons()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        host = Host(comfyui, Path(folder))
        for number, path in enumerate(files):
            graph = read(path)
            models = loaded(graph)
            if not models:
                continue
            print(f"{number + 1} of {len(files)}: {path.stem}", file=sys.stderr)
            settled = by_nodes(graph, by_class(models.values(), said))
            assumed: tuple[str, ...] = ()
            if settled is None:
                ours = {name: model if model in SIZES else None for name, model in models.items()}
                verdict = Trial(host, graph, ours).run()
                settled, assumed = found(verdict), tuple(sorted(set(verdict.assumed)))
            split = any(node.kind == STOCK for node in graph.values())
            kinds = tuple(dict.fromkeys(model.partition(" ")[0] for model in models.values()))
            rows.append(Row(path.stem, kinds, *settled, split, assumed))
    return rows


NOT_TRIED = "by its class's declaration; not executed, because `template_models.SIZES` has no header for it"


def found(verdict: Verdict) -> tuple[str, str]:
    """Return the outcome of a run and its reason."""
    if verdict.refused or verdict.untried:
        untried = [f"not executed, so it counts as refused ({reason})" for reason in verdict.untried]
        return REFUSED, "; ".join(dict.fromkeys([*verdict.refused, *untried]))
    if verdict.slower:
        return NOTED, f"one model call at a time: {'; '.join(dict.fromkeys(verdict.slower))}"
    return RUNS, "" if verdict.loops else NOT_TRIED


def page(rows: Sequence[Row]) -> str:
    """Return the census as a page of the documentation."""
    split = [row for row in rows if row.split]
    passed = sorted({kind for row in rows for kind in row.assumed})
    also = f"These nodes need a file, so their inputs served as their outputs: {', '.join(passed)}.\n" if passed else ""
    lines = [HEAD, *totals(split, rows), "", BODY, also, "| template | classes | outcome | why |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(line, rows)])


def line(row: Row) -> str:
    """Return a template's line in a table."""
    kinds = ", ".join(f"`{kind}`" for kind in row.models)
    return f"| {row.name} | {kinds} | {row.outcome} | {row.why.replace('|', '/')} |"


def newer(version: str, rows: Sequence[Row], text: str) -> str:
    """Return the part of the page about a newer ComfyUI: the lines that differ from the page."""
    listed = {found[1]: found[0] for found in TEMPLATE.finditer(text)}
    lines = [line(row) for row in rows if line(row) != listed.get(row.name)]
    gone = len(set(listed) - {row.name for row in rows})
    head = f"""
{NEWER}{version}

Its {len(rows)} templates have the outcomes above, except for these, which are new or differ; {gone} of those above no longer
exist. The files of a class have the sizes of its models above: LTX-2.5's files have the sizes of LTX-2.

| template | classes | outcome | why |
|---|---|---|---|"""
    return "\n".join([head, *lines])


def totals(split: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """Return the table of outcomes, for templates with Load Diffusion Model and for all."""
    lines = ["| | with Load Diffusion Model | all |", "|---|---|---|"]
    counts = [Counter(row.outcome for row in part) for part in (split, rows)]
    lines += [f"| {outcome} | {' | '.join(str(count[outcome]) for count in counts)} |" for outcome in OUTCOMES]
    lines.append(f"| **templates** | {len(split)} | {len(rows)} |")
    shares = []
    for count in counts:
        running = count[RUNS] + count[NOTED] + count[UNSHARDED]
        of = running + count[REFUSED]
        shares.append(f"{running} of {of}, {100 * running / of:.1f} %" if of else "none")
    lines.append(f"| **of all but detection, segmentation and upscaling, run** | {' | '.join(shares)} |")
    return lines


HEAD = """# ComfyUI's templates with the loader swapped

The workflow templates of ComfyUI 0.30 that load a diffusion model, each with Load Parallel Diffusion Model in place
of Load Diffusion Model, and of Load Checkpoint for the MODEL (made by `python -m benchmarks.templates`).
"""

BODY = """**No template was run with its real files.** The command executes ComfyUI's own nodes, from the loader to the sampler,
with files that have a real header and no weights. Text encoders, VAEs, vision models, ControlNets and LoRAs give
zeros of the right shapes. The class of a file is taken from its name. The workers' forward does not run: the tests
compare it with ComfyUI's for every class. Loaders of other models in a template (UNets, depth, segmentation) are not
swapped.

- A template whose models [run unsharded](models.md) counts by its class and the names of its nodes, without being
  executed.
- One more template is not counted, because its Load Diffusion Model is bypassed.
- ComfyUI 0.37 has five more for Qwen-Image 2.1, which nobody has executed here. What they need of the model runs; one
  with a Fun control is refused by name.
- video_ltx2_3_ic_lora and template_ltx2_3_ic_lora_ingredients load an IC-LoRA. They are refused if its file has a
  reference_downscale_factor above 1.
"""


def main() -> None:
    """Print the page, of all templates or of those that are named."""
    comfyui, names = Path(os.environ["COMFYUI_PATH"]), sys.argv[1:]
    if names == ["--newer"]:
        text = (REPO / "docs" / "guide" / "templates.md").read_text(encoding="utf-8").partition(NEWER)[0]
        print(newer(comfyui_name(comfyui), census(comfyui, template_files()), text))
        return
    print(page(census(comfyui, [path for path in template_files() if not names or path.stem in names])))


if __name__ == "__main__":
    main()
