import pytest

from dflash.training.schedules import derived_seed, learning_rate_factor, noise_std

KINDS = ["cosine", "wsd", "linear"]


def factors(kind, *, total=100, warmup_share=0.1, decay_share=0.2):
    settings = {"total": total, "warmup_share": warmup_share, "decay_share": decay_share}
    return [learning_rate_factor(step, kind=kind, **settings) for step in range(total + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_zero(kind):
    found = factors(kind)
    assert found[0] == pytest.approx(1 / 11)
    assert found[10] == 1.0
    assert found[100] == pytest.approx(0.0)
    assert found[:11] == sorted(found[:11])
    assert found[10:] == sorted(found[10:], reverse=True)


def test_between_warmup_and_end_each_schedule_has_its_shape():
    assert factors("cosine")[55] == pytest.approx(0.5)
    assert factors("cosine")[32] == pytest.approx(0.5 * (1 + 0.5**0.5), abs=0.01)
    assert factors("linear")[55] == pytest.approx(0.5)
    assert factors("linear")[28] == pytest.approx(0.8)
    assert set(factors("wsd")[10:81]) == {1.0}
    assert factors("wsd")[90] == pytest.approx(0.5)
    assert factors("wsd", decay_share=0.0)[99] == 1.0
    assert factors("wsd", decay_share=1.0) == factors("linear")


def noise(*, start, end, total=100, warmup_share=0.1):
    return [noise_std(step, total=total, warmup_share=warmup_share, start=start, end=end) for step in range(total)]


def test_noise_ramps_from_zero_during_warmup_and_goes_linearly_to_its_end():
    stds = noise(start=0.05, end=0.01)
    assert stds[0] == 0.0
    assert stds[5] == pytest.approx(0.025)
    assert stds[10] == 0.05
    assert stds[99] == pytest.approx(0.01)
    assert stds[10] - stds[11] == pytest.approx(0.04 / 89)
    assert set(noise(start=0.05, end=0.05)[10:]) == {0.05}
    assert set(noise(start=0.0, end=0.0)) == {0.0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup_share", [0.0, 1.0])
def test_without_warmup_or_with_nothing_else_the_corners_hold(kind, warmup_share):
    assert all(0 < factor <= 1 for factor in factors(kind, total=5, warmup_share=warmup_share)[:5])
    stds = noise(start=1.0, end=1.0, total=5, warmup_share=warmup_share)
    assert stds == ([1.0] * 5 if warmup_share == 0 else [0.0, 0.2, 0.4, 0.6, 0.8])
    assert factors(kind, total=1, warmup_share=0.0)[0] == 1.0
    assert noise(start=0.5, end=0.1, total=1, warmup_share=0.0) == [0.5]


def test_seeds_are_a_function_of_their_parts():
    assert derived_seed(0, 5) == derived_seed(0, 5)
    assert len({derived_seed(seed, step, part) for seed in range(3) for step in range(3) for part in range(3)}) == 27
