"""Trimmed draft vocabularies: which tokens are kept, how they are stored, what is learned of labels outside."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.drafter.export import HEAD, load_drafter, save_drafter
from dflash.drafter.initialisation import initialise
from dflash.drafter.losses import OUTSIDE, slot_statistics, slot_weights
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.drafter.vocabulary import choose_tokens, kept_tokens, maps_of
from tests.drafter.small import features, make_drafter, make_ends

KEPT = torch.tensor([2, 3, 5, 7, 11, 13, 40, 60])


def trimmed(*, seed: int = 0) -> Drafter:
    drafter = make_drafter(seed=seed, draft_vocab_size=len(KEPT))
    drafter.keep(KEPT)
    return drafter


def drafted(drafter: Drafter, ends: Ends) -> torch.Tensor:
    context = drafter.context(features(9))
    return drafter.draft(ends, torch.tensor([3]), anchors_A=torch.tensor([6]), context=context)


def test_the_most_frequent_tokens_are_kept_of_equals_the_lower_id_and_the_named_ones_always() -> None:
    counts = torch.tensor([0, 5, 9, 5, 5, 0, 0, 0])
    assert choose_tokens(counts, size=4, always=[6], num_tokens=8).tolist() == [1, 2, 3, 6]
    assert choose_tokens(counts, size=6, always=[6, 2], num_tokens=8).tolist() == [0, 1, 2, 3, 4, 6]


def test_rows_of_a_padded_head_are_kept_only_where_they_are_named() -> None:
    counts = torch.tensor([0, 1, 0, 0, 9, 0])
    assert choose_tokens(counts, size=3, always=[5], num_tokens=4).tolist() == [0, 1, 5]
    assert choose_tokens(counts, size=5, always=[5], num_tokens=4).tolist() == [0, 1, 2, 3, 5]
    for size in (1, 6):
        with pytest.raises(ValueError, match=rf"draft_vocab_size: {size} is not between 2 .* and 5, "):
            choose_tokens(counts, size=size, always=[5], num_tokens=4)


def test_maps_are_a_mask_of_the_ids_and_the_offset_of_each_place() -> None:
    maps = maps_of(torch.tensor([1, 4, 5]), vocab_size=7)
    assert maps["t2d"].tolist() == [False, True, False, False, True, True, False]
    assert maps["d2t"].tolist() == [1, 3, 3]
    assert kept_tokens(maps["d2t"]).tolist() == [1, 4, 5]


def test_places_and_ids_lead_to_each_other_and_logits_are_those_of_the_whole_head() -> None:
    whole, ends = make_ends(), make_ends().for_drafter(trimmed())
    assert ends.ids(torch.arange(8)).tolist() == KEPT.tolist()
    assert ends.places(torch.tensor([2, 4, 60, 0, 61])).tolist() == [0, -1, 7, -1, -1]
    hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ends.draft_logits(hidden), whole.logits(hidden)[:, KEPT])
    assert torch.equal(ends.logits(hidden), whole.logits(hidden))
    spread = ends.over_all(ends.draft_logits(hidden).softmax(-1))
    assert spread.shape == (3, 61)
    assert torch.equal(spread[:, KEPT], ends.draft_logits(hidden).softmax(-1))
    torch.testing.assert_close(spread.sum(-1), torch.ones(3))


def test_a_trimmed_drafter_is_saved_with_its_maps_and_the_rows_of_the_head_and_drafts_the_same(tmp_path: Path) -> None:
    drafter, ends = trimmed(), make_ends()
    save_drafter(tmp_path, drafter, head_UH=ends.for_drafter(drafter).draft_head_UH)
    settings, weights = (
        json.loads((tmp_path / "config.json").read_text()),
        load_file(tmp_path / "model.safetensors"),
    )
    assert (settings["draft_vocab_size"], settings["vocab_size"]) == (8, 61)
    assert (weights["t2d"].dtype, weights["d2t"].dtype) == (torch.bool, torch.int64)
    assert torch.equal(weights[HEAD], ends.head_VH[KEPT])
    loaded = load_drafter(tmp_path, dtype=torch.bfloat16)
    assert loaded.config == drafter.config
    assert loaded.kept_U is not None
    assert torch.equal(loaded.kept_U, KEPT)
    assert loaded.fc.weight.dtype == torch.bfloat16
    loaded = load_drafter(tmp_path, dtype=torch.float32)
    assert torch.equal(drafted(loaded, ends.for_drafter(loaded)), drafted(drafter, ends.for_drafter(drafter)))


def test_a_whole_vocabulary_leaves_no_trace_in_what_is_saved(tmp_path: Path) -> None:
    save_drafter(tmp_path, make_drafter())
    assert "draft_vocab_size" not in (tmp_path / "config.json").read_text()
    assert not {"t2d", "d2t", HEAD} & load_file(tmp_path / "model.safetensors").keys()
    settings = json.loads((tmp_path / "config.json").read_text())
    assert DrafterConfig.from_json(settings | {"draft_vocab_size": 61}) == make_drafter().config, "as others write it"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("d2t", lambda d2t: d2t + 1, "d2t leads to ids from 3 to 61 in a vocabulary of 61"),
        ("d2t", lambda d2t: d2t.flip(0), "d2t leads to ids"),
        ("t2d", lambda t2d: t2d.roll(1), "t2d has 8 tokens, which are not the 8 of d2t"),
    ],
)
def test_maps_that_contradict_each_other_are_refused(tmp_path: Path, name: str, change, said: str) -> None:
    save_drafter(tmp_path, trimmed())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {name: change(weights[name]).contiguous()}, path)
    with pytest.raises(ValueError, match=f"model.safetensors: {said}"):
        load_drafter(tmp_path, dtype=torch.float32)


def test_statistics_are_those_of_a_head_of_these_rows_alone_and_labels_outside_teach_nothing() -> None:
    whole, ends = make_ends(), make_ends().for_drafter(trimmed())
    small = Ends(
        {"embed_tokens.weight": whole.embedding_VH, "lm_head.weight": whole.head_VH[KEPT]}, dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(3)
    hidden, final = (torch.randn(6, 24, generator=generator, requires_grad=True) for _ in range(2))
    labels = torch.tensor([2, 60, 4, 13, 0, 40])
    inside = torch.tensor([True, True, False, True, False, True])
    loss = {"ce": 1.0, "kl": 0.5, "tv": 0.5, "lk": 0.25}
    found = slot_statistics(hidden, labels, ends, loss=loss, final_NH=final.detach(), top_k=3)
    [gradient] = torch.autograd.grad(found.loss_N.sum(), hidden)
    places = ends.places(labels).clamp(min=0)
    expected = slot_statistics(hidden, places, small, loss=loss, final_NH=final.detach(), top_k=3)
    [expected_gradient] = torch.autograd.grad((expected.loss_N * inside).sum(), hidden)
    for name in ("loss_N", "nll_N", "rank_N", "top_values_NK"):
        assert torch.equal(getattr(found, name)[inside], getattr(expected, name)[inside])
    assert torch.equal(found.top_values_NK, expected.top_values_NK)
    assert torch.equal(gradient, expected_gradient)
    assert found.loss_N[~inside].tolist() == [0, 0]
    assert found.rank_N[~inside].tolist() == [OUTSIDE, OUTSIDE]
    assert found.nll_N[~inside].isinf().all()


@pytest.mark.parametrize("kind", ["decay", "uniform", "dpace", "tree"])
def test_slots_outside_have_no_weight_and_later_ones_have_theirs(kind: str) -> None:
    live = torch.tensor([[True, True, True, False]])
    rank = torch.tensor([[0, OUTSIDE, 3, 0]])
    nll = torch.tensor([[0.1, torch.inf, 2.0, 0.0]])
    weights, normaliser = slot_weights(kind, live, nll_AS=nll, rank_AS=rank, gamma=4.0, alpha=0.5, budget=8)
    assert weights.isfinite().all()
    assert weights[0, 1] == weights[0, 3] == 0
    assert weights[0, 0] > 0
    assert weights[0, 2] > 0
    assert normaliser.item() == pytest.approx(2 if kind in ("dpace", "tree") else weights.sum().item())


def test_the_same_weights_start_a_drafter_of_another_vocabulary(tmp_path: Path) -> None:
    save_drafter(tmp_path, make_drafter(seed=1))
    drafter = trimmed()
    assert initialise(drafter, str(tmp_path)) == []
    assert torch.equal(drafter.fc.weight, make_drafter(seed=1).fc.weight)
    assert drafter.kept_U is not None
    assert torch.equal(drafter.kept_U, KEPT)
    save_drafter(tmp_path, drafter, head_UH=make_ends().head_VH[KEPT])
    whole = make_drafter()
    initialise(whole, str(tmp_path))
    assert torch.equal(whole.fc.weight, drafter.fc.weight)
    assert initialise(trimmed(), "random") == sorted(whole.weights())


def test_a_draft_vocabulary_is_a_part_of_all() -> None:
    with pytest.raises(ValueError, match="draft vocabulary of 61 is no part of 61 tokens"):
        make_drafter(draft_vocab_size=61)
