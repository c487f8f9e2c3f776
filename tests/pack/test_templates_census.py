"""The census of ComfyUI's templates: its tables are complete, and its page lists these templates."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.template_graphs import LOADERS, Node, read, template_files
from benchmarks.template_models import CLASSES, OTHERS, REFUSED_NODES, SIZES, class_of, file_of
from benchmarks.templates import (
    NEWER,
    NOTED,
    OTHER,
    OUTCOMES,
    REFUSED,
    RUNS,
    STOCK,
    TEMPLATE,
    UNSHARDED,
    Row,
    by_class,
    by_nodes,
    line,
    loaded,
    newer,
    reasons,
    totals,
)
from scripts.comfyui import REPO
from tests.models.page import NEWER as NEWER_CLASS
from tests.models.page import PAGE as MODELS
from tests.models.page import ROW as CLASS
from tests.support.comfy_oracle import comfy_on_path
from tests.support.comfyuis import is_listed, tell_new
from tests.support.selection import thorough

PAGE = REPO / "docs" / "guide" / "templates.md"


@pytest.fixture(scope="module")
def graphs() -> dict[str, dict[str, Node]]:
    """Return ComfyUI's templates that load a model."""
    every = {path.stem: read(path) for path in template_files()}
    return {name: graph for name, graph in every.items() if any(node.kind in LOADERS for node in graph.values())}


def of_no_class(graph: dict[str, Node]) -> set[str]:
    """Return the files of a template that the table does not know."""
    files = {file_of(node.widgets) for node in graph.values() if node.kind in LOADERS}
    return {file for file in files if class_of(file) is None}


def test_every_file_belongs_to_a_class_of_comfyui(graphs: dict[str, dict[str, Node]]) -> None:
    comfy_on_path()
    from comfy.supported_models import models

    newer_classes = {
        kind for kind, said, _ in CLASS.findall(MODELS.read_text(encoding="utf-8")) if NEWER_CLASS.search(said)
    }
    known = {model.__name__ for model in models}
    assert {model.partition(" ")[0] for model in CLASSES.values()} | set(OTHERS) <= known | newer_classes
    tell_new("files of models in its templates", {file for graph in graphs.values() for file in of_no_class(graph)})
    told = [loaded(graph) for graph in graphs.values() if not of_no_class(graph)]
    assert {model.partition(" ")[0] for models in told for model in models.values()} <= known
    assert set(SIZES) <= set(CLASSES.values())


def test_an_unknown_file_is_reported() -> None:
    assert class_of("a new model.safetensors") is None
    with pytest.raises(ValueError, match=r"a new model\.safetensors has no row"):
        loaded({"1": Node("UNETLoader", ["a new model.safetensors", "default"])})


def test_the_nodes_before_a_sampler_are_found_through_subgraphs(graphs: dict[str, dict[str, Node]]) -> None:
    graph = graphs["image_krea2_turbo_t2i"]
    (sampler,) = (node for node in graph.values() if node.kind == "KSampler")
    before, met = [sampler.links["model"]], set()
    while before:
        node = graph[before.pop().node]
        met.add(node.kind)
        before += node.links.values()
    assert "UNETLoader" in met
    assert not any(":" in node.kind or node.kind == "Reroute" for node in graph.values())


def test_a_class_without_a_declaration_is_refused_with_the_pages_reason() -> None:
    said = reasons()
    assert by_class(["Stable_Zero123", "QwenImage"], said) == (
        REFUSED,
        f"Stable_Zero123: {said['Stable_Zero123'].removeprefix('no: ')}",
    )
    assert by_class(["QwenImage", "LotusD"], said) is None
    assert by_class(["SDXL", "SAM31"], said) == (UNSHARDED, "SDXL: unsharded")
    assert by_class(["ACEStep15"], said) == (UNSHARDED, "ACEStep15: unsharded: on one GPU")
    assert by_class(["SAM31"], said) == (OTHER, "SAM31: segmentation")


def test_a_refused_node_decides_a_template_of_an_unsharded_class(graphs: dict[str, dict[str, Node]]) -> None:
    assert by_nodes(graphs["video_causal_forcing_i2v"], (UNSHARDED, "")) == (REFUSED, REFUSED_NODES["SamplerARVideo"])
    assert by_nodes(graphs["sdxl_simple_example"], (UNSHARDED, "SDXL: unsharded")) == (UNSHARDED, "SDXL: unsharded")
    assert by_nodes(graphs["flux_schnell"], None) is None


def test_the_page_has_each_of_these_templates(graphs: dict[str, dict[str, Node]]) -> None:
    """The page's part about a newer ComfyUI has only the templates that the newer one adds."""
    listed, _, rest = PAGE.read_text(encoding="utf-8").partition(NEWER)
    rows = [*TEMPLATE.findall(listed), *TEMPLATE.findall(rest)]
    assert all(outcome in OUTCOMES for _, _, outcome, _ in rows)
    if is_listed():
        assert [name for name, *_ in TEMPLATE.findall(listed)] == sorted(graphs)
    tell_new("templates", set(graphs) - {name for name, *_ in rows})
    for name, kinds, *_ in rows:
        if name in graphs:
            assert re.findall(r"`(\w+)`", kinds) == list(
                dict.fromkeys(model.partition(" ")[0] for model in loaded(graphs[name]).values())
            )


def test_the_page_counts_its_rows_and_the_aims_are_met(graphs: dict[str, dict[str, Node]]) -> None:
    if not is_listed():
        pytest.skip("the page's first table is counted with the ComfyUI that it is of")
    page = PAGE.read_text(encoding="utf-8").partition(NEWER)[0]
    rows = [
        Row(name, (), outcome, why, split=any(node.kind == STOCK for node in graphs[name].values()))
        for name, _, outcome, why in TEMPLATE.findall(page)
    ]
    split = [row for row in rows if row.split]
    assert "\n".join(totals(split, rows)) in page
    for part in (split, rows):
        counts = Counter(row.outcome for row in part)
        running = counts[RUNS] + counts[NOTED]
        assert running >= 130
        assert running >= 0.95 * (running + counts[REFUSED])
    assert all(row.why for row in rows if row.outcome not in (RUNS, NOTED))


def test_a_newer_comfyuis_part_has_the_changed_and_new_templates() -> None:
    same, other, new = (Row(name, ("Flux",), RUNS, "", split=True) for name in ("same", "other", "new"))
    page = "\n".join([line(same), line(replace(other, outcome=NOTED)), line(replace(new, name="gone"))])
    part = newer("0.99.0", [same, other, new], page)
    assert part.startswith(f"\n{NEWER}0.99.0\n\nIts 3 templates")
    assert "; 1 of those above" in part
    assert TEMPLATE.findall(part) == [("other", "`Flux`", RUNS, ""), ("new", "`Flux`", RUNS, "")]


@thorough
def test_templates_run_until_their_request_to_the_workers() -> None:
    """The three templates are one that runs, one whose model is refused for layers of another library, and one with a note."""
    templates = "image_anima_preview", "image_flux2_klein_9b_kv_image_edit", "image_longcat_text_to_image"
    command = [sys.executable, "-m", "benchmarks.templates", *templates]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (first, kinds, outcome, why), (second, *_, refused, reason), noted = TEMPLATE.findall(done.stdout)
    assert (first, second, noted[0]) == templates
    assert (kinds, outcome, why) == ("`Anima`", RUNS, "")
    assert refused == REFUSED
    assert reason.startswith("Replacing diffusion_model.params.default_ref_method")
    assert noted[2:] == (NOTED, "one model call at a time: _apply_model of LongCatImage")
