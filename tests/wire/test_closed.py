"""What keeps the channel closed: nothing unpickles or evaluates, no route takes an argument, files are the user's alone."""

from __future__ import annotations

import ast
import os
import stat
from pathlib import Path

import pytest

from parallel_backend.errors import Refused
from parallel_backend.host.workers.channel import LocalChannel
from parallel_backend.host.workers.launcher import make_folder, socket_path
from parallel_backend.wire.secret import read_secret

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
OWNERS = {"torch", "dist", "distributed", "builtins"}


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
    """Functions called by a bare name, or as an attribute of torch and torch.distributed."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Name(id=name) if name not in ("load", "save"):
                    names.add(name)
                case ast.Attribute(attr=name, value=ast.Name(id=owner)) if owner in OWNERS:
                    names.add(name)
                case ast.Attribute(attr=name, value=ast.Attribute(attr=owner)) if owner in OWNERS:
                    names.add(name)
    return names


def test_nothing_unpickles_or_evaluates() -> None:
    found = {
        path: (imported(tree) & UNPICKLING_MODULES) | (called(tree) & UNPICKLING_CALLS)
        for path, tree in trees().items()
    }
    assert not {path: names for path, names in found.items() if names}


def test_the_check_would_find_it() -> None:
    for text in ("import pickle", "import multiprocessing.pool", "import dill as d", "from pickle import loads"):
        assert imported(ast.parse(text)) & UNPICKLING_MODULES
    for text in (
        "torch.load(f)",
        "dist.broadcast_object_list(x)",
        "torch.distributed.all_gather_object(a, b)",
        "eval(text)",
    ):
        assert called(ast.parse(text)) & UNPICKLING_CALLS


def routes(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions decorated with `<something>.routes.get(...)` and the like."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function for function in functions if any("routes" in ast.unparse(each) for each in function.decorator_list)
    ]


def reads_its_request(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    (request,) = [argument.arg for argument in function.args.args]
    return any(isinstance(node, ast.Name) and node.id == request for node in ast.walk(function))


@pytest.mark.parametrize("path", PRODUCT, ids=str)
def test_no_route_takes_a_path_a_command_or_an_environment(path: Path) -> None:
    """The pack's routes look at nothing of what a browser sends."""
    tree = ast.parse((REPO / path).read_text())
    assert not [function.name for function in routes(tree) if reads_its_request(function)]


def test_the_socket_is_the_users_alone_whatever_the_umask() -> None:
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
def test_a_secret_that_others_can_read_is_none(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text("a secret of more than 16 bytes")
    path.chmod(mode)
    with pytest.raises(Refused, match="is not its owner's alone: run chmod 600 on it"):
        read_secret(path)
    path.chmod(0o600)
    assert read_secret(path) == b"a secret of more than 16 bytes"
