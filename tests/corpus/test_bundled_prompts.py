from collections import Counter

import polars as pl
import pytest

from dflash.config import GenerationConfig, SourceConfig
from dflash.corpus.collection import collect


def prompts(name: str, contaminants: tuple[str, ...] = ()) -> tuple[pl.DataFrame, dict[str, int]]:
    sources = [SourceConfig(path=path) for path in contaminants]
    artifact = collect(GenerationConfig(prompts=[SourceConfig(path=name)]), sources)
    return pl.read_parquet(artifact.path / "prompts" / "*.parquet"), artifact.summary["dropped"]


@pytest.mark.parametrize(
    ("name", "contaminants", "rows"),
    [("bundled:gsm8k-train", ("bundled:evaluation",), 480), ("bundled:evaluation", (), 80)],
)
def test_bundled_prompts_are_readable_distinct_and_clean(name: str, contaminants: tuple[str, ...], rows: int) -> None:
    frame, dropped = prompts(name, contaminants)
    assert (frame.height, dropped) == (rows, {})


def test_any_first_rows_of_the_evaluation_set_hold_its_categories_in_proportion() -> None:
    categories = prompts("bundled:evaluation")[0]["category"].to_list()
    whole = Counter(categories)
    assert len(whole) >= 4
    for n in range(1, 80):
        first = Counter(categories[:n])
        assert all(abs(first[name] - n * count / 80) <= 1 for name, count in whole.items())
