"""Scripts and workflows that run the tests: the choice of ComfyUI, torch and Python, and the record of a run."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from parallel_backend.plan.gpu_report import BEGINNING, FILE, ReportLine, Versions
from scripts import tested
from tests.support.selection import thorough

REPO = Path(__file__).parents[2]
NO_NETWORK = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
    "PIP_RETRIES": "0",
}
"""Settings of pip with an index that no server answers."""


def script(name: str, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Run a script, and return its exit status and its lines."""
    ran = subprocess.run(
        ["bash", f"scripts/{name}", *arguments],
        cwd=REPO,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    return ran.returncode, ran.stdout.splitlines()


def comfyui(folder: Path) -> Path:
    """Make a folder that looks like a ComfyUI."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "requirements.txt").write_text("torch\n")
    return folder


@pytest.mark.parametrize("arguments", [(), ("no such folder",), ("tests",), ("tests", "--all")])
def test_a_folder_without_comfyui_is_refused_in_one_sentence(arguments: tuple[str, ...]) -> None:
    code, lines = script("test.sh", "--comfyui", *arguments)
    named = arguments[0] if arguments else "(no folder)"
    wanted = "which has main.py, requirements.txt and a comfy folder: give the folder of a ComfyUI."
    assert (code, lines) == (1, [f"test.sh: --comfyui {named} is not a ComfyUI folder, {wanted}"])


def test_a_part_of_a_run_is_not_recorded() -> None:
    code, lines = script("test.sh", "--record", "tests/comm")
    assert (code, lines) == (1, ["test.sh: --record is for the quick run and for --all: leave out tests/comm."])


@thorough
def test_a_run_without_a_network_names_the_environment_that_it_lacks(tmp_path: Path) -> None:
    other = comfyui(tmp_path / "ComfyUI")
    code, lines = script(
        "test.sh", "--comfyui", str(other), COMFYUI_PARALLEL_CACHE=str(tmp_path / "cache"), **NO_NETWORK
    )
    assert code == 1
    assert re.match(
        rf"test\.sh: the environment with torch==\S+ for {re.escape(str(other))} could not be installed", lines[-1]
    )


@thorough
def test_a_run_without_a_network_leaves_out_a_newer_torch_and_says_so(tmp_path: Path) -> None:
    given = {"COMFYUI_PATH": str(comfyui(tmp_path / "ComfyUI")), "COMFYUI_PARALLEL_CACHE": str(tmp_path / "cache")}
    code, lines = script("newer_torch.sh", "2.99.1", **given, **NO_NETWORK)
    assert code == 0
    assert lines[-2].startswith("newer_torch.sh: the environment with torch==2.99.1 for ")
    assert lines[-1] == "== Left out, because it could not be installed: torch 2.99.1."


@pytest.mark.parametrize("arguments", [(), ("1.2",), ("v1.2.3",), ("1.2.3", "--push")])
def test_a_release_is_refused_without_a_version(arguments: tuple[str, ...]) -> None:
    code, lines = script("release.sh", *arguments)
    assert code == 1
    assert lines == ["release.sh: write release.sh MAJOR.MINOR.PATCH, and add --tag to commit and tag."]


def test_the_range_of_pythons_is_the_same_everywhere() -> None:
    classifiers = re.findall(r"Python :: (3\.\d+)", (REPO / "pyproject.toml").read_text(encoding="utf-8"))
    assert classifiers == ["3.10", "3.11", "3.12", "3.13"]
    stated = f"{classifiers[0]} to {classifiers[-1]}"
    for file in ("README.md", "CONTRIBUTING.md", "scripts/setup.sh"):
        found = set(re.findall(r"Python,?(?: from)? (3\.\d+ to 3\.\d+)", (REPO / file).read_text(encoding="utf-8")))
        assert found == {stated}, file
    ends = [tuple(map(int, version.split("."))) for version in (classifiers[0], classifiers[-1])]
    assert f"{ends[0]} <= sys.version_info[:2] <= {ends[1]}" in (REPO / "scripts" / "setup.sh").read_text()


def workflow(name: str) -> dict[Any, Any]:
    """Return a workflow; YAML reads its `on` as True."""
    found: dict[Any, Any] = yaml.safe_load((REPO / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("name", "when", "called"),
    [
        ("quick.yml", {"push"}, "scripts/test.sh"),
        ("newest.yml", {"schedule", "workflow_dispatch"}, "scripts/newest.sh"),
    ],
)
def test_a_workflow_calls_a_script_and_nothing_else(name: str, when: set[str], called: str) -> None:
    found = workflow(name)
    assert set(found[True]) == when
    (job,) = found["jobs"].values()
    checkout, *steps = job["steps"]
    assert checkout["uses"].startswith("actions/checkout@")
    assert [step["run"] for step in steps] == [f"bash {called}"]
    assert (REPO / called).exists()


def test_the_newest_comfyui_is_checked_daily_first_by_its_sources() -> None:
    assert {path.name for path in (REPO / ".github" / "workflows").iterdir()} == {"quick.yml", "newest.yml"}
    assert workflow("newest.yml")["permissions"]["issues"] == "write"
    (when,) = workflow("newest.yml")[True]["schedule"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["cron"])
    text = (REPO / "scripts" / "newest.sh").read_text(encoding="utf-8")
    assert 0 < text.index("-m scripts.still_binds") < text.index("scripts/test.sh")
    assert (REPO / "scripts" / "still_binds.py").exists()


USUAL = tested.Row("0.30.0", "2.11.0", "3.11", "the quick run", "1 passed", "2026-11-24")
PAGE = f"before\n{tested.BEGIN}{tested.END}after\n"


def row(**changes: str) -> tested.Row:
    return dataclasses.replace(USUAL, **changes)


def test_a_run_replaces_an_older_run_with_the_same_versions() -> None:
    older, newer = row(comfyui="0.33.0", day="1"), row(comfyui="0.33.0", day="2", result="all")
    page = functools.reduce(tested.written, (older, row(torch="2.9.0"), USUAL, newer), PAGE)
    assert page.startswith("before\n") and page.endswith("after\n")
    assert tested.rows_of(page) == [row(torch="2.9.0"), USUAL, newer]
    with pytest.raises(ValueError, match="has no place for tested versions"):
        tested.written("no table", USUAL)


def test_a_row_has_the_versions_and_counts_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.41.2"\n')
    counts = {"passed": 3, "failed": 1, "error": 0, "skipped": 2}
    found = tested.row(tested.versions(tmp_path, "2026-11-24"), "the quick run", counts)
    assert (found.comfyui, found.run, found.result) == ("0.41.2", "the quick run", "3 passed, 1 failed, 2 skipped")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one", "--date", "2026-01-01"]):
        subprocess.run([*git, *command], check=True, env=os.environ | {"GIT_COMMITTER_DATE": "2026-02-03T12:00:00Z"})
    assert tested.comfyui_name(tmp_path) == "0.41.2, commit of 2026-02-03"


def test_the_table_can_be_read_and_the_readme_has_it_in_words() -> None:
    rows = tested.rows_of((REPO / tested.PAGE).read_text(encoding="utf-8"))
    assert rows
    for each in rows:
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", each.day) and re.search(r"\d+ passed", each.result)
    assert f"{tested.BEGIN}{tested.in_words(rows)}{tested.END}" in (REPO / tested.README).read_text(encoding="utf-8")


def test_the_readmes_line_leaves_out_runs_that_failed() -> None:
    failed = row(torch="2.9.0", day="2026-12-24", result="9 passed, 1 failed")
    newer, part = row(comfyui="0.33.0", day="2026-11-25"), row(torch="2.15.0", run="models, attention")
    rows = [newer, part, USUAL, failed]
    assert tested.in_words(rows) == (
        "ComfyUI 0.30.0 with torch 2.11.0, in part with torch 2.15.0; ComfyUI 0.33.0 with torch 2.11.0. "
        "The last run without a failure was on 2026-11-25.\n"
    )
    assert tested.in_words([failed]) == "No run without a failure yet.\n"


CARD = "NVIDIA H100 80GB HBM3"


def listed(checks: str, *verdicts: str, device: str = CARD, ended: bool = True, **other: str) -> list[ReportLine]:
    """Return the lines of a list of checks: its versions, its verdicts, and its end."""
    versions = Versions(**{"comfyui": "0.30.0", "torch": "2.11.0", "python": "3.12", "day": "2026-11-27"} | other)
    lines = [ReportLine(checks, 0, device, "INFO", BEGINNING, "", versions=versions)]
    lines += [ReportLine(checks, 1, device, verdict, "a check", "") for verdict in verdicts]
    return lines + [ReportLine(checks, 0, device, "INFO", "the end", "", end=True)] * ended


def written(folder: Path, lines: list[ReportLine], *rows: tested.Row) -> tuple[int, list[str]]:
    """Write a visit's row into pages with these rows; return the command's exit status, and the pages."""
    report, pages = folder / FILE, [folder / tested.PAGE, folder / tested.README]
    for page in pages:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(functools.reduce(tested.written, rows, PAGE))
    report.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    status = tested.main([str(report), "--into", str(folder)])
    return status, [page.read_text() for page in pages]


def test_a_visit_becomes_a_row_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*listed("prompts", "PASS", "PASS", "INFO", "FAIL"), *listed("one", "PASS", day="2026-11-28")]
    run = f"scripts/gpu.sh on {CARD}: prompts, one"
    expected = tested.Row("0.30.0", "2.11.0", "3.12", run, "3 passed, 1 failed", "2026-11-28")
    assert tested.row_of_report(lines) == expected
    status, (table, readme) = written(tmp_path, lines, USUAL)
    assert (status, tested.rows_of(table)) == (0, [USUAL, expected])
    assert readme == PAGE.replace(tested.END, tested.in_words([USUAL]) + tested.END)
    assert run in capsys.readouterr().out


def test_a_list_that_never_ended_is_an_error_of_the_row() -> None:
    """A list that crashes or hangs writes no more lines, and would otherwise pass unnoticed."""
    lines = [*listed("prompts", "PASS"), *listed("many", "PASS", ended=False)]
    assert tested.row_of_report(lines).result == "2 passed, 1 error"
    failed = msgspec.structs.replace(lines[0], verdict="FAIL", versions=None)
    assert tested.row_of_report([failed, *lines[1:]]).result == "2 passed, 1 failed, 1 error"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (listed("one", "PASS")[1:], "the report has no versions: make it again"),
        (
            [*listed("one"), *listed("many", torch="2.14.1")],
            "several versions (ComfyUI 0.30.0, torch 2.11.0, Python 3.12; ComfyUI 0.30.0, torch 2.14.1, Python 3.12): copy the",
        ),
        (
            [*listed("one"), *listed("one", device="NVIDIA L4")],
            f"the report has lines of several cards ({CARD}, NVIDIA L4): copy the lines",
        ),
        ([], "has no lines: copy the report again"),
    ],
)
def test_a_visit_that_makes_no_row_is_refused(
    lines: list[ReportLine], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written(tmp_path, lines) == (2, [PAGE, PAGE])
    assert sentence in capsys.readouterr().err
