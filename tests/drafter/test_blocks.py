import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.drafter.blocks import Documents, block_labels, legal_anchors, sample_anchors

masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


def pack(rows: list[list[bool]]) -> tuple[torch.Tensor, Documents]:
    return torch.tensor([flag for row in rows for flag in row]), Documents(tuple(map(len, rows)))


def generators(count: int, *, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 * seed + i) for i in range(count)]


def test_documents_know_where_each_token_is():
    documents = Documents((3, 1, 4))
    assert (documents.total, documents.offsets) == (8, (0, 3, 4, 8))
    assert documents.positions_P(torch.device("cpu")).tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    first, end = documents.around(torch.tensor([0, 2, 3, 4, 7, 8]))
    assert first.tolist() == [0, 0, 3, 4, 4, 4]
    assert end.tolist() == [3, 3, 4, 8, 8, 8]


def test_an_anchor_is_supervised_opens_a_supervised_slot_and_has_context():
    mask, documents = pack([[1, 1, 1, 0, 1, 0, 1, 1], [1, 1, 1], [1], [1, 1]])
    assert legal_anchors(mask, documents).nonzero()[:, 0].tolist() == [1, 6, 9]


@given(masks, st.integers(1, 14), st.integers(0, 5))
@settings(max_examples=60)
def test_sampled_anchors_are_legal_distinct_ascending_and_as_many_as_there_can_be(rows, num_anchors, seed):
    mask, documents = pack(rows)
    anchors = sample_anchors(mask, documents, num_anchors=num_anchors, generators=generators(len(rows), seed=seed))
    assert anchors.tolist() == sorted(set(anchors.tolist()))
    legal = legal_anchors(mask, documents)
    assert legal[anchors].all()
    for first, length in zip(documents.offsets, documents.lengths, strict=False):
        chosen = ((anchors >= first) & (anchors < first + length)).sum()
        assert chosen == min(num_anchors, int(legal[first : first + length].sum()))


@given(masks, st.integers(1, 14))
@settings(max_examples=30)
def test_a_document_meets_the_same_anchors_whatever_its_company(rows, num_anchors):
    mask, documents = pack(rows)
    together = sample_anchors(mask, documents, num_anchors=num_anchors, generators=generators(len(rows)))
    alone = [
        first + sample_anchors(*pack([row]), num_anchors=num_anchors, generators=[generator])
        for first, row, generator in zip(documents.offsets, rows, generators(len(rows)), strict=False)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_every_legal_anchor_is_drawn_equally_often():
    mask, documents = pack([[False] * 2 + [True] * 9])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(11)
    for _ in range(2000):
        counts[sample_anchors(mask, documents, num_anchors=2, generators=[generator])] += 1
    assert counts[2:10].min() > 430
    assert counts[2:10].max() < 570


def test_labels_are_the_verifiers_choices_at_the_same_position_and_stop_at_a_hole_or_the_documents_end():
    ids = torch.arange(100, 116)  # greedy_ids[t] is the choice for the token after t
    mask, documents = pack([[1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1]])
    anchors = torch.tensor([3, 7, 10, 13])
    labels, live = block_labels(ids, mask, documents, anchors_A=anchors, block_size=5)
    assert labels[0].tolist() == [103, 104, 105, 106]
    assert live.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert labels[2, 0] == 110


def test_a_response_of_two_tokens_keeps_its_only_anchor_and_trains_its_only_slot():
    mask, documents = pack([[0, 0, 1, 1], [0, 1, 1]])
    anchors = sample_anchors(mask, documents, num_anchors=512, generators=generators(2))
    assert anchors.tolist() == [2, 5]
    _, live = block_labels(torch.arange(7), mask, documents, anchors_A=anchors, block_size=16)
    assert live.sum(-1).tolist() == [1, 1]
    assert live[:, 0].all()
