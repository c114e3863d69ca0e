import pytest
import torch

from dflash.drafter.blocks import Documents
from dflash.training.batches import add_noise, plan_steps, row_generators
from tests.training.small import LENGTHS, TAPS, make_row, pack

PLAN = {"max_tokens": 80, "seed": 0, "order": "interleaved", "epochs": 2, "accumulation": 1, "max_steps": 0}


def test_every_epoch_visits_every_row_once_and_steps_take_the_next_batches():
    rows = list(range(100, 112))
    buckets = [int(length > 30) for length in LENGTHS]
    single = plan_steps(rows, LENGTHS, buckets, **PLAN)
    for epoch in range(2):
        visited = [row for step in single if step.epoch == epoch for batch in step.hands[0] for row in batch]
        assert sorted(visited) == rows
    grouped = plan_steps(rows, LENGTHS, buckets, **PLAN | {"accumulation": 3})
    flat = [batch for step in grouped for batch in step.hands[0]]
    assert flat == [batch for step in single for batch in step.hands[0]]
    assert {len(step.hands[0]) for step in grouped[:-1]} == {3}
    assert plan_steps(rows, LENGTHS, buckets, **PLAN | {"max_steps": 3}) == single[:3]
    assert plan_steps(rows, LENGTHS, buckets, **PLAN | {"accumulation": 3, "max_steps": 2}) == grouped[:2]


def test_a_step_across_the_end_of_an_epoch_belongs_to_the_first():
    one_each = plan_steps(list(range(3)), [50] * 3, [0] * 3, **PLAN | {"accumulation": 2})
    assert [(step.epoch, len(step.hands[0])) for step in one_each] == [(0, 2), (0, 2), (1, 2)]


def test_any_number_of_ranks_shares_the_same_steps_in_equally_many_passes():
    plan = {**PLAN, "max_tokens": 40, "epochs": 1, "accumulation": 4}  # nine batches: ranks are idle at the end
    plans = {n: plan_steps(list(range(9)), LENGTHS[:9], [0] * 9, **plan, num_ranks=n) for n in (1, 2, 4)}
    for n, plan in plans.items():
        assert [sorted(step.rows) for step in plan] == [sorted(step.rows) for step in plans[1]]
        for step in plan:
            passes = [step.passes(rank) for rank in range(n)]
            assert len({len(one) for one in passes}) == 1
            counted = [row for one in passes for batch, counts, _ in one for row in batch if counts]
            assert sorted(counted) == sorted(step.rows)
    last = plans[4][-1]
    assert [len(hand) for hand in last.hands] == [1, 0, 0, 0]
    assert [counts for _, counts, _ in last.passes(3)] == [False]


def test_a_row_that_is_in_a_step_once_per_epoch_meets_other_numbers_each_time():
    plan = PLAN | {"max_tokens": 50, "epochs": 4, "accumulation": 6}  # three batches of one row: a step is two epochs
    met = []
    for n in (1, 2, 3):
        step, _ = plan_steps([7, 8, 9], [50] * 3, [0] * 3, **plan, num_ranks=n)
        passes = [one for rank in range(n) for one in step.passes(rank)]
        met.append(sorted((row, times) for one in passes for row, times in zip(one.rows, one.earlier, strict=True)))
    assert met[0] == met[1] == met[2] == [(row, times) for row in (7, 8, 9) for times in (0, 1)]
    first, second = row_generators([7, 7], [0, 1], seed=3, device="cpu")
    assert torch.rand(3, generator=first).tolist() != torch.rand(3, generator=second).tolist()


def test_rows_are_packed_one_after_the_other():
    rows = [make_row(length, prompt=3, generator=torch.Generator().manual_seed(length)) for length in (4, 7)]
    batch = pack(rows)
    assert batch.documents == Documents((4, 7))
    assert batch.features_PF.shape == (11, 48)
    assert torch.equal(batch.features_PF[4:], rows[1].features_TF)
    assert torch.equal(batch.loss_mask_P[:4], rows[0].loss_mask_T)
    assert batch.final_PH is None
    final = pack([row._replace(final_TH=row.features_TF[:, :24]) for row in rows]).final_PH
    assert torch.equal(final[:4], rows[0].features_TF[:, :24])


def test_a_row_meets_the_same_numbers_whatever_its_company():
    alone = row_generators([7], [0], seed=3, device="cpu")
    among = row_generators([5, 7], [0, 0], seed=3, device="cpu")
    other = row_generators([7], [0], seed=4, device="cpu")
    drawn = [torch.rand(3, generator=generator).tolist() for generator in (alone[0], among[1], among[0], other[0])]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert drawn[0] != drawn[3]


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
