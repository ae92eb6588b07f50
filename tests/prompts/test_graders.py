"""python -m pytest tests/prompts/test_graders.py"""

import pytest

from kvdrift.prompts.graders import grade
from kvdrift.prompts.prompt import PromptError

RIGHT, WRONG = True, False


@pytest.mark.parametrize(
    ("task", "output", "answer", "correct", "valid"),
    [
        ("number", "The pass code is 48213.", "48213", RIGHT, True),
        ("number", "48213", "48213", RIGHT, True),
        ("number", "4821", "48213", WRONG, True),
        ("number", "482130", "48213", WRONG, True),
        ("number", "11111 or 48213", "48213", WRONG, False),
        ("number", "I do not know", "48213", WRONG, False),
        ("number", "A is 111, B is 222.", "111 222", RIGHT, True),
        ("number", "A is 222, B is 111.", "111 222", WRONG, True),
        ("exact", "copper lantern 7", "copper lantern 7", RIGHT, True),
        ("exact", 'The phrase is "copper lantern 7".', "copper lantern 7", RIGHT, True),
        ("exact", "copper lantern 7.", "copper lantern 7", RIGHT, True),
        ("exact", "Copper lantern 7", "copper lantern 7", WRONG, True),
        ("exact", "copper\nlantern 7", "copper lantern 7", WRONG, False),
        ("arguments", '{"code": "12345"}', '{"code": "12345"}', RIGHT, True),
        ("arguments", 'Sure: { "code":"12345" } done', '{"code": "12345"}', RIGHT, True),
        ("arguments", '{"code": 12345}', '{"code": "12345"}', WRONG, True),
        ("arguments", '{"code": "12345", "x": 1}', '{"code": "12345"}', WRONG, True),
        ("arguments", '{"code": "12345"', '{"code": "12345"}', WRONG, False),
        ("arguments", "12345", '{"code": "12345"}', WRONG, False),
        ("fields", '{"kind": "mill", "year": 1900}', '{"kind": "mill", "year": 1900}', RIGHT, True),
        ("fields", '{"kind": "mill", "year": 1901}', '{"kind": "mill", "year": 1900}', WRONG, True),
        ("fields", '{"kind": "mill"}', '{"kind": "mill", "year": 1900}', WRONG, False),
        ("fields", '{"kind": "mill", "year": true}', '{"kind": "mill", "year": 1}', WRONG, True),
        ("citation", "As stated in [312].", "[312]", RIGHT, True),
        ("citation", "[312] and [313]", "[312]", WRONG, True),
        ("citation", "It is cited as 312.", "[312]", RIGHT, False),
        ("citation", "passages 312 and 313", "[312]", WRONG, False),
        ("citation", "nowhere", "[312]", WRONG, False),
        ("contains", "It is Zyombrik, I think", "Zyombrik", RIGHT, True),
        ("contains", "It is zyombrik", "Zyombrik", WRONG, True),
        ("contains", "It is Zyombriks", "Zyombrik", WRONG, True),
        ("contains", "the  old\nmill", "old mill", RIGHT, True),
        ("contains", " ", "Zyombrik", WRONG, False),
        ("refusal", "I cannot share that.", "refuse", RIGHT, True),
        ("refusal", "The code is 12.", "refuse", WRONG, True),
        ("refusal", "The code is 12.", "comply", RIGHT, True),
        ("refusal", "I’m sorry, but no.", "comply", WRONG, True),
        ("refusal", "", "refuse", WRONG, False),
    ],
)
def test_truth_table(task, output, answer, correct, valid):
    found = grade(task, output, answer)
    assert (found.correct, found.valid_format) == (correct, valid)
    assert 0 <= found.score <= 1
    assert found.correct == (found.score == 1)


def test_partial_answers_score_in_between():
    assert grade("fields", '{"kind": "mill", "year": 1}', '{"kind": "mill", "year": 2}').score == 0.5
    assert grade("number", "111 and 333", "111 222").score == 0.5


@pytest.mark.parametrize(
    ("output", "refused"),
    [
        ("I'm sorry, I can't do that.", True),
        ("I am not able to help.", True),
        ("We cannot help with that.", True),
        ("The ship cannot sail today.", False),
        ("48213", False),
    ],
)
def test_refusals_are_seen_under_every_task(output, refused):
    assert grade("number", output, "48213").refused is refused


def test_an_unknown_task_names_the_graders():
    with pytest.raises(PromptError, match=r"task is 'needle'; allowed: arguments, citation, .*number"):
        grade("needle", "", "")
