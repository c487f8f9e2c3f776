"""`python -m parallel_backend.plan`, the command that buyers read."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from _pytest.mark import ParameterSet

from parallel_backend.plan.__main__ import COUNTS, main, memory, parser, request_of, size
from parallel_backend.plan.offers import WEIGHT_BYTES, by_count
from parallel_backend.plan.predict.known_machines import profile_names
from parallel_backend.plan.predict.known_models import model_names
from tests.support.selection import thorough

ROOT = Path(__file__).parents[2]

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def rows(text: str) -> dict[int, list[str]]:
    """Return the first table: the cells after each number of GPUs."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        number, *cells = line.split() or [""]
        if number.isdecimal():
            found.setdefault(int(number), cells)
    return found


def table(*arguments: str) -> dict[int, list[str]]:
    """Return the first table alone, which takes an eighth of the command's time."""
    request, _, _ = request_of(parser().parse_args(arguments))
    return rows(by_count(request, COUNTS))


def some(names: Sequence[str]) -> list[ParameterSet]:
    """Return all names as parameters, of which the quick run has every fourth."""
    return [pytest.param(name, marks=[thorough] * (place % 4 > 0)) for place, name in enumerate(names)]


@pytest.mark.parametrize("card", some(profile_names()))
def test_more_gpus_are_faster_for_every_card(card: str) -> None:
    found = table("--card", card, "--dtype", "fp8", "--size", "2048x2048")
    seconds = [float(found[gpus][0]) for gpus in COUNTS]
    assert seconds == sorted(seconds, reverse=True)


# plan/test_known_models has the sizes of every model.
@pytest.mark.parametrize("name", some(model_names()))
def test_every_model_fits_a_large_card_at_its_usual_size(name: str) -> None:
    found = table("--model", name, "--card", "b200")
    assert all(re.fullmatch(r"[\d.]+", found[gpus][0]) for gpus in COUNTS)
    assert re.fullmatch(r"[\d.]+x", found[8][2])


def test_bandwidth_memory_and_compiled_blocks_can_be_given() -> None:
    slow, fast = (float(table("--dtype", "fp8", "--bandwidth", bandwidth)[4][0]) for bandwidth in ("2GB", "50GB"))
    assert fast < slow / 1.5
    assert table("--memory", "32GB")[1][3] == "replicated"
    eager, compiled = (table("--card", "h100", *more) for more in ((), ("--compiled",)))
    limits = {1: 1.0, 2: 1.0, 4: 0.6, 8: 0.6}  # on 4 and 8 GPUs, eager blocks wait for the host
    assert all(float(compiled[gpus][0]) < limit * float(eager[gpus][0]) for gpus, limit in limits.items())


@pytest.mark.parametrize(
    ("option", "text", "name"),
    [
        ("model", "flux1-dev", "flux-dev"), ("model", "FLUX.1 dev", "flux-dev"), ("model", "FLUX.2-dev", "flux2-dev"),
        ("model", "Wan2.2_14B", "wan2.2-14b"), ("card", "rtx4090", "4090"), ("card", "RTX 4090 D", "4090-d"),
        ("card", "NVIDIA RTX PRO 6000", "pro-6000"), ("card", "GeForce RTX 5060 Ti", "5060-ti"), ("card", "DGX Spark", "spark"),
    ],
)  # fmt: skip
def test_names_are_understood_as_users_write_them(option: str, text: str, name: str) -> None:
    assert getattr(parser().parse_args([f"--{option}", text]), option) == name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--card", "4900"], "'4900' is not a known card: did you mean 4090,"),
        (
            ["--model", "wan"],
            "'wan' is not a known model: did you mean wan2.2-5b, wan2.2-14b, wan2.1-14b, wan2.1-1.3b?",
        ),
        (["--model", "@"], "'@' is not a known model: use one of flux-dev, flux-schnell,"),
    ],
)
def test_near_names_are_proposed(arguments: list[str], said: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_the_help_has_100_columns_and_all_names(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert all(name in said for name in (*model_names(), *profile_names()))


def test_impossible_plans_and_wrong_arguments_are_refused(capsys: Capture) -> None:
    assert main(["--memory", "8GB", "--devices", "2", "--weights", "replicated"]) == 2
    error = capsys.readouterr().err
    assert "8.00 GB" in error and "The choices on 2 GPUs, in seconds:\nfile " in error
    for wrong in (["--size", "1024"], ["--memory", "lots"], ["--devices", "0"], ["--card", "tpu"], ["--dtype", "int3"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert memory("1.5 GiB") == 1.5 * 2**30
    assert (size("640x480").frames, size("640x480x9").frames) == (1, 9)


def test_the_guides_examples_equal_the_commands_output(capsys: Capture) -> None:
    """They have the table of plans, the table of files, and the assumed options."""
    text = (ROOT / "docs" / "guide" / "plan-command.md").read_text(encoding="utf-8")
    examples = re.findall(r"```console\n\$ python -m parallel_backend\.plan (.+)\n((?s:.+?))```", text)
    assert len(examples) == 4
    for arguments, output in examples:
        assert printed(capsys, *arguments.split()) == output


EVERYTHING = "--model flux-dev --size 512x512 --steps 4 --dtype fp8 --card 4090 --memory 5GB --cfg 1"
"""A value for each option that the command would assume."""


def test_what_is_assumed_is_listed_and_files_say_how_their_weights_are_held(capsys: Capture) -> None:
    said = printed(capsys, *EVERYTHING.split(), "--weights", "replicated")
    assert "Assumed" not in said
    first = re.split(r"\s{2,}", said.split("in seconds:\n")[1].splitlines()[1])
    assert (
        first[0] in WEIGHT_BYTES and re.fullmatch(r"[\d.]+ (sharded|streamed)", first[1]) and "needs" not in str(first)
    )
    piped = printed(capsys, "--devices", "4", "--approximate")
    assumed = "--model flux-dev --size 1024x1024 --steps 20 --dtype bf16 --card 4090 --memory 24GB --cfg 1"
    assert f"Assumed: {assumed}\n" in piped and "Chosen: pipefusion" in piped


RECIPES = (ROOT / "docs" / "guide" / "recipes.md").read_text(encoding="utf-8")
TABLES = re.findall(r"<!-- python -m parallel_backend\.plan (--recipe .+) -->\n((?:\|.*\n)+)", RECIPES)


@pytest.mark.parametrize(
    ("arguments", "table"),
    [  # the quick run has the recipes of few GPUs, which change with the same formulas
        pytest.param(*each, id=each[0], marks=[thorough] * each[0].endswith((" 4", " 8"))) for each in TABLES
    ],
)
def test_a_recipe_on_the_page_equals_the_commands_output(arguments: str, table: str, capsys: Capture) -> None:
    assert printed(capsys, *arguments.split()) == table


def test_there_is_a_recipe_of_each_machine_that_the_page_names() -> None:
    assert len(TABLES) == 6
    named = re.findall(r"^## (\d) x (?:RTX )?(?:PRO )?(\w+)$", RECIPES, re.MULTILINE)
    cards = [(number, "pro-6000" if card == "6000" else card.lower()) for number, card in named]
    assert [f"--recipe --card {card} --devices {number}" for number, card in cards] == [each for each, _ in TABLES]


def test_a_recipe_names_models_that_do_not_gain_or_do_not_fit(capsys: Capture) -> None:
    said = printed(capsys, "--recipe", "--card", "4090")
    assert re.search(r"^\| flux2-dev \| 46\.4 \| one GPU \(", said, re.MULTILINE)
    assert "does not fit" in said


def test_the_command_needs_only_msgspec(tmp_path: Path) -> None:
    """The command needs neither torch nor another package that ComfyUI brings, as the README says."""
    (tmp_path / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    command = [sys.executable, "-S", "-m", "parallel_backend.plan", "--model", "wan2.2-14b", "--card", "3090"]
    ran = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"GPUs  seconds +likely +gain", ran.stdout)
    assert f"{' '.join(command[2:])}\n" in (ROOT / "README.md").read_text(encoding="utf-8").replace("python -m", "-m")


GAINS_OF_README = {"About half the time": (1.8, 2.0), "A third less": (1.4, 1.7), "Hardly any": (1.0, 1.2)}
"""The least and the largest gain on two RTX 4090s in each row of the README's table of them."""


def gains(readme: str) -> dict[str, tuple[str, str, str]]:
    """Return the row and the seconds on one card and on two, by the model's name in a recipe."""
    found = {}
    for gain in GAINS_OF_README:
        (cell,) = re.findall(rf"^\| \*\*{gain}\*\* \| (.+?) \|", readme, re.MULTILINE)
        for name, one, two in re.findall(r"(\w.+?) ([\d.]+) → ([\d.]+)(?:, |$)", cell):
            model, _, dtype = name.partition(" in ")
            model = parser().parse_args(["--model", model]).model
            found[f"{model}, fp8" if dtype == "fp8" else model] = gain, one, two
    return found


def test_the_readmes_gains_on_two_4090s_are_those_of_the_recipe() -> None:
    lines = dict(TABLES)["--recipe --card 4090 --devices 2"].splitlines()[2:]
    recipe = {cells[0]: cells for cells in (line[2:-2].split(" | ") for line in lines)}
    found = gains((ROOT / "README.md").read_text(encoding="utf-8"))
    for model, (gain, one, two) in found.items():
        _, on_one, _, on_two, times, *_ = recipe[model]
        least, most = GAINS_OF_README[gain]
        assert (one, two) == (on_one, on_two), model
        assert least <= float(times.removesuffix("x")) <= most, model
    assert {name.partition(",")[0] for name in recipe} == {name.partition(",")[0] for name in found}


OF_README = {
    "Wan 2.2 14B, 1280 x 720, 81 frames, 20 steps, H100": "wan2.2-14b --size 1280x720x81 --card h100",
    "FLUX.2 dev, 1024 x 1024, 20 steps, H100": "flux2-dev --size 1024x1024 --card h100",
    "Wan 2.2 14B in fp8, 1280 x 720, 81 frames, 20 steps, RTX 4090": (
        "wan2.2-14b --size 1280x720x81 --card 4090 --dtype fp8"
    ),
    "MiniMax-H3 in fp8, 1344 x 768, 124 frames, 20 steps, RTX 4090": (
        "minimax-h3 --size 1344x768x124 --card 4090 --dtype fp8_fast"
    ),
    "FLUX.2 dev in fp8, 1024 x 1024, 20 steps, RTX 4090": "flux2-dev --size 1024x1024 --card 4090 --dtype fp8_fast",
    "Wan 2.2 5B, 1280 x 704, 121 frames, 20 steps, RTX 4090": "wan2.2-5b --size 1280x704x121 --card 4090",
    "Qwen-Image in fp8, 1024 x 1024, 20 steps, RTX 4090": "qwen-image --size 1024x1024 --card 4090 --dtype fp8",
    "FLUX.1 dev in fp8, 1024 x 1024, 20 steps, RTX 4090": "flux-dev --size 1024x1024 --card 4090 --dtype fp8",
    "the same with PipeFusion, which changes the picture slightly": (
        "flux-dev --size 1024x1024 --card 4090 --dtype fp8 --approximate"
    ),
}
"""Arguments of the command for each row of the README's first table."""


@pytest.mark.parametrize("row", OF_README)
def test_the_readmes_predictions_equal_the_commands(row: str) -> None:
    (line,) = (each for each in (ROOT / "README.md").read_text().splitlines() if each.startswith(f"| {row} |"))
    found = table("--model", *OF_README[row].split())
    assert [cell.strip() for cell in line.split("|")[2:6]] == [found[gpus][1] for gpus in COUNTS]
