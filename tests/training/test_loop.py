import json
import logging
import math
import os
import re
import shutil
import threading

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from dflash.drafter.blocks import sample_anchors
from dflash.drafter.export import load_drafter
from dflash.hidden.store import HiddenStates
from dflash.keys import training_key
from dflash.manifests import Damaged, in_progress, verify
from dflash.manifests import home as data_root
from dflash.training.checkpoints import load_newest
from dflash.training.loop import Stopped, train
from dflash.training.objective import block_loss
from dflash.training.optimizers import average_and_clip
from dflash.training.ranks import Ranks
from tests.drafter.small import make_drafter, make_ends
from tests.training.small import LENGTHS, MASK, make_config, make_row, make_states, pack

SETTINGS = {
    "labels": "greedy",
    "loss": {"ce": 1.0},
    "gamma": 3.0,
    "alpha": 0.5,
    "tree_budget": 4,
    "tree_metrics": False,
}
ALONE = Ranks(torch.device("cpu"))
LOGGED = {
    *("train/step", "train/epoch", "train/loss", "train/accuracy", "train/top4_accuracy", "train/top8_accuracy"),
    *("train/streak", "train/ddtree_streak4", "train/ddtree_streak8", "train/grad_norm", "train/lr"),
    *("train/noise_std", "train/skipped", "train/tokens_per_second", "train/waiting_share", "train/read_ahead"),
    *("batch/avg_seq_len", "batch/bucket/0", "batch/bucket/1", "train/acceptance/slot1", "train/recall@64"),
    *(f"train/{name}/{part}" for name in ("loss", "accuracy") for part in ("category/maths", "bucket/0", "bucket/1")),
    *(f"train/{name}@{budget}" for name in ("ddtree_accept", "calibration") for budget in (4, 16, 64, 256)),
}
OF_THE_CLOCK = {"train/tokens_per_second", "train/waiting_share", "train/read_ahead"}


@pytest.fixture(autouse=True)
def _own_root(home):
    torch.set_num_threads(1)


def weights(artifact):
    return load_file(artifact.path / "model.safetensors")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rows_of(artifact):
    rows = [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in OF_THE_CLOCK} for row in rows]


def stop_after(steps):
    asked = iter(range(1, 10_000))
    return lambda: next(asked) >= steps


@pytest.mark.parametrize("changes", [{"optimizer": "adamw"}, {"optimizer": "muon", "slot_weights": "dpace"}])
def test_training_learns_and_publishes_a_whole_artifact(changes):
    artifact = train(make_config(epochs=20, learning_rate=1e-2, validate_every=1000, **changes), make_states(LENGTHS))
    rows = rows_of(artifact)
    assert rows[-2]["train/loss"] < rows[0]["train/loss"] / 3
    assert rows[-1]["validation/acceptance_length/tree4"] > 1.5
    assert set(rows[0]) | OF_THE_CLOCK >= LOGGED
    verify(artifact)
    assert artifact.summary["steps"] == artifact.summary["train"]["train/step"]
    assert artifact.summary["tokens"] == 20 * sum(LENGTHS[:-1])
    drafter = load_drafter(artifact.path, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == artifact.summary["parameters"]
    assert not list((data_root() / "in_progress").iterdir())


def test_lines_of_the_log_and_the_summary_are_of_all_rows_only(caplog):
    with caplog.at_level(logging.INFO):
        artifact = train(make_config(max_steps=2), make_states(LENGTHS))
    assert "train/calibration@16/category/maths" in rows_of(artifact)[0]
    (line,) = [said for said in caplog.messages if said.startswith("step 2  epoch")]
    assert "top8_accuracy" in line
    shown = set(line.split()) | {name for part in ("train", "validation") for name in artifact.summary[part]}
    assert not [name for name in shown if "category" in name or re.search("./bucket", name)]


def test_the_same_seed_gives_the_same_drafter_and_another_seed_another():
    states = make_states(LENGTHS)
    first, again, other = (train(make_config(max_steps=4, seed=seed), states) for seed in (0, 0, 1))
    assert same(weights(first), weights(again))
    assert not same(weights(first), weights(other))


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "muon", "slot_weights": "dpace", "accumulation": 2}, {"dtype": "bfloat16"}]
)
def test_stopped_anywhere_and_run_again_ends_bit_identical(changes):
    states, config = make_states(LENGTHS), make_config(max_steps=10, epochs=9, **changes)
    whole = train(config, states)
    expected = weights(whole), rows_of(whole)
    for steps in (2, 3, 7):  # the third after 2 + 3 + 5 steps and one validation, while validating again
        with pytest.raises(Stopped):
            train(config, states, should_stop=stop_after(steps))
    assert load_newest(in_progress(training_key(config, states))).step == 10
    resumed = train(config, states)
    assert same(weights(resumed), expected[0])
    assert rows_of(resumed) == expected[1]


def test_a_damaged_checkpoint_costs_steps_but_changes_nothing():
    states, config = make_states(LENGTHS), make_config(max_steps=10)
    expected = weights(train(config, states))
    with pytest.raises(Stopped):
        train(config, states, should_stop=stop_after(7))
    newest = in_progress(training_key(config, states)) / "step-000007" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert same(weights(train(config, states)), expected)


@pytest.mark.parametrize("kind", ["decay", "uniform", "dpace"])
def test_one_batch_of_eight_and_four_of_two_give_the_same_gradient(kind):
    drafter, ends = make_drafter(), make_ends()
    rows = [make_row(length, prompt=5, generator=torch.Generator().manual_seed(length)) for length in LENGTHS[:8]]

    def gradient(size):
        drafter.zero_grad()
        weight = 0.0
        for start in range(0, 8, size):
            batch = pack(rows[start : start + size])
            generators = [torch.Generator() for _ in range(size)]
            anchors = sample_anchors(batch.loss_mask_P, batch.documents, num_anchors=99, generators=generators)
            settings = SETTINGS | {"anchors_A": anchors, "weights": kind}
            loss, blocks = block_loss(drafter, ends, batch, features_PF=batch.features_PF, **settings)
            loss.backward()
            weight += blocks.weight
        average_and_clip(list(drafter.parameters()), weight=weight, clip_norm=1e9, ranks=ALONE)
        return [parameter.grad.clone() for parameter in drafter.parameters()]

    for eight, two in zip(gradient(8), gradient(2), strict=True):
        torch.testing.assert_close(eight, two, rtol=1e-5, atol=1e-5)


def test_rows_too_short_for_an_anchor_are_left_out_and_a_set_of_them_is_refused():
    short = [make_row(8, prompt=7, generator=torch.Generator()) for _ in range(3)]
    long = [make_row(20, prompt=7, generator=torch.Generator()) for _ in range(2)]
    mixed = make_states([8, 8, 20, 20], rows=[*short[:2], *long], validation=1)
    assert train(make_config(max_steps=1), mixed).summary["rows"] == 1
    with pytest.raises(ValueError, match="none of 3 training rows has a legal anchor"):
        train(make_config(), make_states([8, 8, 8], rows=short, validation=0))


def test_a_batch_without_any_anchor_gives_zero_loss_and_zero_gradient():
    drafter, ends = make_drafter(), make_ends()
    row = make_row(12, prompt=3, generator=torch.Generator())
    batch = pack([row._replace(loss_mask_T=torch.arange(12) % 2 == 1)])
    anchors = sample_anchors(batch.loss_mask_P, batch.documents, num_anchors=4, generators=[torch.Generator()])
    assert len(anchors) == 0
    settings = SETTINGS | {"anchors_A": anchors, "weights": "decay"}
    loss, blocks = block_loss(drafter, ends, batch, features_PF=batch.features_PF, **settings)
    loss.backward()
    assert (loss.item(), blocks.weight, blocks.metrics()) == (0.0, 0.0, {})
    assert not [name for name, parameter in drafter.named_parameters() if parameter.grad is None]
    weight = blocks.weight
    assert average_and_clip(list(drafter.parameters()), weight=weight, clip_norm=1.0, ranks=ALONE) == 0.0


def test_a_mask_token_that_the_verifier_says_is_refused():
    rows = [make_row(20, prompt=7, generator=torch.Generator())]
    rows[0].greedy_ids_T[12] = MASK
    with pytest.raises(ValueError, match=f"{MASK} occurs in the supervised text of row row0, position 13"):
        train(make_config(), make_states([20], rows=rows, validation=0))


def test_a_byte_of_the_hidden_states_that_was_flipped_is_never_trained_on():
    states = make_states(LENGTHS)
    path = next(found for found in (states.path / "shards/0000/features/c").rglob("*") if found.is_file())
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[stat.st_size // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # so that opening them notices nothing
    steps = []
    with pytest.raises(Damaged, match="shards/0000: .*its manifest is set aside"):
        train(make_config(), states, progress=lambda done, *_: steps.append(done))
    assert steps == []  # validation would notice it too


@pytest.fixture
def poisoned(monkeypatch):
    """Row 7 is not a number when it is read for training."""
    read = HiddenStates._read

    def poisoned_read(store, number, out, *, verify):
        read(store, number, out, verify=verify)
        if number == 7:
            out.features_TF.fill_(float("nan"))

    monkeypatch.setattr(HiddenStates, "_read", poisoned_read)


def test_a_gradient_that_is_not_finite_names_its_step_and_rows(poisoned):
    with pytest.raises(FloatingPointError, match=r"step \d+: loss nan.*row7.*1 steps are more than"):
        train(make_config(max_skipped=0), make_states(LENGTHS))


def test_steps_of_no_use_are_skipped_named_and_counted_until_there_are_too_many(poisoned, caplog):
    states = make_states(LENGTHS)
    with caplog.at_level(logging.WARNING):
        artifact = train(make_config(epochs=3), states)
    assert artifact.summary["skipped"] == 3
    assert rows_of(artifact)[-2]["train/skipped"] == 3
    assert len([record for record in caplog.records if "row7" in record.getMessage()]) == 3
    assert all(math.isfinite(value) for row in rows_of(artifact) for value in row.values())
    assert all(weight.isfinite().all() for weight in weights(artifact).values())
    with pytest.raises(FloatingPointError, match="3 steps are more than training.max_skipped"):
        train(make_config(epochs=3, max_skipped=2), states)


def test_a_run_that_stopped_at_the_limit_of_skipped_steps_goes_on_with_a_higher_one(poisoned, caplog):
    states, config = make_states(LENGTHS), make_config(epochs=3)
    whole = train(config, states)
    expected = weights(whole), rows_of(whole)
    with pytest.raises(FloatingPointError, match="2 steps are more than training.max_skipped"):
        train(make_config(epochs=3, max_skipped=1), states)
    begun = load_newest(in_progress(training_key(config, states))).step
    assert begun > 0
    with caplog.at_level(logging.INFO):
        resumed = train(config, states)
    assert f"15 steps from step {begun}," in caplog.text
    assert same(weights(resumed), expected[0])
    assert rows_of(resumed) == expected[1]


DIVERGING = {"max_steps": 8, "epochs": 8, "warmup_share": 0, "validate_every": 4}


def test_weights_that_are_not_finite_are_never_a_checkpoint():
    states = make_states(LENGTHS)
    config = make_config(**DIVERGING, learning_rate=1e39, save_every=1)
    for _ in range(2):
        with pytest.raises(
            FloatingPointError, match="^step 1: the weights are not finite any more; lower the learning"
        ):
            train(config, states)
        assert load_newest(in_progress(training_key(config, states))) is None


def test_drafts_of_a_diverged_training_that_are_not_numbers_are_told_by_step_and_row():
    diverged = (
        r"^step 4: validation: row11: the drafter's logits after token \d+ are not numbers; lower the learning rate"
    )
    with pytest.raises(FloatingPointError, match=diverged):
        train(make_config(**DIVERGING, learning_rate=1e18), make_states(LENGTHS))


def test_a_spike_is_skipped_and_a_resumed_run_skips_the_same(caplog):
    states = make_states(LENGTHS)
    config = make_config(epochs=30, max_steps=40, spike_factor=1.0, clip_norm=1e-3, max_skipped=99)
    whole = train(config, states)
    assert 0 < whole.summary["skipped"] < 20
    expected = weights(whole), rows_of(whole)
    for steps in (25, 5):
        with pytest.raises(Stopped):
            train(config, states, should_stop=stop_after(steps))
    resumed = train(config, states)
    assert same(weights(resumed), expected[0])
    assert rows_of(resumed) == expected[1]


def test_a_second_training_of_the_same_key_waits_and_takes_what_the_first_made():
    states, config = make_states(LENGTHS), make_config(max_steps=6)
    inside, finish = threading.Event(), threading.Event()
    results = []

    def slow(done, total, note=""):
        inside.set()
        finish.wait(10)

    threads = [threading.Thread(target=lambda: results.append(train(config, states, progress=slow)))]
    threads[0].start()
    inside.wait(10)
    threads.append(threading.Thread(target=lambda: results.append(train(config, states))))
    threads[1].start()
    threads[1].join(0.3)
    assert threads[1].is_alive()
    finish.set()
    for thread in threads:
        thread.join(20)
    assert results[0] == results[1]


def test_continuing_with_other_settings_is_refused_naming_them_unless_it_was_asked_for():
    states, config = make_states(LENGTHS), make_config(max_steps=10)
    other = make_config(max_steps=10, learning_rate=1e-3, optimizer="muon")
    with pytest.raises(Stopped):
        train(config, states, should_stop=stop_after(5))
    shutil.copytree(
        in_progress(training_key(config, states)), in_progress(training_key(other, states)), dirs_exist_ok=True
    )
    changed = r"config.learning_rate: 0.003 -> 0.001, config.optimizer: adamw -> muon"
    with pytest.raises(ValueError, match=rf"step-000005 .*{changed}.*accept_changes"):
        train(other, states)
    accepted = train(other.model_copy(update={"accept_changes": True}), states)
    assert accepted.key == str(training_key(other, states))
    assert accepted.summary["steps"] == 10


def test_an_interrupted_training_of_the_same_states_is_named_with_its_step_what_differs_and_how_to_go_on(caplog):
    states, config, other = make_states(LENGTHS), make_config(max_steps=10), make_config(max_steps=10, gamma=7.0)
    with pytest.raises(Stopped):
        train(config, states, should_stop=stop_after(5))
    begun, anew = (in_progress(training_key(settings, states)) for settings in (config, other))

    def said(config, states):
        caplog.clear()
        with pytest.raises(Stopped):
            train(config, states, should_stop=stop_after(1))
        return [record.getMessage() for record in caplog.records if "beginning anew" in record.getMessage()]

    (line,) = said(other, states)
    assert f"while {begun} was interrupted at step 5 on the same hidden states (config.gamma: 10.0 -> 7.0)" in line
    assert f"copy what is in it to {anew} and set training.accept_changes" in line
    assert said(other, states) == []  # it continues
    assert said(make_config(max_steps=10, gamma=4.0), make_states(LENGTHS, seed=1)) == []
    with FileLock(data_root() / "locks" / f"{begun.name}-trainer.lock"):  # nothing was interrupted
        (line,) = said(make_config(max_steps=10, gamma=5.0), states)
    assert f"while {anew} was interrupted at step 2" in line

    shutil.copytree(begun, anew, dirs_exist_ok=True)
    accepted = train(other.model_copy(update={"accept_changes": True}), states)
    assert "continuing from step 5 with other settings, as asked" in caplog.text
    assert accepted.key == str(training_key(other, states))


def test_the_progress_note_says_how_it_goes():
    notes = []
    train(make_config(), make_states(LENGTHS), progress=lambda *said: notes.append(said[2]))
    assert re.fullmatch(r"step 1, loss \d+\.\d+, [\d,]+ tokens/s, \d+\.\d GB", notes[0])
    assert re.fullmatch(r"step 15, loss \d+\.\d+, tau \d\.\d\d, [\d,]+ tokens/s, \d+\.\d GB", notes[-1])


def test_a_drafter_may_start_from_an_earlier_one_in_another_shape_or_as_the_verifiers_layers(home):
    states = make_states(LENGTHS)
    first = train(make_config(max_steps=4), states)
    still = {"learning_rate": 1e-30, "max_steps": 1}
    again = train(make_config(**still, initialisation=str(first.path)), states)
    assert same(weights(again), weights(first))
    narrow = train(make_config(**still, shape={"intermediate_size": 16}), states)
    assert weights(narrow)["layers.0.mlp.up_proj.weight"].shape[0] == 16
    with pytest.raises(ValueError, match="intermediate_size is 40, here 16"):
        train(make_config(initialisation=str(first.path), shape={"intermediate_size": 16}), states)
    with pytest.raises(ValueError, match="initialisation: verifier needs the verifier itself"):
        train(make_config(initialisation="verifier"), states)


@pytest.mark.parametrize("labels", ["greedy", "data"])
def test_mixtures_of_losses_are_learnt_from_final_states_and_refused_without(labels):
    generator = torch.Generator().manual_seed(0)
    rows = [make_row(length, prompt=4, generator=generator) for length in LENGTHS]
    final_VH = torch.randn(61, 24, generator=generator)
    with_final = [row._replace(final_TH=final_VH[row.greedy_ids_T]) for row in rows]
    config = make_config(epochs=6, loss={"ce": 0.5, "kl": 0.2, "tv": 0.2, "lk": 0.1}, labels=labels)
    artifact = train(config, make_states(LENGTHS, rows=with_final))
    losses = [row["train/loss"] for row in rows_of(artifact) if "train/loss" in row]
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="extraction.store_final"):
        train(config, make_states(LENGTHS, rows=rows, seed=1))
