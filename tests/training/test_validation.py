import json

import pytest
import torch

from dflash.decoding.acceptance import Acceptance
from dflash.drafter.export import load_drafter
from dflash.hidden.store import HiddenStates
from dflash.keys import training_key
from dflash.manifests import in_progress
from dflash.training.checkpoints import read_checkpoint
from dflash.training.loop import Stopped, train
from dflash.training.tracking import STEP
from dflash.training.validation import (
    PREFIX,
    choice,
    deployment_metric,
    out_of_patience,
    replay_groups,
    scores_of,
    validation_row,
)
from tests.drafter.small import make_ends
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_loop import rows_of, same, weights


@pytest.fixture(autouse=True)
def _own_root(home):
    torch.set_num_threads(1)


def one(rounds):
    """A response of as many rounds, each accepting what is given."""
    return Acceptance.of_response(rounds, num_tokens=sum(rounds) + len(rounds) + 1, num_slots=4)


def test_ranks_add_up_before_anything_is_divided_and_what_has_no_round_is_not_there():
    parts = [{"chain": one([0, 0, 0])}, {"chain": one([3]), "chain/bucket/1": one([3]), "tree4": Acceptance()}]
    row = validation_row(parts, step=7)
    assert row == {STEP: 7, PREFIX + "chain": 1 + 3 / 4, PREFIX + "chain/bucket/1": 4.0}


def test_chain_and_tree_are_measured_over_all_rows_each_category_and_each_bucket(home):
    states = make_states(LENGTHS, validation=4)
    artifact = train(make_config(max_steps=2, tree_budget=4), states)
    store = HiddenStates.open(states.path)
    drafter = load_drafter(artifact.path, dtype=torch.float32)
    rows = [(row, store.read(number)) for number, row in enumerate(store.rows) if row.split == "validation"]
    groups = replay_groups(drafter, make_ends(), rows, tree_budget=4)
    methods, parts = ("chain", "tree4"), ("", "/category/maths", "/bucket/0", "/bucket/1")
    assert set(groups) == {method + part for method in methods for part in parts}
    for method in methods:
        assert groups[f"{method}/bucket/0"] + groups[f"{method}/bucket/1"] == groups[method]
        assert groups[method].responses == 4
    assert {name.split("/")[0] for name in replay_groups(drafter, make_ends(), rows, tree_budget=0)} == {"chain"}
    assert (deployment_metric(0), deployment_metric(64)) == (PREFIX + "chain", PREFIX + "tree64")


def test_patience_counts_validations_since_the_best():
    scores = {10: 1.5, 20: 2.0, 30: 1.9, 40: 2.0}
    assert not out_of_patience(scores, 0)
    assert not out_of_patience(scores, 3)
    assert out_of_patience(scores, 2)
    assert not out_of_patience({}, 1)


def test_the_choice_names_its_runner_up_and_its_reason():
    best = choice({10: 1.5, 20: 2.0, 30: 2.0}, "tau", last=30, average=False)
    assert (best["step"], best["value"], best["runner_up"]) == (20, 2.0, {"step": 30, "value": 2.0})
    assert "validations: 3;" in best["reason"]
    last = choice({}, "tau", last=30, average=True)
    assert (last["step"], last["value"]) == (30, None)
    assert last["reason"] == "there was nothing to validate on: the moving average of the weights of the last step"
    scores = {10: 1.5, 20: 2.0, 30: 1.9}
    next_best = choice(scores, "tau", last=40, average=False, damaged=[20])
    assert (next_best["step"], next_best["runner_up"]["step"]) == (30, 10)
    assert next_best["reason"].endswith("better, but damaged: step 20")
    none = choice(scores, "tau", last=40, average=False, damaged=[20, 30, 10])
    assert (none["step"], none["value"]) == (40, None)
    assert none["reason"].startswith("no checkpoint that was validated is whole: the weights of the last step; better")


@pytest.mark.parametrize("ema", [0.0, 0.1])
def test_what_is_published_are_the_weights_of_the_best_validation(ema):
    states = make_states(LENGTHS, validation=4)
    swinging = {"learning_rate": 0.3, "warmup_share": 0, "schedule": "wsd", "decay_share": 0, "keep_last": 1}
    config = make_config(**swinging, epochs=9, validate_every=2, save_every=1, ema=ema)
    artifact = train(config, states)
    best = json.loads((artifact.path / "best.json").read_text())
    assert best == artifact.summary["best"]
    assert best["step"] < artifact.summary["steps"], "the example's best is not its last"
    scores = scores_of(rows_of(artifact), deployment_metric(4))
    assert best["value"] == max(scores.values())
    published = weights(artifact)
    seen = [0.0]
    with pytest.raises(Stopped):
        train(config, states, progress=lambda done, *_: seen.append(done), should_stop=lambda: seen[-1] == best["step"])
    at_best = read_checkpoint(in_progress(training_key(config, states)), best["step"])
    assert same(published, {**at_best.weights, **at_best.average})
    assert bool(at_best.average) == bool(ema)
    if ema:
        assert not same(published, at_best.weights)


def test_training_stops_early_when_nothing_gets_better():
    states = make_states(LENGTHS, validation=4)
    artifact = train(make_config(learning_rate=1e-9, epochs=9, validate_every=2, patience=3), states)
    assert (artifact.summary["best"]["step"], artifact.summary["steps"]) == (2, 8)
    assert artifact.summary["planned_steps"] > 8


def test_without_validation_rows_the_last_weights_are_published_and_it_says_so():
    artifact = train(make_config(max_steps=3), make_states(LENGTHS, validation=0))
    assert [row[STEP] for row in rows_of(artifact)] == [2, 3]
    assert artifact.summary["best"]["step"] == 3
    assert "nothing to validate on" in artifact.summary["best"]["reason"]
