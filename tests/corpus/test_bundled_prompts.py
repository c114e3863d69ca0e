from collections import Counter

import pytest

from dflash.bundled import resolve
from dflash.corpus.conversations import read_prompts


@pytest.mark.parametrize(("name", "num_prompts"), [("bundled:gsm8k-train", 480), ("bundled:evaluation", 80)])
def test_bundled_prompts_are_readable_and_distinct(name: str, num_prompts: int):
    assert len(read_prompts([resolve(name)], limit=0)) == num_prompts


def test_no_evaluation_prompt_is_a_training_prompt():
    training, evaluation = (
        read_prompts([resolve(f"bundled:{name}")], limit=0) for name in ("gsm8k-train", "evaluation")
    )
    assert not {p.id for p in training} & {p.id for p in evaluation}


def test_any_first_rows_of_the_evaluation_set_hold_its_categories_in_proportion():
    prompts = read_prompts([resolve("bundled:evaluation")], limit=0)
    whole = Counter(p.category for p in prompts)
    assert len(whole) >= 4
    for n in range(1, 80):
        first = Counter(p.category for p in prompts[:n])
        assert all(abs(first[name] - n * count / 80) <= 1 for name, count in whole.items())
