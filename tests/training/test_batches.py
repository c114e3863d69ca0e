import threading

import pytest
import torch

from dflash.drafter.blocks import Documents
from dflash.hidden.store import RowStates
from dflash.training.batches import add_noise, collate, plan_steps, read_ahead
from tests.training.small import LENGTHS, TAPS, make_row

PLAN = {"max_tokens": 80, "seed": 0, "epochs": 2, "accumulation": 1, "max_steps": 0}


def test_every_epoch_visits_every_row_once_and_steps_take_the_next_batches():
    rows = list(range(100, 112))
    buckets = [int(length > 30) for length in LENGTHS]
    single = plan_steps(rows, LENGTHS, buckets, **PLAN)
    for epoch in range(2):
        visited = [row for step in single if step.epoch == epoch for batch in step.micro_batches for row in batch]
        assert sorted(visited) == rows
    grouped = plan_steps(rows, LENGTHS, buckets, **PLAN | {"accumulation": 3})
    flat = [batch for step in grouped for batch in step.micro_batches]
    assert flat == [batch for step in single for batch in step.micro_batches]
    assert {len(step.micro_batches) for step in grouped[:-1]} == {3}
    assert plan_steps(rows, LENGTHS, buckets, **PLAN | {"max_steps": 3}) == single[:3]
    assert plan_steps(rows, LENGTHS, buckets, **PLAN | {"accumulation": 3, "max_steps": 2}) == grouped[:2]


def test_a_step_across_the_end_of_an_epoch_belongs_to_the_first():
    one_each = plan_steps(list(range(3)), [50] * 3, [0] * 3, **PLAN | {"accumulation": 2})
    assert [(step.epoch, len(step.micro_batches)) for step in one_each] == [(0, 2), (0, 2), (1, 2)]


def test_rows_are_packed_one_after_the_other():
    rows = [make_row(length, prompt=3, generator=torch.Generator().manual_seed(length)) for length in (4, 7)]
    batch = collate(rows)
    assert batch.documents == Documents((4, 7))
    assert batch.features_PF.shape == (11, 48)
    assert torch.equal(batch.features_PF[4:], rows[1].features_TF)
    assert torch.equal(batch.loss_mask_P[:4], rows[0].loss_mask_T)
    assert batch.final_PH is None
    final = collate([row._replace(final_TH=row.features_TF[:, :24]) for row in rows]).final_PH
    assert torch.equal(final[:4], rows[0].features_TF[:, :24])


def test_reading_ahead_keeps_the_order_and_ends_its_thread():
    rows = [RowStates(*make_row(4, prompt=1, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    ahead = read_ahead(lambda numbers: collate([rows[i] for i in numbers]), [[i] for i in range(6)])
    first = next(ahead)
    assert torch.equal(first.input_ids_P, rows[0].input_ids_T)
    assert torch.equal(next(ahead).input_ids_P, rows[1].input_ids_T)
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_an_exception_while_reading_is_raised_at_its_batch():
    def load(numbers):
        if numbers == [2]:
            raise ValueError("row 2 is damaged")
        return collate([make_row(4, prompt=1, generator=torch.Generator().manual_seed(0))])

    ahead = read_ahead(load, [[0], [1], [2]])
    next(ahead)
    next(ahead)
    with pytest.raises(ValueError, match="row 2"):
        next(ahead)


def test_noise_has_the_std_asked_for_in_units_of_each_taps_rms():
    features = torch.randn(100, TAPS * 400, generator=torch.Generator().manual_seed(0))
    features[..., 400:] *= 30
    documents, settings = Documents((60, 40)), {"num_taps": TAPS, "std": 0.05}

    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    noisy = add_noise(features, documents, **settings, generators=generators(1, 2))
    for tap, rms in ((slice(0, 400), 1.0), (slice(400, None), 30.0)):
        assert (noisy - features)[..., tap].std().item() == pytest.approx(0.05 * rms, rel=0.03)
    assert add_noise(features, documents, **settings | {"std": 0.0}, generators=generators(1, 2)) is features
    alone = add_noise(features[60:], Documents((40,)), **settings, generators=generators(2))
    assert torch.equal(alone, noisy[60:]), "a row's noise does not depend on its company"
    assert add_noise(features.bfloat16(), documents, **settings, generators=generators(1, 2)).dtype == torch.bfloat16
