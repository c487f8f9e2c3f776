"""Derived declarations, with the written ones hidden, against ComfyUI's own forward; and errors that the proof finds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as redeclare

from parallel_backend import declaration as d
from parallel_backend.derive import child
from parallel_backend.derive.__main__ import main
from parallel_backend.derive.calls import Subject
from parallel_backend.derive.derive import derive, proved_compiled
from parallel_backend.derive.proof import IN_PATCHES, WHOLE, prove
from parallel_backend.derive.writing import source_of
from parallel_backend.distance import error_of
from parallel_backend.errors import Refused
from parallel_backend.models.comfyui.proof.prove import TOLERANCE
from parallel_backend.models.comfyui.proof.rank import ProofRank, plan_for
from parallel_backend.models.comfyui.reduced import keep_some
from parallel_backend.models.comfyui.small import Case, small
from tests.derive.found import FOUND
from tests.derive.subjects import SUBJECTS, subject_of
from tests.derive.toys import toy, unheard
from tests.support.comfyuis import is_listed
from tests.support.ranks import run_ranks
from tests.support.selection import thorough
from tests.support.tiny.comfyui import save_tiny


def read(name: str, source: str) -> d.Declaration:
    """Return a declaration from its source, executed as a module of `models/declared/`."""
    package = "parallel_backend.models.declared"
    space: dict[str, Any] = {"__package__": package, "__name__": f"{package}.derived"}
    exec(compile(source, "<derived>", "exec", dont_inherit=True), space)
    found = space[name]
    assert isinstance(found, d.Declaration)
    return found


def test_a_printed_declaration_is_a_module_of_models_declared() -> None:
    assert read("FOUND", source_of("FOUND", FOUND, "Found for a test.")) == FOUND


def derived(subject: Subject) -> Any:
    return derive([subject], limit=60.0)


# The quick run has the derivations of test_a_class_that_nobody_has_seen_is_derived and
# test_hints_that_alternate_with_layers_and_attend_to_sound_are_derived. test_a_spoilt_declaration_is_not_proved shows that a
# declaration with an error fails their proof.
@thorough
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_derived_declaration_gives_comfyuis_own_result(name: str) -> None:
    """The plan is not among those of the proof, and runs on the tests' own ranks. Some classes are refused in one sentence."""
    with torch.inference_mode():
        subject = SUBJECTS[name]()
    if name in REFUSED:
        with pytest.raises(
            Refused, match=f"cannot be derived, because .*{REFUSED[name]}.*: write its declaration by hand"
        ):
            derived(subject)
        return
    found = derived(subject)
    assert found.proof.holds
    assert found.declaration.whole_picture == (name in WITHOUT_PATCHES)
    call = subject.call(subject.sizes)
    case = Case(
        subject.model, found.declaration, call.latent, call.timestep, call.arguments, name, options=call.options
    )
    with torch.inference_mode():
        expected = case.stock()
    plan = plan_for(case, ring=2, ulysses=2)
    results = run_ranks(4, lambda _: ProofRank(case, plan).run())
    assert all(error_of(out, expected) <= TOLERANCE for out in results)


CHANGED: Mapping[str, str] = {
    "ltxv, guide": "its forward fails on a test call",
    "ltxv, weighed guide": "its forward fails on a test call",
    "wan animate 2": "the model calls attention outside of its blocks",
    "wan animate 2, no poses": "the model calls attention outside of its blocks",
}
"""Cases that are derived in ComfyUI 0.30, and not in newer ones."""

REFUSED: Mapping[str, str] = {
    "hidream, a picture to edit": "its forward fails on a test call",
    "ltxv, weighed guide": "is given an object of the class GuideAttentionMask",
    **({} if is_listed() else CHANGED),
}
"""Cases that are not derived, with a part of the reason."""

WITHOUT_PATCHES = ("chroma radiance",)
"""Cases that are proved only without patches, as their written declarations say too."""


def changed(declaration: d.Declaration, number: int = 0, **fields: Any) -> d.Declaration:
    """Return the declaration with other fields of one of its groups."""
    groups = [*declaration.groups]
    groups[number] = redeclare(groups[number], **fields)
    return redeclare(declaration, groups=tuple(groups))


def argued(declaration: d.Declaration, **arguments: Any) -> d.Declaration:
    """Return the declaration with other arguments of the first group."""
    return changed(declaration, arguments={**declaration.groups[0].arguments, **arguments})


SPOILT: Mapping[str, tuple[str, Callable[[d.Declaration], d.Declaration]]] = {
    "attention, in another order": (
        "auraflow",
        lambda right: changed(right, attentions=(d.DistributedAttention(("x", "c")),)),
    ),
    "attention to a rank's own tokens": ("auraflow", lambda right: changed(right, 1, attentions=(d.ReplicatedKeys(),))),
    "a picture that begins elsewhere": (
        "wan, reference frame",
        lambda right: changed(right, streams={"x": d.LatentTokens()}),
    ),
    "positions, in another order": ("flux", lambda right: argued(right, pe=d.PerToken(("img", "txt"), dim=2))),
    "positions of the picture alone": ("flux", lambda right: argued(right, pe=d.PerToken(("img",), dim=2))),
    "values returned, in another order": ("flux", lambda right: changed(right, returns=("txt", "img"))),
    "positions along another dimension": ("wan, text", lambda right: argued(right, freqs=d.PerToken(("x",), dim=0))),
    "a timestep a frame, for all tokens": (
        "wan 2.2, a timestep a frame",
        lambda right: argued(right, e=d.Replicated(vectors=())),
    ),
    "runs of tokens, the same on all ranks": (
        "flux 2, zero-timestep reference",
        lambda right: argued(right, modulation_dims_img=d.Replicated()),
    ),
    "tokens of another size": (
        "auraflow",
        lambda right: redeclare(right, patch_size=d.PythonFunction(lambda model: (2, 4))),
    ),
    "one attention, where a block has two": (
        "sd 3.5 medium",
        lambda right: changed(right, attentions=(d.DistributedAttention(("context", "x")),)),
    ),
}
"""Wrong declarations by their error: a small model, and a function that changes the right declaration of its class."""


@pytest.mark.parametrize(
    "spoilt", [pytest.param(key, marks=[thorough] * (place > 0)) for place, key in enumerate(SPOILT)]
)
def test_a_spoilt_declaration_is_not_proved(spoilt: str) -> None:
    name, spoil = SPOILT[spoilt]
    with torch.inference_mode():
        case = small(name)
    subject = subject_of(case)
    calls = [subject.call(subject.sizes)]
    proof = prove(subject, spoil(case.declaration), calls, {**WHOLE, **IN_PATCHES}, limit=60.0)
    assert not proof.holds
    assert {*proof.errors} | {*proof.failures} == {*WHOLE, *IN_PATCHES}


def test_a_class_that_nobody_has_seen_is_derived() -> None:
    """Its blocks are proved compiled too, unless they cannot be compiled."""
    found = derived(toy())
    assert found.proof.holds
    assert not found.declaration.whole_picture
    assert found.declaration.groups[0].attentions == (d.DistributedAttention(("x",)),)
    assert proved_compiled([toy()], found).holds
    failed = proved_compiled([toy("looking")], found)
    assert not failed.holds
    assert "not compiled" in failed.in_words()


@pytest.mark.parametrize("habit", ["one row", "in place"])
def test_a_class_that_takes_no_batch_or_writes_into_its_arguments_is_derived(habit: str) -> None:
    """Some calls of HunyuanVideo accept no batch with a masked text."""
    assert derived(toy(habit)).proof.holds


def test_unknown_layers_between_blocks_gather_the_tokens() -> None:
    """Attention in halves of the picture is not declared, so that each rank computes it for all tokens."""
    found = derive([toy("between")], limit=10.0)  # stages wait for each other, and patches fail
    assert found.proof.holds and found.declaration.whole_picture
    assert found.declaration.between == ()


def test_hints_that_alternate_with_layers_and_attend_to_sound_are_derived() -> None:
    """The hints' tokens are divided differently from those of the layers, whose sequence has text before the video.

    The order of the blocks is that of the file: the small model has two layers and two hints of five and three, and one hint
    runs. The proof uses three and two.
    """
    subject = unheard()
    subject = replace(subject, lengths=keep_some(subject.model, 2, 2))
    found = derived(subject)
    assert found.proof.holds and not found.declaration.whole_picture
    assert subject.lengths == {"layers": 5, "hints": 3}
    assert found.declaration.units == d.InterleavedBlocks("layers", "hints", (0, 2, 4))
    assert [len(subject.model.get_submodule(name)) for name in subject.lengths] == [3, 2]  # type: ignore[arg-type]
    layers, hints = found.declaration.groups
    assert (layers.streams["tokens"].parts_per_frame, hints.streams["hint"].parts_per_frame) == (1, 1)
    assert hints.arguments["sound"] == d.PerFramePart("hint")


@pytest.mark.parametrize(
    ("habit", "why"),
    [
        ("random", "its blocks get other inputs in each call, as if it drew random numbers"),
        (
            "branch",
            r"its blocks of blocks do not all get the picture's tokens separately|the operations of blocks\.0 depend on the",
        ),
        ("mixing", "its blocks of blocks do not all get the picture's tokens separately, one after the other"),
        ("failing", r"its forward fails on a test call \(ValueError: no picture of this size\)"),
        ("deceiving", r"the declaration that fits it was not proved: ulysses 2 1\.0e-01, ring 3 1\.0e-01"),
    ],
)
def test_a_model_that_cannot_be_analysed_or_proved_from_outside_is_refused(habit: str, why: str) -> None:
    with pytest.raises(Refused, match=f"^Toy cannot be derived, because ({why}).*: write its declaration by hand"):
        derived(toy(habit))


def test_a_file_of_no_model_or_of_too_large_a_class_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, large = tmp_path / "empty.safetensors", save_tiny(tmp_path, "auraflow")
    empty.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    too_large = r"^AuraFlow is too large to derive: with 2 blocks of each kind it has .* raise --memory"
    for path, limit, reason in ((empty, 1e9, r"empty\.safetensors"), (large, 1e3, too_large)):
        assert child.main(path, limit) == 1
        out, error = capsys.readouterr()
        assert (out, error.count("\n")) == ("", 1), path
        assert re.search(reason, error), path


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "large.safetensors"), "--minutes", "0.0001"]) == 1
    assert capfd.readouterr() == (
        "",
        "large.safetensors was not derived within 0.0001 minutes: raise --minutes, or write its declaration by hand "
        "(docs/develop/adding-a-model.md).\n",
    )


@thorough
def test_the_command_prints_a_declaration_that_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The declaration is derived from a file, and holds for the same class in another size, on the tests' own ranks."""
    path = save_tiny(tmp_path, "wan")
    assert main([str(path), "--comfyui", os.environ["COMFYUI_PATH"]]) == 0
    out, error = capfd.readouterr()
    assert "WAN21_T2V was derived and proved for every plan: " in error
    with torch.inference_mode():
        case = small("wan, text")
        expected = case.stock()
    declaration = read("WAN21_T2V", out)
    plan = plan_for(case, ring=2, ulysses=2)
    results = run_ranks(4, lambda _: ProofRank(case, plan, declaration).run())
    assert all(error_of(out, expected) <= TOLERANCE for out in results)


@thorough
def test_the_command_prints_no_declaration_of_a_class_that_is_not_derived(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny(tmp_path, "boogu")
    assert main([str(path), "--comfyui", os.environ["COMFYUI_PATH"]]) == 1
    out, error = capfd.readouterr()
    assert out == ""
    assert "cannot be derived, because " in error
