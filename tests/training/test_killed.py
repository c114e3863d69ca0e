"""Training killed without warning, again and again, at random steps and inside saves: nothing of it is left to see."""

import multiprocessing
import os
import random
import time

import pytest
import torch

from dflash.keys import training_key
from dflash.manifests import in_progress
from dflash.training.loop import train
from tests.training.small import LENGTHS, make_config, make_states
from tests.training.test_loop import rows_of, same, weights

CONTEXT = multiprocessing.get_context("forkserver")  # loads torch once, and is itself not threaded
CONTEXT.set_forkserver_preload(["tests.training.test_killed"])


def train_in(home: str, config, states) -> None:
    os.environ["DFLASH_HOME"] = home
    torch.set_num_threads(1)
    train(config, states)


def kill_when(condition, config, states) -> None:
    process = CONTEXT.Process(target=train_in, args=(os.environ["DFLASH_HOME"], config, states))
    process.start()
    deadline = time.monotonic() + 60
    while not condition():
        assert process.is_alive(), "it was to be killed before it ends"
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    process.kill()
    process.join()


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "slot_weights": "dpace", "dtype": "bfloat16"}])
def test_killed_at_any_moment_and_run_again_it_ends_bit_identical(home, changes):
    torch.set_num_threads(1)
    states = make_states(LENGTHS, validation=3)
    often = {"max_steps": 90, "epochs": 90, "save_every": 3, "validate_every": 10, "log_every": 7, "keep_last": 3}
    everything = {
        "ema": 0.8,
        "spike_factor": 1.5,
        "clip_norm": 0.01,
        "max_skipped": 99,
        "patience": 4,
        "accumulation": 2,
    }
    config = make_config(**often | everything | changes)
    whole = train(config, states)
    expected, rows, best = weights(whole), rows_of(whole), whole.summary["best"]
    folder, rng = in_progress(training_key(config, states)), random.Random(0)

    def newest() -> int:
        return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)

    def inside_a_save() -> bool:
        return any(int(path.name[6:]) > seen + 3 for path in folder.glob(".step-*"))

    def a_while_later() -> bool:
        if newest() <= seen + 3:
            return False
        time.sleep(rng.random() * 0.1)
        return True

    for condition in [inside_a_save, a_while_later, inside_a_save, a_while_later, a_while_later]:
        seen = newest()
        kill_when(condition, config, states)
    resumed = train(config, states)
    assert same(weights(resumed), expected)
    assert rows_of(resumed) == rows
    assert resumed.summary["best"] == best
