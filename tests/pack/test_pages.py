"""Commands on pages that no machine here can run: the tests parse them and compare their options with the existing ones."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts import tested

DOCS = Path(__file__).parents[2] / "docs"
WORKER = (DOCS.parent / "parallel_backend/worker/process/environment.py").read_text(encoding="utf-8")
NOT_RUN = "**Not run**"
DOCKERFILE = {"FROM", "RUN", "ENV", "COPY", "WORKDIR", "EXPOSE", "CMD"}


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.+?)^```$", text(page), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["guide/wsl2.md", "guide/docker.md", "guide/kubernetes.md"])
def test_a_page_with_commands_that_were_not_run_says_so(page: str) -> None:
    assert text(page).split("\n\n")[1].startswith(NOT_RUN)


@pytest.mark.parametrize(
    "page", ["guide/docker.md", "guide/kubernetes.md", "guide/several-machines.md", "measured/README.md"]
)
def test_shell_commands_are_well_formed(page: str) -> None:
    found = blocks(page, "bash")
    assert found
    for block in found:
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def unlisted(page: str) -> set[str]:
    """Return the tests that only a GPU can run and the tested versions of ComfyUI that a page lacks."""
    tests = {path: path.read_text(encoding="utf-8") for path in (DOCS.parent / "tests").rglob("test_*.py")}
    needed = {
        f"tests/{path.relative_to(DOCS.parent / 'tests')}"
        for path, source in tests.items()
        if re.search(r"skipif\((not torch\.cuda\.is_available|torch\.cuda\.device_count)", source)
    }
    needed |= {row.comfyui.partition(",")[0] for row in tested.rows_of(text(tested.PAGE.removeprefix("docs/")))}
    assert len(needed) > 8
    return {name for name in needed if name not in page}


def test_tests_and_versions_that_never_ran_are_listed() -> None:
    page = text("measured/not-tested.md")
    assert unlisted(page) == set()
    assert unlisted(page.replace("tests/worker/test_holder.py", "").replace("0.33.0", "")) == {
        "tests/worker/test_holder.py",
        "0.33.0",
    }


def test_the_readme_has_the_ratios_of_the_page_on_bf16_and_fp8() -> None:
    rows = re.findall(r"^\| [A-Z].+?((?: \| [\d.]+e-\d+){6}) \|$", text("measured/precision.md"), re.MULTILINE)
    assert len(rows) == 5
    errors = [[float(cell) for cell in row.split(" | ")[1:5]] for row in rows]
    ratios = sorted(ours / comfyuis for row in errors for comfyuis, ours in zip(row[::2], row[1::2], strict=True))
    for page in ("../README.md", "measured/precision.md"):
        assert f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as far" in " ".join(text(page).split()), page


def test_commands_start_workers_with_existing_options() -> None:
    commands = [
        *(block for block in blocks("guide/several-machines.md", "bash") if "parallel_backend.worker" in block),
        *blocks("guide/kubernetes.md", "yaml"),
    ]
    arguments = [command.partition("-m parallel_backend.worker")[2] for command in commands]
    found = [set(re.findall(r"(?<=\s)--[\w-]+", each)) for each in arguments]
    assert len(found) == 4 and all("--listen" in each for each in found)
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', WORKER))
    assert set().union(*found) <= known


def test_the_manifest_starts_as_many_ranks_as_it_has_gpus() -> None:
    service, pods = yaml.safe_load_all(blocks("guide/kubernetes.md", "yaml")[0])
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    (command,) = container["args"]
    assert f"--nnodes {pods['spec']['replicas']} " in command
    assert f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} " in command
    assert pods["spec"]["serviceName"] == service["metadata"]["name"]
    assert f"{pods['metadata']['name']}-0.{service['metadata']['name']} " in command
    subprocess.run(["bash", "-n"], input=command, text=True, check=True)
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pods["spec"]["template"]["spec"]["volumes"]}


def test_the_dockerfile_has_instructions_and_the_run_the_flags_that_the_table_explains() -> None:
    (dockerfile,) = blocks("guide/docker.md", "dockerfile")
    lines = dockerfile.splitlines()
    assert lines[0].startswith("FROM ") and lines[-1].startswith("CMD [")
    assert {line.split()[0] for line in lines} <= DOCKERFILE
    run = shlex.split(blocks("guide/docker.md", "bash")[0].partition("docker run")[2])
    explained = set(re.findall(r"^\| `(-[\w-]+)", text("guide/docker.md"), re.MULTILINE))
    assert {each.partition("=")[0] for each in run if each.startswith("-")} - {"--rm", "-v"} == explained
