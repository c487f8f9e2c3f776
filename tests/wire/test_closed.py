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


def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse((REPO / path).read_text()) for path in PRODUCT}


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {(node.module or "").split(".")[0], *((node.module or "").split(".")[1:2])}
    return names


def called(tree: ast.Module) -> set[str]:
    """Return the functions called by a bare name, as an attribute of one of OWNERS, or imported from one of them."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            package, _, owner = (node.module or "").rpartition(".")
            if owner in OWNERS and package != "safetensors":  # safetensors files hold only numbers
                names |= {alias.name for alias in node.names}
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name not in ("load", "save"):
                    names.add(name)
                case ast.Attribute(attr=name, value=ast.Name(id=owner)) if owner in OWNERS:
                    names.add(name)
                case ast.Attribute(attr=name, value=ast.Attribute(attr=owner)) if owner in OWNERS:
                    names.add(name)
    return names


def unpickling(tree: ast.Module) -> set[str]:
    """Return the names in a file that unpickle or evaluate."""
    return (imported(tree) & UNPICKLING_MODULES) | (called(tree) & UNPICKLING_CALLS)


def test_nothing_unpickles_or_evaluates() -> None:
    found = trees()
    assert len(found) > 400
    assert len(set().union(*map(called, found.values()))) > 1000, "it sees what is called"
    assert {path: names for path, tree in found.items() if (names := unpickling(tree))} == {}


def test_planted_unpickling_is_found() -> None:
    for text in ("import pickle", "import multiprocessing.pool", "import dill as d", "from pickle import loads"):
        assert unpickling(ast.parse(text))
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
        assert unpickling(ast.parse(text)), text
    assert not unpickling(ast.parse("json.load(f), load(f), from_file.save(x)"))
    assert not unpickling(ast.parse("from safetensors.torch import save"))


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
