import math

from dflash.training.spikes import Steadiness


def after(norms):
    steadiness = Steadiness()
    for norm in norms:
        steadiness = steadiness.accepted(norm)
    return steadiness


def test_what_is_not_finite_is_refused_from_the_first_step_on():
    for loss, norm in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)):
        assert (
            Steadiness().objection(loss=loss, grad_norm=norm, spike_factor=0, clip_norm=1)
            == f"loss {loss:g}, gradient norm {norm:g}"
        )
    assert not Steadiness().objection(loss=1.0, grad_norm=1e30, spike_factor=2, clip_norm=1)


def test_a_spike_is_judged_by_the_median_of_recent_norms_once_there_are_twenty():
    assert not after([1.0] * 19).objection(loss=1.0, grad_norm=1e9, spike_factor=10, clip_norm=1)
    assert "more than 10 times the usual 1" in after([1.0] * 20).objection(
        loss=1.0, grad_norm=10.1, spike_factor=10, clip_norm=1
    )
    assert not after([1.0] * 20).objection(loss=1.0, grad_norm=10.0, spike_factor=10, clip_norm=1)
    assert not after([1.0] * 20).objection(loss=1.0, grad_norm=1e9, spike_factor=0, clip_norm=1)
    risen = after([1.0] * 60 + [5.0] * 60)
    assert len(risen.norms) == 100
    assert not risen.objection(loss=1.0, grad_norm=49.0, spike_factor=10, clip_norm=1)


def test_skipped_steps_leave_what_is_usual_as_it_was():
    assert after([1.0] * 20).skipped_one().skipped_one() == Steadiness([1.0] * 20, 2)


def test_a_gradient_that_is_not_clipped_is_no_spike():
    assert not after([1e-6] * 20).objection(loss=1.0, grad_norm=1.0, spike_factor=10, clip_norm=1)
    assert after([1e-6] * 20).objection(loss=1.0, grad_norm=1.01, spike_factor=10, clip_norm=1)
