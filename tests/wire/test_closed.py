"""Security of the channel: no code unpickles or evaluates data, and files belong to the user alone."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from parallel_backend.errors import Refused
from parallel_backend.host.workers.channel import LocalChannel
from parallel_backend.host.workers.launcher import make_folder, socket_path
from parallel_backend.wire.handshake import read_secret

REPO = Path(__file__).parents[2]
PRODUCT = sorted(
    path.relative_to(REPO)
    for path in (REPO / "__init__.py", *(REPO / "nodes").rglob("*.py"), *(REPO / "parallel_backend").rglob("*.py"))
)
UNPICKLING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "multiprocessing",
}
UNPICKLING_CALLS = {
    *{"load", "save"},  # torch.load and torch.save
    *{"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"},
    *{"send_object_list", "recv_object_list"},
    *{"eval", "exec", "compile_command"},
}
OWNERS = {"torch", "serialization", "dist", "distributed", "builtins", "np", "numpy"}


def used(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the imported modules, and the functions called by a bare name, or as an attribute or import of OWNERS."""
    modules, calls = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules |= {alias.name.split(".")[0] for alias in names}
            case ast.ImportFrom(module=module, names=names, level=0):
                package, _, owner = (module or "").rpartition(".")
                modules |= {*(module or "").split(".")[:2]}
                if owner in OWNERS and package != "safetensors":  # safetensors files hold only numbers
                    calls |= {alias.name for alias in names}
            case ast.Call(func=ast.Name(id=name)) if name not in ("load", "save"):
                calls.add(name)
            case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner))) if (
                owner in OWNERS
            ):
                calls.add(name)
    return modules, calls


def unpickling(text: str) -> set[str]:
    """Return the names in a source text that unpickle or evaluate."""
    modules, calls = used(ast.parse(text))
    return modules & UNPICKLING_MODULES | calls & UNPICKLING_CALLS


def test_nothing_unpickles_or_evaluates() -> None:
    found = {path: used(ast.parse((REPO / path).read_text())) for path in PRODUCT}
    assert len(found) > 400
    assert len(set().union(*(calls for _, calls in found.values()))) > 1000, "it sees what is called"
    used_in = {
        path: modules & UNPICKLING_MODULES | calls & UNPICKLING_CALLS for path, (modules, calls) in found.items()
    }
    assert {path: names for path, names in used_in.items() if names} == {}


def test_planted_unpickling_is_found() -> None:
    for text in ("import pickle", "import multiprocessing.pool", "import dill as d", "from pickle import loads"):
        assert unpickling(text)
    for text in (
        "torch.load(f)",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(a, b)",
        "eval(text)",
        "from torch import load",
        "from torch.distributed import broadcast_object_list as send",
        "np.load(file, allow_pickle=True)",
        "torch.serialization.load(f)",
    ):
        assert unpickling(text), text
    assert not unpickling("json.load(f), load(f), from_file.save(x)")
    assert not unpickling("from safetensors.torch import save")


def test_only_the_user_can_open_the_socket_under_any_umask() -> None:
    before = os.umask(0)
    try:
        folder = make_folder()
        directory = folder.path
        channel = LocalChannel(socket_path(directory), 1, patience=1)
    finally:
        os.umask(before)
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket_path(directory).stat().st_mode) == 0o600
    finally:
        channel.close()
        folder.remove()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o700 | 0o001])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of more than 16 bytes")
    path.chmod(mode)
    with pytest.raises(Refused, match="other users can read it or own it: run chmod 600 on it"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"a secret of more than 16 bytes"
