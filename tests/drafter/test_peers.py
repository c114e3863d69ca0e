"""Independent trainers of the same method, each in a process and an environment of its own, compute what we compute."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from benchmarks.peers import Trainer, Unavailable, peers_python, write_case
from tests.drafter.small import make_config

BLOCK_SIZE = 5
GAMMA = 3.0

Steps = Callable[..., list[dict[str, float]]]


@pytest.fixture(scope="module", autouse=True)
def _peers() -> None:
    try:
        peers_python()
    except Unavailable as reason:
        pytest.skip(f"the peers' environment cannot be built: {reason}")


@pytest.fixture
def two_steps(tmp_path: Path) -> Steps:
    """The first two optimizer steps of a trainer: the second also sees what the first did to the weights."""

    def run(name: str) -> list[dict[str, float]]:
        with closing(Trainer(name, tmp_path)) as trainer:
            return [trainer.step(), trainer.step()]

    return run


def case(folder: Path, *, lengths: list[int], slot_weights: str, anchors: torch.Tensor | None = None) -> None:
    write_case(
        folder,
        make_config(block_size=BLOCK_SIZE),
        lengths=lengths,
        prompt=3,
        anchors=anchors,
        dtype="float32",
        device="cpu",
        threads=1,
        slot_weights=slot_weights,
        gamma=GAMMA,
        alpha=0.5,
        learning_rate=6e-4,
    )


def agree(ours: list[dict[str, float]], theirs: list[dict[str, float]], *, theirs_over_ours: float = 1.0) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for what in ("loss", "norm"):
            assert other[what] / theirs_over_ours == pytest.approx(mine[what], rel=1e-5), f"{what} of step {step}"


def test_loss_and_gradient_of_all_blocks_are_specforges(tmp_path: Path, two_steps: Steps) -> None:
    # rows of three lengths, every legal anchor of each, so also blocks that their row's end cuts short
    case(tmp_path, lengths=[40, 23, 9], slot_weights="decay")
    agree(two_steps("dflash"), two_steps("specforge"))


def test_dpace_weights_are_specforges_but_for_what_the_sum_is_divided_by(tmp_path: Path, two_steps: Steps) -> None:
    lengths = [40, 23, 9]
    case(tmp_path, lengths=lengths, slot_weights="dpace")
    # its sum is divided by the number of rows, ours by the number of live slots
    live = sum(min(BLOCK_SIZE - 1, length - 1 - anchor) for length in lengths for anchor in range(3, length - 1))
    agree(two_steps("dflash"), two_steps("specforge"), theirs_over_ours=live / len(lengths))


def test_loss_and_gradient_are_speculators(tmp_path: Path, two_steps: Steps) -> None:
    # it trains whole blocks only
    case(tmp_path, lengths=[40, 40], slot_weights="decay", anchors=torch.tensor([[3, 5, 20, 35], [4, 9, 11, 17]]))
    agree(two_steps("dflash"), two_steps("speculators"))
