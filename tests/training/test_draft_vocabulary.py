"""Training with a trimmed draft vocabulary: chosen from the training rows, published whole, resumed bit-identical."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dflash.drafter.export import HEAD, load_drafter
from dflash.hidden.store import HiddenStates
from dflash.manifests import home as root
from dflash.training.data import label_counts
from dflash.training.loop import Stopped, train
from tests.training.small import LENGTHS, MASK, VOCAB, make_config, make_row, make_states

SIZE = 9


@pytest.fixture(autouse=True)
def _own_root(home):
    torch.set_num_threads(1)


def test_labels_are_counted_as_they_are_trained_on():
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(length, prompt=4, generator=generator) for length in (20, 24)]
    store = HiddenStates.open(make_states([20, 24], rows=rows).path)
    for labels in ("greedy", "data"):
        said = [row.greedy_ids_T[3:-1] if labels == "greedy" else row.input_ids_T[4:] for row in rows]
        for chosen in ([0], [1], [0, 1]):
            expected = torch.bincount(torch.cat([said[number] for number in chosen]), minlength=VOCAB)
            assert torch.equal(label_counts(store, chosen, labels=labels, vocab_size=VOCAB), expected)


def test_training_chooses_from_its_rows_and_publishes_what_engines_need():
    states = make_states(LENGTHS)
    artifact = train(make_config(draft_vocab_size=SIZE), states)
    store = HiddenStates.open(states.path)
    training = [number for number, row in enumerate(store.rows) if row.split == "train"]
    counts = label_counts(store, training, labels="greedy", vocab_size=VOCAB)
    best = set(counts.argsort(descending=True, stable=True)[: SIZE - 1].tolist())
    drafter = load_drafter(artifact.path, dtype=torch.float32)
    assert set(drafter.kept_U.tolist()) == best | {MASK}
    weights = load_file(artifact.path / "model.safetensors")
    assert torch.equal(weights[HEAD], store.frozen()["lm_head.weight"][drafter.kept_U])

    covered = counts[drafter.kept_U].sum().item() / counts.sum().item()
    assert artifact.summary["draft_vocabulary"]["size"] == SIZE
    assert artifact.summary["draft_vocabulary"]["coverage"]["train"] == pytest.approx(covered)
    assert covered < 0.6
    rows = [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "train/recall@64" in row][-1]
    assert last["train/accuracy"] <= last["train/recall@64"] < 0.7, "64 tokens are all there are, but some are outside"
    assert [row for row in rows if "validation/acceptance_length/chain" in row]


def test_an_interrupted_training_ends_with_the_same_drafter():
    states = make_states(LENGTHS)
    config = make_config(draft_vocab_size=SIZE, epochs=1, slot_weights="dpace")
    whole = load_file(train(config, states).path / "model.safetensors")
    shutil.rmtree(root() / "artifacts" / "training")
    steps = iter([False, False, True])
    with pytest.raises(Stopped):
        train(config, states, should_stop=lambda: next(steps, True))
    resumed = load_file(train(config, states).path / "model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_more_tokens_than_there_are_and_too_few_are_refused():
    states = make_states(LENGTHS)
    for size in (1, VOCAB):
        with pytest.raises(ValueError, match=f"{size} is (not between|no part)"):
            train(make_config(draft_vocab_size=size), states)
