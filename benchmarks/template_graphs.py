"""Reads ComfyUI's workflow templates as graphs without subgraphs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOADERS = ("UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")
"""ComfyUI's loaders of diffusion models in its templates."""

MUTED, BYPASSED = 2, 4
"""Values of a node's `mode`, besides being on."""

ENTRANCE, EXIT = -10, -20
"""Ids of a subgraph's own inputs and outputs, where its links begin and end."""


@dataclass(frozen=True)
class Output:
    """One output of a node."""

    node: str
    index: int


@dataclass
class Node:
    """A node of a flat graph.

    Attributes:
        kind: the node's class.
        widgets: the values of its widgets.
        links: its linked inputs, by name.
        types: the types of its outputs.
        slots: name and type of its inputs, in order.
        named: names of the inputs that are widgets.
    """

    kind: str
    widgets: Any
    links: dict[str, Output] = field(default_factory=dict)
    types: tuple[str, ...] = ()
    slots: tuple[tuple[str, str], ...] = ()
    named: tuple[str, ...] = ()


def template_files() -> list[Path]:
    """Return the workflow files in ComfyUI's installed templates, without their index files."""
    spec = find_spec("comfyui_workflow_templates_json")
    assert spec is not None and spec.origin is not None, "ComfyUI's templates are not installed"
    folder = Path(spec.origin).parent / "templates"
    return [path for path in sorted(folder.glob("*.json")) if "nodes" in json.loads(path.read_text(encoding="utf-8"))]


def read(path: Path) -> dict[str, Node]:
    """Return the nodes that are on, by their path of ids. Links skip bypassed nodes."""
    page = json.loads(path.read_text(encoding="utf-8"))
    return _Flat(page).nodes


class _Flat:
    """A graph whose subgraphs are replaced by their nodes."""

    def __init__(self, page: Mapping[str, Any]) -> None:
        self._graphs = {graph["id"]: graph for graph in page.get("definitions", {}).get("subgraphs", ())}
        self._all: dict[str, tuple[str, Mapping[str, Any]]] = {}
        self._links: dict[str, dict[int, tuple[int, int, int, int]]] = {}
        self._inside: dict[str, Mapping[str, Any]] = {}
        self.nodes: dict[str, Node] = {}
        self._off: set[str] = set()
        self._collect("", page, off=False)
        for name, (scope, each) in self._all.items():
            if name not in self._off and not self._passes(each):
                self.nodes[name] = self._node(scope, each)

    def _collect(self, scope: str, graph: Mapping[str, Any], off: bool) -> None:
        self._links[scope] = dict(_links(graph))
        for each in graph["nodes"]:
            name = f"{scope}{each['id']}"
            muted = off or each.get("mode", 0) == MUTED
            if each["type"] in self._graphs and each.get("mode", 0) != BYPASSED:
                self._inside[name] = each
                self._collect(f"{name}:", self._graphs[each["type"]], muted)
            else:
                self._all[name] = scope, each
                if muted:
                    self._off.add(name)

    def _passes(self, each: Mapping[str, Any]) -> bool:
        return each.get("mode", 0) == BYPASSED or each["type"] == "Reroute"

    def _node(self, scope: str, each: Mapping[str, Any]) -> Node:
        node = Node(
            each["type"],
            each.get("widgets_values") or [],
            types=tuple(str(slot["type"]) for slot in each.get("outputs") or ()),
            slots=tuple((slot["name"], str(slot["type"])) for slot in each.get("inputs") or ()),
            named=tuple(slot["name"] for slot in each.get("inputs") or () if "widget" in slot),
        )
        for slot in each.get("inputs") or ():
            source = self._source(scope, slot.get("link"))
            if source is not None:
                node.links[slot["name"]] = source
        return node

    def _source(self, scope: str, link: int | None) -> Output | None:
        """Return the output that a link comes from, through subgraphs and bypassed nodes; None if there is none."""
        if link is None or link not in self._links[scope]:
            return None
        origin, index, _, _ = self._links[scope][link]
        if origin == ENTRANCE:
            outer = scope.removesuffix(":")
            instance = self._inside[outer]
            name = self._graphs[instance["type"]]["inputs"][index]["name"]
            given = next((slot for slot in instance.get("inputs") or () if slot["name"] == name), None)
            return self._source(_scope_of(outer), given.get("link")) if given else None
        name = f"{scope}{origin}"
        if name in self._inside:
            inner = f"{name}:"
            ends = [number for number, (_, _, end, slot) in self._links[inner].items() if (end, slot) == (EXIT, index)]
            return self._source(inner, ends[0]) if ends else None
        if name not in self._all or name in self._off:
            return None
        _, each = self._all[name]
        if not self._passes(each):
            return Output(name, index)
        wanted = each["outputs"][index]["type"]
        slots = each.get("inputs") or ()
        alike = [slot for slot in slots if slot["type"] == wanted or each["type"] == "Reroute"]
        return self._source(scope, alike[0].get("link")) if alike else None


def _links(graph: Mapping[str, Any]) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    for link in graph["links"]:
        if isinstance(link, dict):
            yield link["id"], (link["origin_id"], link["origin_slot"], link["target_id"], link["target_slot"])
        else:
            yield link[0], (link[1], link[2], link[3], link[4])


def _scope_of(name: str) -> str:
    """Return the scope of a node's path: the path of its subgraph."""
    outer, colon, _ = name.rpartition(":")
    return outer + colon
