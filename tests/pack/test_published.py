"""Published files: the registry's metadata, the files it leaves out, and the words of every node in every language."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from parallel_backend.host.runs.journal import KINDS
from parallel_backend.worker.process.status import CONNECTING
from tests.refusals.sentences import NO_TEST, sentences, unquoted

REPO = Path(__file__).parents[2]
HELP = sorted((REPO / "web" / "docs").glob("*.md"))
CHINESE = re.compile("[\u4e00-\u9fff]")


def tracked(*options: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *options], cwd=REPO, capture_output=True, text=True, check=True)
    return set(listed.stdout.split("\0")) - {""}


def test_the_registry_gets_the_pack_and_no_tests() -> None:
    left_out = tracked("-i", "-c", "--exclude-from=.comfyignore")
    shipped = tracked() - left_out
    needed = ("nodes/", "parallel_backend/", "web/", "workflows/", "locales/", "docs/")
    assert {path.split("/")[0] for path in left_out} >= {"tests", "benchmarks", ".github"}
    assert not [path for path in left_out if path.startswith(needed)]
    assert {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md"} <= shipped
    assert {path for path in shipped if path.startswith("scripts/")} == {
        "scripts/sprites_api.json",
        "scripts/sprites_parallel_api.json",
    }


def test_the_metadata_is_complete_for_the_registry() -> None:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    (name,) = re.findall(r'^name = "(.+)"$', text, re.MULTILINE)
    assert "comfyui" not in name and re.fullmatch(r"[a-z]([-_.]?[a-z0-9])*", name) and len(name) < 100
    for field in (
        *("description", "requires-python", "Repository", "Documentation", '"Bug Tracker"'),
        *("Icon", "Banner", "PublisherId", "DisplayName", "requires-comfyui"),
    ):
        assert re.search(rf'^{field} = ".+"$', text, re.MULTILINE), field
    assert 'license = { file = "LICENSE" }' in text
    for kind in ("Operating System :: POSIX :: Linux", "Environment :: GPU :: NVIDIA CUDA"):
        assert f'"{kind}"' in text
    for picture, most in (("icon", (400, 400)), ("banner", (2100, 900))):
        assert f'/raw/main/docs/images/{picture}.png"' in text
        with Image.open(REPO / "docs" / "images" / f"{picture}.png") as image:
            assert image.width * most[1] == image.height * most[0] and image.width <= most[0]
    assert re.search(r'^version = "\d+\.\d+\.\d+"$', text, re.MULTILINE)
    requirements = (REPO / "requirements.txt").read_text(encoding="utf-8")
    dependencies = re.search(r"^dependencies = (\[.+\])$", text, re.MULTILINE)
    assert dependencies is not None
    listed = {line.split("#")[0].strip() for line in requirements.splitlines()} - {""}
    assert set(json.loads(dependencies[1])) == listed


def test_a_script_writes_the_address_into_all_files(tmp_path: Path) -> None:
    """A second run of the script changes the address again."""
    files = ["pyproject.toml", "README.md", "scripts/address.sh"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / file, tmp_path / file)
    (before,) = re.findall(r'^Repository = "(.+)"$', (REPO / "pyproject.toml").read_text(), re.MULTILINE)
    counts = [(REPO / file).read_text().count(before) for file in files]
    assert counts[:2] == [5, 1]
    for address in ("https://example.org/owner/name", "https://example.org/other/name.of-it"):
        subprocess.run(["bash", "scripts/address.sh", address], cwd=tmp_path, check=True)
        assert [(tmp_path / file).read_text().count(f"{address}") for file in files] == counts
    refused = subprocess.run(["bash", "scripts/address.sh", "owner/name"], cwd=tmp_path, capture_output=True, text=True)
    assert refused.returncode == 1 and "write https://HOST/OWNER/NAME" in refused.stderr


LISTED = re.compile(r"^ *- `(\w+)`", re.MULTILINE)
HEADING = re.compile(r"^#+ .+$", re.MULTILINE)


def is_complete(chinese: str, english: str) -> bool:
    """Return True if a page has each input, output and heading of the English one, and all its lines are in Chinese."""
    lines = [line for line in chinese.splitlines() if line.strip() and not line.startswith("  - ")]
    slots, headings = ((each.findall(chinese), each.findall(english)) for each in (LISTED, HEADING))
    same = slots[0] == slots[1] and len(headings[0]) == len(headings[1])
    return same and bool(slots[0]) and all(CHINESE.search(line) for line in lines)


def test_help_is_complete_in_chinese() -> None:
    pages = {page: page.read_text(encoding="utf-8") for page in HELP}
    assert set(words("en", "nodeDefs.json")) == {page.stem for page in pages}
    chinese = {page: (page.with_suffix("") / "zh.md").read_text(encoding="utf-8") for page in pages}
    assert [page.stem for page in pages if not is_complete(chinese[page], pages[page])] == []
    page = HELP[0]
    (slot, *_) = LISTED.findall(pages[page])
    for planted in (
        chinese[page].replace(f"`{slot}`", "`other`"),
        f"{chinese[page]}\n# 又一\n",
        f"{chinese[page]}\nword\n",
    ):
        assert not is_complete(planted, pages[page])


def words(language: str, file: str) -> Any:
    return json.loads((REPO / "locales" / language / file).read_text(encoding="utf-8"))


def shape(words: Any) -> Any:
    """Return the keys of these words, in their order. Tests in tests/web check that texts use the same values."""
    return [(key, shape(value)) for key, value in words.items()] if isinstance(words, dict) else None


@pytest.mark.parametrize("file", ["nodeDefs.json", "main.json", "commands.json", "settings.json"])
def test_every_language_has_the_same_words(file: str) -> None:
    others = {folder.name for folder in (REPO / "locales").iterdir()} - {"en"}
    english = words("en", file)
    english.get("parallel", {}).pop("values", None)  # types of values, which are the same in all languages
    assert "zh" in others and len(str(shape(english))) > 100
    for language in others:
        assert shape(words(language, file)) == shape(english), language


def test_every_phase_of_a_worker_has_a_name_in_the_page() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (REPO / "parallel_backend").rglob("*.py"))
    phases = set(re.findall(r"""status\.enter\("([^"]+)\"""", code)) | {CONNECTING}
    assert len(phases) > 10
    assert phases | set(KINDS.values()) <= words("en", "main.json")["parallel"]["names"].keys()


@pytest.mark.parametrize(("language", "letters"), [("en", re.compile("[a-z]")), ("zh", CHINESE)])
def test_every_node_and_slot_has_a_name_and_a_description_in_each_language(
    language: str, letters: re.Pattern[str]
) -> None:
    nodes = words(language, "nodeDefs.json")
    assert set(nodes) == {page.stem for page in HELP}
    for name, node in nodes.items():
        slots = [*node["inputs"].values(), *node.get("outputs", {}).values()]
        assert all(slot["name"] for slot in slots), name
        assert all(letters.search(text) for text in (node["description"], *(slot["tooltip"] for slot in slots))), name


BLUEPRINTS = sorted((REPO / "subgraphs").glob("*.json"))


def test_a_blueprint_is_the_graph_of_a_template() -> None:
    """A blueprint has the template's nodes and links under a name of its own, and one node outside that stands for them."""
    templates = [json.loads(each.read_text(encoding="utf-8")) for each in (REPO / "workflows").glob("*.json")]
    graphs = {each["id"]: each for page in templates for each in page.get("definitions", {}).get("subgraphs", ())}
    assert len(BLUEPRINTS) > 3
    for path in BLUEPRINTS:
        blueprint = json.loads(path.read_text(encoding="utf-8"))
        (graph,), (node,) = blueprint["definitions"]["subgraphs"], blueprint["nodes"]
        assert (node["type"], node["title"], graph["name"]) == (graph["id"], path.stem, path.stem)
        assert graph["nodes"] and graph["links"]
        for part in ("nodes", "links", "inputs", "outputs"):
            assert graph[part] == graphs[graph["id"]][part], (path.stem, part)


def test_every_error_sentence_is_quoted_by_a_test_or_excused() -> None:
    """The rules for a quote are in `refusals/sentences`. The test finds a planted sentence that shares only common words."""
    texts, planted = sentences(), " ".join(("the", "pump", "overheats", "which is not supported"))
    assert len(texts) > 200 and planted not in texts
    missing = unquoted(texts | {planted})
    assert planted in missing
    reasons = [beginning for beginnings in NO_TEST.values() for beginning in beginnings]
    excused = {beginning: [text for text in missing if text.startswith(beginning)] for beginning in reasons}
    assert {beginning for beginning, found in excused.items() if len(found) != 1} == set(), "quoted, or gone"
    assert missing - {planted} == {text for found in excused.values() for text in found}, (
        "quote at least three words of the sentence in a test, or give the reason in NO_TEST of refusals/sentences.py"
    )


def dead_links(text: str, folder: Path) -> list[str]:
    """Return the files that a page links to and that the repository lacks."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    return [target for target in targets if not (folder / target).exists()]


def test_pages_link_to_existing_files() -> None:
    pages = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), REPO / "tests" / "README.md"]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    assert len(texts) > 40 and "".join(texts.values()).count("](") > 200
    assert {page: dead for page, text in texts.items() if (dead := dead_links(text, page.parent))} == {}
    assert dead_links("[a](README.md#part) [b](docs/none.md) [c](https://example.org)", REPO) == ["docs/none.md"]
