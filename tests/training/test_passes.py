import logging

import pytest
import torch

from dflash.hidden.store import HiddenStates, Row
from dflash.training import loop
from dflash.training.batches import Pass
from dflash.training.loop import Stopped, train
from dflash.training.optimizers import make_optimizers, missing_moments
from dflash.training.passes import Passes, Size, largest, size_of
from tests.drafter.small import make_drafter
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_loop import rows_of, same, stop_after, weights


@pytest.fixture(autouse=True)
def _own_root(home):
    torch.set_num_threads(1)


@pytest.fixture
def seen(monkeypatch):
    """Step, rows, noise and whether there are metrics of trees, of each pass that is made."""
    calls, backward = [], Passes.backward

    def watched(self, one, states, *, step, std, tree_metrics):
        calls.append((step, one.rows, std, tree_metrics))
        return backward(self, one, states, step=step, std=std, tree_metrics=tree_metrics)

    monkeypatch.setattr(Passes, "backward", watched)
    return calls


def row(length: int, supervised: int) -> Row:
    return Row(id="", category="", split="train", bucket=0, length=length, num_supervised=supervised, shard=0, start=0)


def test_the_largest_micro_batch_has_the_most_tokens_and_slots_together():
    rows = [row(900, 20), row(300, 200), row(300, 200), row(2, 1)]
    one, two, none = (Pass(numbers, True, [0] * len(numbers)) for numbers in ([0], [1, 2], [3]))
    assert size_of(one, rows, num_anchors=64) == Size(tokens=900, anchors=19)
    assert size_of(two, rows, num_anchors=64) == Size(tokens=600, anchors=128)
    assert size_of(none, rows, num_anchors=64) == Size(tokens=2, anchors=0)
    assert largest([one, two, none], rows, num_anchors=64, block_size=16) == [two]
    assert largest([one, two, none], rows, num_anchors=1, block_size=16) == [one]
    assert largest([], rows, num_anchors=64, block_size=16) == []


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "accumulation": 2, "dtype": "bfloat16"}])
def test_the_largest_micro_batch_comes_first_with_all_metrics_in_every_process_and_changes_nothing(
    monkeypatch, seen, caplog, changes
):
    states, config = make_states(LENGTHS), make_config(epochs=6, max_steps=6, noise_end=0.1, log_every=7, **changes)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "largest", lambda *_args, **_kwargs: [])
        without = train(config, states)
    expected, passes = (weights(without), rows_of(without)), seen[:]
    seen.clear()
    with pytest.raises(Stopped), caplog.at_level(logging.INFO):
        train(config, states, should_stop=stop_after(3))
    resumed = train(config, states)
    assert same(weights(resumed), expected[0])
    assert rows_of(resumed) == expected[1]

    half = 3 * changes.get("accumulation", 1)
    rehearsals = [seen.pop(0), seen.pop(half)]
    assert seen == passes
    rows = HiddenStates.open(states.path).rows
    for (_, rehearsed, std, tree_metrics), ahead in zip(rehearsals, [passes, passes[half:]], strict=True):
        candidates = [Pass(numbers, True, []) for _, numbers, _, _ in ahead]
        assert [rehearsed] == [one.rows for one in largest(candidates, rows, num_anchors=6, block_size=5)]
        assert (std, tree_metrics) == (0.1, True)
    assert "the largest micro-batch fits into memory" in caplog.text


def test_a_micro_batch_that_does_not_fit_is_told_before_the_first_step(monkeypatch):
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.")

    steps = []
    monkeypatch.setattr("dflash.training.passes.block_loss", full)
    said = (
        r"^training.max_tokens_per_batch: the largest micro-batch, of \d+ tokens and \d+ anchors, does not fit into "
        r"memory \(CUDA out of memory. Tried to allocate 2.00 GiB\); lower it, or training.num_anchors$"
    )
    with pytest.raises(MemoryError, match=said):
        train(make_config(), make_states(LENGTHS), progress=lambda done, *_: steps.append(done))
    assert steps == []


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_memory_that_is_held_for_moments_is_theirs(kind):
    drafter = make_drafter()
    rates = {"learning_rate": 0.1, "muon_learning_rate": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizers = make_optimizers(drafter, kind=kind, **rates)
    held = sum(tensor.nbytes for tensor in missing_moments(optimizers))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    assert held == sum(value.nbytes for state in states for name, value in state.items() if name != "step")
    assert missing_moments(optimizers) == []
