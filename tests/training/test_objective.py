import pytest
import torch

from dflash.config import TrainingConfig
from dflash.decoding.ddtree import accepted_within, best_first, label_order, top_tokens
from dflash.drafter.blocks import Documents, block_labels
from dflash.drafter.model import Ends
from dflash.training.batches import Batch
from dflash.training.metrics import TREE_BUDGETS
from dflash.training.objective import block_loss
from tests.drafter.small import features, make_drafter, make_ends

LENGTHS = (14, 9)
ANCHORS = torch.tensor([3, 5, 11, 16, 20])


def make_batch(*, final: torch.Tensor | None = None) -> Batch:
    generator = torch.Generator().manual_seed(7)
    total = sum(LENGTHS)
    return Batch(
        Documents(LENGTHS),
        features_PF=features(total),
        input_ids_P=torch.randint(60, (total,), generator=generator),
        loss_mask_P=torch.ones(total, dtype=torch.bool),
        greedy_ids_P=torch.randint(60, (total,), generator=generator),
        final_PH=final,
    )


def block_loss_of(batch: Batch, **changes):
    settings = {
        "features_PF": batch.features_PF,
        "anchors_A": ANCHORS,
        "labels": "greedy",
        "loss": {"ce": 1.0},
        "weights": "uniform",
        "gamma": 10.0,
        "alpha": 0.5,
        "tree_budget": 64,
        "tree_metrics": False,
    }
    drafter = make_drafter()
    loss, counted = block_loss(drafter, make_ends(), batch, **(settings | changes))
    return drafter, loss, counted


def test_data_labels_are_the_documents_own_tokens():
    batch = make_batch()
    follows = torch.cat([part.roll(-1) for part in batch.input_ids_P.split(LENGTHS)])
    said = Batch(**(vars(batch) | {"greedy_ids_P": follows}))
    _, own, _ = block_loss_of(batch, labels="data")
    _, greedy, _ = block_loss_of(said, labels="greedy")
    assert own.item() == greedy.item()
    assert own.item() != block_loss_of(batch)[1].item()


def test_the_final_state_before_a_label_is_compared_with_the_slot_of_that_label():
    """Verifier states that say the labels for certain make KL the cross-entropy of the labels."""
    ends, batch = make_ends(), make_batch()
    certain = 40 * ends.head_VH[batch.greedy_ids_P]
    assert torch.equal(ends.logits(certain).argmax(-1), batch.greedy_ids_P)
    _, ce, _ = block_loss_of(batch)
    _, kl, _ = block_loss_of(make_batch(final=certain), loss={"kl": 1.0})
    assert kl.item() == pytest.approx(ce.item(), rel=1e-5)


def test_metrics_of_trees_are_those_of_decoding():
    batch = make_batch()
    drafter, _, counted = block_loss_of(batch, tree_metrics=True, tree_budget=5)
    metrics = counted.metrics()
    labels, live = block_labels(
        batch.greedy_ids_P, batch.loss_mask_P, batch.documents, anchors_A=ANCHORS, block_size=drafter.config.block_size
    )
    accepted = dict.fromkeys((5, *TREE_BUDGETS), 0)
    with torch.no_grad():
        context = drafter.context(batch.features_PF, batch.documents)
        hidden = drafter.draft(make_ends(), batch.input_ids_P[ANCHORS], anchors_A=ANCHORS, context=context)
        values, ids = top_tokens(make_ends().logits(hidden).log_softmax(-1), 61)
    order = label_order(best_first(values, ids, budget=256), labels, live)
    for budget in accepted:
        expected = accepted_within(order, budget).double().mean().item()
        assert metrics[f"ddtree_accept@{budget}"] == pytest.approx(expected)
    assert metrics["ddtree_accept@256"] > 0
    assert not any("accept@" in name for name in block_loss_of(batch)[2].metrics())


def test_documents_are_counted_in_their_groups():
    groups = torch.tensor([[0, 2], [1, 2]])
    _, loss, counted = block_loss_of(make_batch(), groups_DX=groups, num_groups=3)
    slots = counted.columns.index("blocks")
    assert counted.sums[:, slots].tolist() == [5, 3, 2, 5]
    assert counted.loss.item() == pytest.approx(loss.item(), rel=1e-6)


def test_parts_of_a_batch_add_up_to_its_loss_and_gradient():
    batch = make_batch()
    for weights in ("decay", "dpace", "tree"):
        drafter, loss, counted = block_loss_of(batch, weights=weights)
        loss.backward()
        whole = drafter.fc.weight.grad
        gradients, sums = 0, 0
        for part in ANCHORS.split(2):
            drafter, loss, part_counted = block_loss_of(batch, weights=weights, anchors_A=part)
            loss.backward()
            gradients, sums = gradients + drafter.fc.weight.grad, sums + part_counted.sums
        torch.testing.assert_close(gradients, whole, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sums, counted.sums, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("budget", [1, 3_000])
def test_no_projection_is_larger_than_the_memory_of_the_loss_and_any_memory_gives_the_same(monkeypatch, final, budget):
    states = 40 * make_ends().head_VH[make_batch().greedy_ids_P] if final else None
    settings = {"tree_metrics": True} | ({"loss": {"ce": 0.5, "kl": 0.5}} if final else {})
    drafter, expected, counted = block_loss_of(make_batch(final=states), **settings)
    expected.backward()
    sizes, project = [], Ends.draft_logits
    monkeypatch.setattr(Ends, "draft_logits", lambda ends, hidden: sizes.append(len(hidden)) or project(ends, hidden))
    bytes_of_a_slot = 61 * 4 * (3 if final else 2)  # logits and their gradient; the verifier's logits

    def within(**given):
        sizes.clear()
        mine, loss, parts = block_loss_of(make_batch(final=states), **settings, **given)
        loss.backward()
        assert max(sizes) * bytes_of_a_slot <= max(budget, bytes_of_a_slot)  # one slot is the least
        assert len(sizes) > 2
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(parts.sums, counted.sums, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.fc.weight.grad, drafter.fc.weight.grad, rtol=1e-4, atol=1e-5)

    within(memory_bytes=budget)
    monkeypatch.setattr("dflash.drafter.losses.MEMORY_BYTES", budget)
    within()


def test_no_anchors_give_no_loss_but_a_graph():
    _, loss, counted = block_loss_of(make_batch(), anchors_A=ANCHORS[:0], tree_metrics=True)
    loss.backward()
    assert loss.item() == 0
    assert counted.metrics() == {}


def test_weights_for_trees_are_refused_for_a_chain():
    with pytest.raises(ValueError, match="tree_budget 0"):
        TrainingConfig(mask_token_id=1, slot_weights="tree", tree_budget=0)
