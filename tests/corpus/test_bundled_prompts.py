import json
from collections import Counter

import polars as pl
import pytest

from dflash.bundled import resolve
from dflash.config import GenerationConfig, SourceConfig
from dflash.corpus.collection import collect
from flows import recipes


def prompts(name: str, contaminants: tuple[str, ...] = ()) -> tuple[pl.DataFrame, dict[str, int]]:
    sources = [SourceConfig(path=path) for path in contaminants]
    artifact = collect(GenerationConfig(prompts=[SourceConfig(path=name)]), sources)
    return pl.read_parquet(artifact.path / "prompts" / "*.parquet"), artifact.summary["dropped"]


@pytest.mark.parametrize(
    ("name", "contaminants", "rows"),
    [
        ("bundled:gsm8k-train", ("bundled:evaluation", "bundled:spec-bench"), 480),
        ("bundled:evaluation", (), 80),
        ("bundled:spec-bench", (), 104),
    ],
)
def test_bundled_prompts_are_readable_distinct_and_clean(name: str, contaminants: tuple[str, ...], rows: int) -> None:
    frame, dropped = prompts(name, contaminants)
    assert (frame.height, dropped) == (rows, {})


@pytest.mark.parametrize(("name", "rows", "categories"), [("evaluation", 80, 5), ("spec-bench", 104, 13)])
def test_any_first_rows_of_an_evaluation_set_hold_its_categories_in_proportion(
    name: str, rows: int, categories: int
) -> None:
    found = prompts(f"bundled:{name}")[0]["category"].to_list()
    whole = Counter(found)
    assert len(whole) == categories
    for n in range(1, rows):
        first = Counter(found[:n])
        assert all(abs(first[name] - n * count / rows) <= 1 for name, count in whole.items())


def test_prompts_of_mt_bench_have_both_turns_and_the_two_evaluation_sets_overlap_as_documented() -> None:
    frame = prompts("bundled:spec-bench")[0]
    asked = [[m["content"] for m in json.loads(row) if m["role"] == "user"] for row in frame["messages"]]
    turns = dict(zip(frame["category"], map(len, asked), strict=True))
    assert {name for name, count in turns.items() if count == 2} == set(sets()["mt-bench"])
    assert {name for name, count in turns.items() if count == 1} == set(sets()["spec-bench"])
    others = {json.loads(row)[0]["content"] for row in prompts("bundled:evaluation")[0]["messages"]}
    twice = Counter(name for name, texts in zip(frame["category"], asked, strict=True) if texts[0] in others)
    assert twice == {"reasoning": 6, "writing": 6}


def sets() -> dict[str, list[str]]:
    return recipes.load_recipe("qwen3-8b-ddtree").evaluation.sets


PRODUCTION = [name for name in recipes.deployments(recipes.prefect_yaml()) if name.startswith("qwen")]


@pytest.mark.parametrize("name", PRODUCTION)
def test_production_recipes_have_room_for_the_longest_prompt_and_for_a_second_turn(name: str) -> None:
    """A token of these texts has three characters or more; a second turn comes behind the first answer."""
    config = recipes.load_recipe(name).evaluation
    assert [source.path for source in config.prompts] == ["bundled:spec-bench"]
    for line in resolve("bundled:spec-bench").read_text().splitlines():
        turns = json.loads(line)["turns"]
        tokens = sum(map(len, turns)) / 3 + (len(turns) - 1) * config.max_new_tokens
        assert tokens < config.max_prompt_tokens
