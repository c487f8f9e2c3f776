"""Kinds of calls: the differences that matter, those that do not, and the records that are kept; and a prompt's small call."""

from __future__ import annotations

import logging
import multiprocessing
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from parallel_backend.derive.call_kind import CallKind
from parallel_backend.derive.calls import Sizes
from parallel_backend.derive.declaration_cache import MOST_KINDS, DeclarationRecord, all_records, difference, load, save
from parallel_backend.derive.prompt import PromptExample, as_dicts
from parallel_backend.derive.request import DeriveReply, read_request, request_bytes
from parallel_backend.models.comfyui.reduced import keep_some
from tests.derive.found import FOUND, kind
from tests.support.tiny.models import draw


def test_another_size_is_the_same_kind_once_the_sizes_are_known() -> None:
    known = kind()
    assert known.difference(kind(9, 12, 5)) == "tokens in the conditioning (9 where it was 7)"
    known = known.with_sizes([kind(9, 12, 5)])
    assert known.sizes == ("tokens",)
    assert not known.difference(kind(11, 20, 7, scale=0.3))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (kind(y=draw(1, 8, seed=3)), "y in the conditioning"),
        (kind(mask=None), "conditioning without mask"),
        (kind(mode="edit"), r"mode in the conditioning \(edit where it was plain\)"),
        (kind(flag=True), r"flag in the conditioning \(True where it was False\)"),
        (kind(flag=0), r"flag in the conditioning \(0 where it was False\)"),
        (kind(context=draw(1, 2, 7, 16, seed=3)), r"context in the conditioning \(.*nxnxn where it was .*\)"),
        (kind(context=torch.ones(1, 7, 16).long()), r"context in the conditioning \(whole"),
        (kind(mask=torch.tensor([[1, 1, 0.0]])), r"mask in the conditioning \(fraction rowsxn, hiding some where"),
        (kind(7, 8, 1), r"x in the conditioning \(fraction rowsxnx1xnxn where"),
        (kind(tokens=None), "conditioning without tokens"),
    ],
)
def test_the_difference_of_another_kind_of_call_is_named(other: CallKind, what: str) -> None:
    known = kind().with_sizes([kind(9, 12)])
    assert re.fullmatch(f"{what}.*", known.difference(other))
    assert difference([known], [known, other]) == difference([known], [other])


def proved(*kinds: CallKind) -> DeriveReply:
    return DeriveReply(40.0, FOUND, kinds, "ulysses 2 1.0e-07")


def test_a_declaration_and_a_failure_are_found_only_for_their_calls() -> None:
    kept = DeclarationRecord("Toy", "1.2").with_answer(proved(kind()))
    assert kept.found([kind()]) is not None
    assert kept.found([kind(), kind(flag=True)]) is None
    both = kept.with_answer(proved(kind(flag=True)))
    assert len(both.answers) == 1
    assert both.found([kind(), kind(flag=True)]) is not None
    kept = kept.with_answer(DeriveReply(3.0, kinds=(kind(flag=True),), failure="it is not proved", lasting=True))
    assert kept.found([kind()]) is not None
    assert kept.failed([kind()]) is None
    failed = kept.failed([kind(), kind(flag=True)])
    assert failed is not None
    assert failed.failure == "it is not proved"


def test_a_record_keeps_the_most_recent_kinds_up_to_a_limit() -> None:
    kept = DeclarationRecord("Toy", "1.2")
    for number in range(2 * MOST_KINDS):
        kept = kept.with_answer(proved(kind(mode=str(number))))
    assert [len(each.kinds) for each in kept.answers] == [MOST_KINDS]
    assert kept.found([kind(mode=str(2 * MOST_KINDS - 1))]) is not None
    assert kept.found([kind(mode="0")]) is None


EITHER = tuple(
    DeclarationRecord("Toy", "1.2").with_answer(DeriveReply(1.0, FOUND, (kind(mode=mode),))) for mode in ("a", "b")
)


def keep_on(folder: Path, kept: DeclarationRecord) -> None:
    """Save a record repeatedly, as one of two ComfyUIs with one cache folder."""
    for _ in range(100):
        save("some class", kept, folder)


def test_two_concurrent_writers_leave_the_record_of_one_of_them(tmp_path: Path) -> None:
    writers = [multiprocessing.get_context("fork").Process(target=keep_on, args=(tmp_path, kept)) for kept in EITHER]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert load("some class", tmp_path) in (None, *EITHER)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert load("some class", tmp_path) in EITHER


def test_records_are_read_again_and_damaged_ones_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load("some class", tmp_path) is None
    kept = DeclarationRecord("Toy", "1.2").with_answer(proved(kind()))
    save("some class", kept, tmp_path)
    assert load("some class", tmp_path) == kept
    assert load("another class", tmp_path) is None
    assert all_records(tmp_path) == (kept,)
    [path] = tmp_path.glob("derived-*.json")
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole.replace(b"Toy", b"T\xff")):
        path.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert load("some class", tmp_path) is None
        assert f"{path} is ignored, as it cannot be read" in caplog.text
        assert all_records(tmp_path) == ()
    save("some class", kept, tmp_path)
    assert load("some class", tmp_path) == kept


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(4, 4), nn.GELU(), nn.Dropout(), nn.Linear(4, 4)])


def test_only_lists_of_blocks_are_shortened() -> None:
    """The surrounding code depends on the length of lists within blocks, and of lists of single layers."""
    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(5))
    model.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(4))
    model.projections = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    assert keep_some(model, 2, 2) == {"blocks": 5}
    assert [len(each) for each in (model.blocks, model.norms, model.projections)] == [2, 4, 4]
    assert len(model.blocks[1].net) == 4


def test_objects_masks_and_frames_of_a_prompt_reach_the_class(tmp_path: Path) -> None:
    output = SimpleNamespace(hidden=torch.ones(1, 5, 8, dtype=torch.bfloat16), sizes=[(3, 4, 5)])
    entries = {
        "cross_attn": torch.ones(1, 7, 8),
        "seen": as_dicts(output, SimpleNamespace),  # of a vision model, as ComfyUI gives it
        "denoise_mask": torch.ones(1, 1, 3, 9, 10),
        "concat_latent_image": torch.ones(1, 16, 3, 8, 10),  # a first frame, which the class scales to the latent
    }
    file = tmp_path / "request_bytes"
    file.write_bytes(request_bytes("file", [PromptExample(entries, (1, 16, 3, 9, 10), kind())], [], 1e9, 1.0))
    _, [prompt] = read_request(file)
    given = prompt.at(Sizes((5, 4, 6), 9))
    seen = given["seen"]
    assert isinstance(seen, SimpleNamespace)
    assert seen.hidden.shape == (1, 5, 8)
    assert seen.sizes == [(3, 4, 5)]
    assert given["denoise_mask"].shape == (1, 1, 5, 4, 6)
    assert given["concat_latent_image"].shape == (1, 16, 5, 8, 10)


def test_options_that_the_class_itself_adds_make_no_other_kind() -> None:
    called = CallKind(kind().tensors, (*kind().values, ("transformer_options.rope_options.shift_t", "a number")))
    assert "shift_t in the conditioning" in kind().difference(called)
    known = kind().with_options({"rope_options": {"shift_t": 1.0}, "function": len})
    assert not known.difference(called)
    assert not known.difference(kind())
    other = CallKind(called.tensors, (*called.values, ("transformer_options.rope_options.scale_x", "a number")))
    assert "scale_x in the conditioning" in known.difference(other)
