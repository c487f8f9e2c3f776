"""The fork server: ComfyUI's settings in forked workers, early imports, and the server's start and end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parallel_backend.comfyui_folder import ARGUMENTS, FOLDER
from parallel_backend.host import Backend, Deadlines
from parallel_backend.worker import forkserver
from tests.support.selection import thorough

REPO = Path(__file__).parents[2]

SWITCHES = """
import enum, json, os, sys
from parallel_backend.models.comfyui.importing import import_comfyui
from parallel_backend.worker.forkserver import import_comfyui_early

def switches():
    import_comfyui()
    import torch
    import comfy.cli_args, comfy.model_detection, comfy.model_management, comfy.ops
    from comfy.ldm.modules import attention
    plain = (bool, int, float, str, type(None), enum.Enum, torch.dtype, torch.device)
    found = {name: repr(value) for name, value in vars(comfy.cli_args.args).items()}
    for module in (comfy.model_management, comfy.ops, attention):
        found |= {f"{module.__name__}.{name}": repr(value) for name, value in vars(module).items() if isinstance(value, plain)}
    attended = attention.optimized_attention.__name__
    return found | {"attention": attended, "early": "comfy" in before, "diffusers": "diffusers" in sys.modules}

for early in (False, True):
    if early:
        import_comfyui_early()
    before = set(sys.modules)
    if os.fork() == 0:
        print(json.dumps(switches()), flush=True)
        os._exit(0)
    os.wait()
"""


@thorough  # the test imports ComfyUI twice; the quick run compares results of forked workers with ComfyUI everywhere
def test_forked_workers_have_the_switches_of_a_separate_comfyui_process():
    given = ["--cpu", "--fp32-unet", "--use-split-cross-attention", "--fast", "fp16_accumulation"]
    environment = os.environ | {FOLDER: os.environ["COMFYUI_PATH"], ARGUMENTS: json.dumps(given)}
    ran = subprocess.run(
        [sys.executable, "-c", SWITCHES], env=environment, cwd=REPO, capture_output=True, text=True, timeout=300
    )
    alone, forked = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{"))
    assert (alone.pop("early"), forked.pop("early")) == (False, True), ran.stderr
    assert len(alone) > 100 and alone["fp32_unet"] == "True" and alone["attention"] == "attention_split"
    assert forked == alone
    assert alone["diffusers"] is False, "it takes seconds, and none of ComfyUI's own models needs it"


def test_an_early_import_that_fails_is_skipped(monkeypatch):
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    forkserver.import_once(["no.such.module", "wave"])
    assert "wave" in sys.modules


@pytest.mark.parametrize("name", [FOLDER, ARGUMENTS])
def test_workers_of_another_comfyui_do_not_reuse_the_imported_one(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "comfy", sys)
    for each in (FOLDER, ARGUMENTS):
        monkeypatch.setenv(each, "this")
    variables = dict(os.environb)
    assert not forkserver._other_comfyui(variables)
    assert forkserver._other_comfyui(variables | {name.encode(): b"other"})
    assert forkserver._other_comfyui({key: value for key, value in variables.items() if key != name.encode()})


def fork_servers():
    """Return the process ids of this process's fork servers."""
    found = set()
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "parallel_backend.worker.forkserver" in each.cmdline():
                found.add(each.pid)
    return found


def test_the_fork_server_starts_once_in_advance_and_ends_with_the_backend():
    before, backend = fork_servers(), Backend(Deadlines(leave=0))
    backend.prepare()
    (started,) = fork_servers() - before
    backend.prepare()
    assert fork_servers() - before == {started}
    backend.close()
    assert fork_servers() == before
    backend.prepare()
    assert fork_servers() == before, "a closed one starts nothing"
