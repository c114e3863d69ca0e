import pytest

from dflash.training.schedules import derived_seed, learning_rate_factor, noise_std


def test_the_learning_rate_rises_to_its_peak_and_falls_along_a_cosine_to_zero():
    factors = [learning_rate_factor(step, total=100, warmup_share=0.1) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11)
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_noise_ramps_from_zero_during_warmup_and_stays():
    stds = [noise_std(step, total=100, warmup_share=0.1, peak=0.05) for step in range(100)]
    assert stds[0] == 0.0
    assert stds[5] == pytest.approx(0.025)
    assert set(stds[10:]) == {0.05}


@pytest.mark.parametrize("warmup_share", [0.0, 1.0])
def test_without_warmup_or_with_nothing_else_the_corners_hold(warmup_share):
    factors = [learning_rate_factor(step, total=5, warmup_share=warmup_share) for step in range(5)]
    stds = [noise_std(step, total=5, warmup_share=warmup_share, peak=1.0) for step in range(5)]
    assert all(0 < factor <= 1 for factor in factors)
    assert stds == ([1.0] * 5 if warmup_share == 0 else [0.0, 0.2, 0.4, 0.6, 0.8])


def test_seeds_are_a_function_of_their_parts():
    assert derived_seed(0, 5) == derived_seed(0, 5)
    assert len({derived_seed(seed, step, part) for seed in range(3) for step in range(3) for part in range(3)}) == 27
