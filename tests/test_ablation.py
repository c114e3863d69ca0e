"""The ablation's table, at a size of seconds: real prompts, the bundled verifier, three steps."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import ablation

TINY = [
    *("--steps", "3", "--seeds", "1", "--only", "plain", "--only", "gamma 4"),
    *("--set", "generation.max_prompts=12", "--set", "generation.max_new_tokens=24"),
    *("--set", "evaluation.max_prompts=4", "--set", "evaluation.max_new_tokens=24"),
    *("--set", "tokenization.validation_share=0.2"),
]


def test_runs_are_tabulated_and_never_run_twice(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ablation.main(TINY)
    first, progress = capsys.readouterr()
    assert [line.split("|")[1].strip() for line in first.splitlines()[2:]] == ["plain", "gamma 4"]
    assert "2 runs of 3 steps, 2 to do" in progress
    results = (home / "ablation" / "results.jsonl").read_text().splitlines()

    # one of them is lost, as by an interruption
    kept = [line for line in results if json.loads(line)["name"] == "plain"]
    (home / "ablation" / "results.jsonl").write_text("\n".join(kept) + "\n")
    ablation.main(TINY)
    second, progress = capsys.readouterr()
    assert "2 runs of 3 steps, 1 to do" in progress
    assert second == first


def test_make_ablation_makes_the_short_table_and_then_the_long_one_of_its_best(tmp_path: Path) -> None:
    make = ["make", "-n", "ablation", "DATA=prompts.jsonl"]
    said = subprocess.run(make, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent).stdout
    short, long = (line.split("ablation.py")[1].split() for line in said.splitlines() if "ablation.py" in line)
    assert (short, long) == ([], ["--seeds", "1", "--long", "3", "--data", "prompts.jsonl"])  # of equal steps
    rows = [
        {"name": name, "steps": 200, "responses": {"tree64": [[accepted, 10]]}}
        for name, accepted in (("plain", 10), ("Muon", 13), ("EMA 0.99", 9), ("D-PACE", 11), ("WSD", 12))
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, rows)))
    arguments = ablation.argparse.Namespace(only=[], long=3, steps=200)
    assert ablation._names(arguments, results) == ["plain", "Muon", "WSD", "D-PACE"]


def test_intervals_widen_with_disagreeing_seeds() -> None:
    def rows(*accepted: int) -> list[dict]:
        return [
            {"name": "plain", "seed": seed, "responses": {"tree64": [(count, 10)] * 20}}
            for seed, count in enumerate(accepted)
        ]

    agreeing = ablation._resampled(rows(15, 15, 15), "tree64")
    disagreeing = ablation._resampled(rows(10, 15, 20), "tree64")
    assert agreeing.min() == agreeing.max() == pytest.approx(2.5)
    assert disagreeing.min() == pytest.approx(2.0)
    assert disagreeing.max() == pytest.approx(3.0)
    assert disagreeing.mean() == pytest.approx(2.5, abs=0.05)


def test_every_variant_is_a_configuration_that_differs_from_the_plain_one() -> None:
    recipe = ablation.load_recipe("demo", ["extraction.store_final=true"])
    arguments = ablation.argparse.Namespace(steps=10, long=0)
    configs = {name: ablation.config(recipe, arguments, name, 0).model_dump_json() for name in ablation.VARIANTS}
    assert len(set(configs.values())) == len(configs)
