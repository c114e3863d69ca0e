import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.drafter.blocks import block_labels, legal_anchors, sample_anchors

masks = st.lists(st.lists(st.booleans(), min_size=12, max_size=12), min_size=1, max_size=3)


def test_an_anchor_is_supervised_opens_a_supervised_slot_and_has_context():
    mask = torch.tensor([True, True, True, False, True, False, True, True])
    assert legal_anchors(mask).nonzero()[:, 0].tolist() == [1, 6]


@given(masks, st.integers(1, 14), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_sampled_anchors_are_legal_distinct_ascending_and_as_many_as_there_can_be(rows, num_anchors, seed):
    mask = torch.tensor(rows)
    anchors, valid = sample_anchors(mask, num_anchors=num_anchors, generator=torch.Generator().manual_seed(seed))
    for row, legal in enumerate(legal_anchors(mask)):
        chosen = anchors[row][valid[row]].tolist()
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(legal.nonzero()[:, 0].tolist())
        assert len(chosen) == min(num_anchors, int(legal.sum()))
    assert (anchors[~valid] == 1).all()


def test_every_legal_anchor_is_drawn_equally_often():
    mask = torch.tensor([[False] * 2 + [True] * 9])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(11)
    for _ in range(2000):
        counts[sample_anchors(mask, num_anchors=2, generator=generator)[0][0]] += 1
    assert counts[2:10].min() > 430
    assert counts[2:10].max() < 570


def test_labels_are_the_verifiers_choices_at_the_same_position_and_stop_at_a_hole_or_the_end():
    ids = torch.arange(100, 112)[None]  # greedy_ids[t] is the choice for position t + 1
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]]).bool()
    anchors, valid = torch.tensor([[1, 5, 8, 1]]), torch.tensor([[True, True, True, False]])
    labels, live = block_labels(
        ids, mask, lengths_B=torch.tensor([10]), anchors_BA=anchors, valid_BA=valid, block_size=5
    )
    assert labels[0, 0].tolist() == [101, 102, 103, 104]
    assert live[0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert labels[0, 2, 0] == 108
