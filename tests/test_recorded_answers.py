"""Recorded answers: a question is answered by the answer to an equal question, whatever the order."""

from __future__ import annotations

import pytest
import torch

from tests.support.nodes_module import ForGood, nodes_module

recorded_answers = nodes_module("model.recorded_answers", ForGood())


def computed() -> str:
    return "computed"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_questions_of_one_shape_get_their_own_answers(order: tuple[int, int]) -> None:
    answers = recorded_answers.RecordedAnswers()
    questions = [({"x": torch.full((2, 3), float(number))}, {"prompt": 7}) for number in range(2)]
    for number, question in enumerate(questions):
        answers.add(question, number)
    for number in order:
        assert answers.take(questions[number], computed) == number
    assert answers.take(questions[0], computed) == "computed"


@pytest.mark.parametrize("other", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(3, 2), torch.ones(2, 3), 0.0])
def test_a_question_that_differs_is_computed(other: object) -> None:
    answers = recorded_answers.RecordedAnswers()
    answers.add({"x": torch.zeros(2, 3)}, "recorded")
    assert answers.take({"x": other}, computed) == "computed"
    assert len(answers) == 1
