"""Functions that models and autoencoders reach: ComfyUI's own are known, and any replaced one is found by name."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import timeit
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import mutation_guard

from parallel_backend.models.comfyui.content.bindings import Defined, Imported, Literal, bound, methods
from parallel_backend.models.comfyui.content.model_code import classes_of
from parallel_backend.models.comfyui.content.replaced import ReachedCode
from parallel_backend.models.comfyui.small import Builder, small_model
from parallel_backend.source_code import layers_of
from tests.support.comfy_oracle import comfy_on_path
from tests.support.selection import thorough
from tests.vae.comfy_vaes import KINDS, build

comfy_on_path()

LAYERS, MATH = (import_module(f"comfy.ldm.flux.{name}") for name in ("layers", "math"))

FOLDER = Path(LAYERS.__file__ or "").parents[3]


@functools.cache
def flux() -> ReachedCode:
    return ReachedCode(classes_of(small_model("flux", Builder(device="meta"))))


@functools.cache
def image_vae() -> ReachedCode:
    with torch.device("meta"):
        return ReachedCode(classes_of(build("sd")))


# The quick run has FLUX's classes and every autoencoder in the next tests. Each model that a ComfyUI loads is compared in the
# same way.
@thorough
def test_no_function_of_any_class_of_comfyuis_models_is_taken_for_a_replaced_one() -> None:
    looked: set[str] = set()
    for file in FOLDER.glob("comfy/ldm/**/*.py"):
        name = ".".join(file.relative_to(FOLDER).with_suffix("").parts).removesuffix(".__init__")
        with contextlib.suppress(ImportError):  # some modules need packages that ComfyUI does not require
            looked.add(import_module(name).__name__)
    classes = {
        value
        for name in looked
        for value in vars(sys.modules[name]).values()
        if isinstance(value, type) and issubclass(value, torch.nn.Module) and value.__module__ in looked
    }
    code = ReachedCode(classes)
    assert code.replaced() is None
    assert len(looked) > 150 and len(classes) > 500 and len(code.names()) > 4000


@pytest.mark.parametrize("kind", KINDS)
def test_no_function_of_comfyuis_own_autoencoders_is_taken_for_a_replaced_one(kind: str) -> None:
    code = ReachedCode(classes_of(build(kind)))
    assert code.replaced() is None
    assert len(code.names()) > 350, "as many as the simplest autoencoder reaches"


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that only calls the function, and claims to be the function itself."""

    @functools.wraps(function)
    def passes_on(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return passes_on


BY_NAME = {
    flux: (
        "comfy.ldm.flux.layers.attention",
        "comfy.ldm.flux.math.optimized_attention",
        "comfy.ldm.flux.math.rearrange",
        "comfy.ops.cast_bias_weight",
        "comfy_kitchen.apply_rope",
        "torch.nn.functional.scaled_dot_product_attention",
        "torch.cat",
        "torch.Tensor.chunk",
        "torch.nn.modules.linear.Linear.forward",
        "comfy.ldm.flux.layers.SingleStreamBlock.forward",
    ),
    image_vae: (
        "comfy.ldm.modules.diffusionmodules.model.nonlinearity",
        "torch.nn.modules.conv.Conv2d._conv_forward",
        "torch.nn.functional.group_norm",
    ),
}


def owner_of(name: str) -> tuple[Any, str]:
    """Return the module or class that contains a dotted name, and the last part of the name."""
    path, _, last = name.rpartition(".")
    module = path
    while module not in sys.modules:
        module = module.rpartition(".")[0]
    rest = path.removeprefix(module).lstrip(".")
    return operator.attrgetter(rest)(sys.modules[module]) if rest else sys.modules[module], last


@pytest.mark.parametrize(("code_of", "name"), [(code_of, name) for code_of, names in BY_NAME.items() for name in names])
def test_a_wrapper_that_only_calls_the_function_is_found_by_name(
    code_of: Callable[[], ReachedCode], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = code_of()
    assert code.replaced() is None
    owner, last = owner_of(name)
    monkeypatch.setattr(owner, last, around(getattr(owner, last)))
    found = code.replaced()
    assert found is not None
    assert (found.name, found.by) == (name, __file__)
    monkeypatch.undo()
    assert code.replaced() is None


def test_any_replaced_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test replaces one in twenty of the functions that a model reaches, with different kinds of functions."""
    code, tried = flux(), 0
    assert code.replaced() is None
    for name in sorted(code.names())[::20]:
        try:
            owner, last = owner_of(name)
        except AttributeError:  # the module has the class under another name
            continue
        value = vars(owner)[last]
        if isinstance(value, type) or not [*layers_of(value)]:
            continue
        monkeypatch.setattr(owner, last, value.__class__(around) if isinstance(value, staticmethod) else around)
        found = code.replaced()
        monkeypatch.undo()
        assert found is not None and found.by == __file__, name
        tried += 1
    assert tried > 10


def unscaled(t: Any, dim: Any, max_period: Any = 10000, time_factor: Any = 1000.0) -> Any:
    """Return the timestep itself, where ComfyUI returns its embedding."""
    return t


@pytest.mark.parametrize(
    ("owner", "attribute", "value", "name"),
    [
        pytest.param(LAYERS, "attention", MATH.apply_rope, "comfy.ldm.flux.layers.attention", id="ComfyUI's own"),
        pytest.param(
            torch.nn.functional, "gelu", torch.nn.functional.elu, "torch.nn.functional.gelu", id="torch's own"
        ),
        pytest.param(
            LAYERS.timestep_embedding,
            "__code__",
            unscaled.__code__,
            "comfy.ldm.flux.model.timestep_embedding",
            id="code",
        ),
        pytest.param(LAYERS, "range", around(range), "comfy.ldm.flux.layers.range", id="hides a builtin"),
        pytest.param(
            LAYERS.SingleStreamBlock,
            "__call__",
            around(torch.nn.Module.__call__),
            "comfy.ldm.flux.layers.SingleStreamBlock.__call__",
            id="hides an inherited method",
        ),
    ],
)
def test_a_replacement_of_any_origin_is_found_by_name(
    owner: Any, attribute: str, value: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = flux()
    assert code.replaced() is None
    monkeypatch.setattr(owner, attribute, value, raising=attribute != "range")
    found = code.replaced()
    assert found is not None and found.name == name


def test_functions_that_torch_compile_installs_count_as_torchs_own() -> None:
    """torch installs them when it first compiles in a process, for good."""
    mutation_guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__.__module__ == "torch._dynamo.mutation_guard"
    assert flux().replaced() is None
    assert image_vae().replaced() is None


ATTENTION, MANAGEMENT = (import_module(f"comfy.{name}") for name in ("ldm.modules.attention", "model_management"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            (
                (import_module("comfy.memory_management"), "aimdo_enabled", True),
                (MANAGEMENT, "LARGEST_AIMDO_CASTED_WEIGHT", (None, 1)),
            ),
            id="flags that main.py and the layers set if ComfyUI manages a GPU's memory itself",
        ),
        pytest.param(
            (
                (MATH, "attention", around(MATH.attention)),  # FLUX's blocks use that of their module, imported before
                (torch.nn.functional, "ctc_loss", around(torch.nn.functional.ctc_loss)),
                (torch.Tensor, "__repr__", around(torch.Tensor.__repr__)),
            ),
            id="functions that the model does not reach",
        ),
        *(
            pytest.param(((MATH, "optimized_attention", getattr(ATTENTION, name)),), id=name)
            for name in ("attention_basic", "attention_split", "attention_pytorch")
        ),
    ],
)
def test_changes_that_are_comfyuis_own_or_out_of_reach_are_not_compared(
    changes: Sequence[tuple[Any, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = flux()
    assert code.replaced() is None
    for owner, attribute, value in changes:
        monkeypatch.setattr(owner, attribute, value)
    assert code.replaced() is None


def test_a_second_check_takes_milliseconds() -> None:
    code = flux()
    assert code.replaced() is None
    assert min(timeit.repeat(code.replaced, number=1, repeat=20)) < 0.005


def test_names_that_a_source_binds_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bound_there.py").write_text("def far():\n    pass\nNUMBER = 3\n")
    (tmp_path / "bound_here.py").write_text(
        "import bound_there as there\n"
        "from bound_there import far as near\n"
        "if near:\n    chosen = near\nelse:\n    chosen = there.NUMBER\n"
        "class Kind:\n    def method(self): pass\n    other = method\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("bound_there", "bound_here"):
        monkeypatch.setitem(sys.modules, name, import_module(name))
    far = Defined("bound_there", str(tmp_path / "bound_there.py"), "far", False, False)
    assert bound("bound_here", "there") == (Imported("bound_there"),)
    assert bound("bound_here", "near") == (far,)
    assert bound("bound_here", "chosen") == (far, Literal("bound_there", 3))
    assert bound("bound_here", "nothing") == ()
    file = str(tmp_path / "bound_here.py")
    assert methods("bound_here", "Kind")["other"] == [Defined("bound_here", file, "Kind.method", False, False)]
