import torch

from dflash.drafter.blocks import Documents
from dflash.drafter.model import Ends
from tests.drafter.small import features, make_drafter, make_ends


def test_a_block_sees_no_feature_at_or_after_its_anchor_and_every_one_before_it_also_if_another_block_overlaps():
    drafter, ends, states = make_drafter(), make_ends(), features(30)
    anchors = torch.tensor([4, 6, 20])
    ids = torch.tensor([7, 8, 9])
    original = drafter.draft(ends, ids, anchors_A=anchors, context=drafter.context(states))
    for position in range(30):
        changed = states.clone()
        changed[position] += torch.randn(48, generator=torch.Generator().manual_seed(3))
        outputs = drafter.draft(ends, ids, anchors_A=anchors, context=drafter.context(changed))
        for block, anchor in enumerate(anchors.tolist()):
            same = torch.equal(outputs[block], original[block])
            assert same == (position >= anchor), f"feature {position}, anchor {anchor}"


def test_many_anchors_at_once_equal_each_alone_with_a_context_grown_bit_by_bit():
    drafter, ends, states = make_drafter(), make_ends(), features(30)
    anchors, ids = torch.tensor([1, 4, 6, 20, 29]), torch.tensor([5, 7, 8, 9, 11])
    together = drafter.draft(ends, ids, anchors_A=anchors, context=drafter.context(states))
    context = drafter.context(states[:1])
    for block, anchor in enumerate(anchors.tolist()):
        if anchor > context.length:
            context.append(drafter.context(states[context.length : anchor], start=context.length))
        one = slice(block, block + 1)
        alone = drafter.draft(ends, ids[one], anchors_A=anchors[one], context=context)
        torch.testing.assert_close(alone[0], together[block], rtol=1e-4, atol=1e-5)
        assert torch.equal(ends.logits(alone).argmax(-1)[0], ends.logits(together).argmax(-1)[block])


def test_blocks_that_overlap_do_not_see_each_other():
    drafter, ends = make_drafter(), make_ends()
    context, anchors = drafter.context(features(30)), torch.tensor([4, 6, 7])
    original = drafter.draft(ends, torch.tensor([7, 8, 9]), anchors_A=anchors, context=context)
    changed = drafter.draft(ends, torch.tensor([7, 21, 9]), anchors_A=anchors, context=context)
    assert torch.equal(changed[[0, 2]], original[[0, 2]])
    assert not torch.equal(changed[1], original[1])


def test_slots_of_a_block_see_each_other_in_both_directions():
    drafter, states = make_drafter(), features(10)
    blocks = torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(4))
    anchors, context = torch.tensor([6]), drafter.context(states)
    original = drafter(blocks, anchors_A=anchors, context=context)
    for slot in range(5):
        changed = blocks.clone()
        changed[:, slot] += 1
        outputs = drafter(changed, anchors_A=anchors, context=context)
        assert (outputs != original).any(-1).all()


def test_packed_documents_do_not_meet_and_draft_as_each_alone():
    drafter, ends, states = make_drafter(), make_ends(), features(24)
    documents, anchors, ids = Documents((12, 5, 7)), torch.tensor([3, 9, 13, 16, 18]), torch.arange(5)
    packed = drafter.draft(ends, ids, anchors_A=anchors, context=drafter.context(states, documents))
    for first, length in zip(documents.offsets, documents.lengths, strict=False):
        own = (anchors >= first) & (anchors < first + length)
        context = drafter.context(states[first : first + length])
        alone = drafter.draft(ends, ids[own], anchors_A=anchors[own] - first, context=context)
        torch.testing.assert_close(alone, packed[own], rtol=1e-4, atol=1e-5)


def test_weights_carry_the_published_names_and_the_same_seed_gives_the_same_ones():
    names = set(make_drafter().state_dict())
    layer = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm "
    layer += "mlp.gate_proj mlp.up_proj mlp.down_proj input_layernorm post_attention_layernorm"
    expected = {f"{name}.weight" for name in ("fc", "hidden_norm", "norm")}
    assert names == expected | {f"layers.{i}.{part}.weight" for i in range(2) for part in layer.split()}
    first, second = make_drafter(seed=7), make_drafter(seed=7)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_building_a_drafter_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    make_drafter()
    assert torch.equal(torch.get_rng_state(), before)


def test_bfloat16_outputs_stay_close_to_float32_at_far_positions():
    drafter, ends, states = make_drafter(), make_ends(), features(8)
    ids, anchors = torch.tensor([3]), torch.tensor([4003])
    exact = drafter.draft(ends, ids, anchors_A=anchors, context=drafter.context(states, start=3998))
    half = Ends({"embed_tokens.weight": ends.embedding_VH, "lm_head.weight": ends.head_VH}, dtype=torch.bfloat16)
    drafter = drafter.to(torch.bfloat16)
    rounded = drafter.draft(half, ids, anchors_A=anchors, context=drafter.context(states.bfloat16(), start=3998))
    cosine = torch.cosine_similarity(exact, rounded.float(), dim=-1)
    assert cosine.min() > 0.99
