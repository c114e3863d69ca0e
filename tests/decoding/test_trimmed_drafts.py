"""Drafters that propose a part of the tokens: live decoding, replay and the parity gate speak the verifier's ids."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_small import LAYERS, VOCAB, make_ends, make_prompts, make_row, make_verifier, teach
from safetensors.torch import load_file, save_file

from dflash.bundled import resolve
from dflash.config import VerifierConfig
from dflash.decoding.live import Method, decode
from dflash.decoding.parity import REFERENCE, answer, ask, remember
from dflash.decoding.replay import best_tokens, replay, replay_responses
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.drafter.vocabulary import choose_tokens
from dflash.hidden.store import RowStates
from dflash.pinning import pin
from dflash.verifier import Verifier

SIZE = 20


class Case:
    """A verifier, its answers, and a drafter that is right now and then and knows the most frequent tokens only."""

    def __init__(self, *, draft_vocab_size: int, num_tokens: int | None = None) -> None:
        self.verifier: Verifier = make_verifier(seed=2)
        self.prompts = make_prompts(24, seed=2)
        self.responses = [one.ids for one in self.verifier.generate(self.prompts, max_new_tokens=32)]
        self.rows: list[RowStates] = [
            make_row(self.verifier, prompt, ids) for prompt, ids in zip(self.prompts, self.responses, strict=True)
        ]
        self.whole: Ends = make_ends(self.verifier)
        config = DrafterConfig.from_verifier(
            self.verifier.model.config.to_dict(),
            block_size=6,
            num_layers=1,
            mask_token_id=VOCAB - 1,
            target_layer_ids=list(LAYERS),
        )
        full = Drafter(config).eval()
        teach(full, self.whole, [row for row in self.rows if len(row.input_ids_T) > 24], steps=80)
        self.drafter = full
        if draft_vocab_size:
            counts = torch.bincount(torch.tensor([token for ids in self.responses for token in ids]), minlength=VOCAB)
            settings = {**vars(config), "draft_vocab_size": draft_vocab_size}
            self.drafter = Drafter(DrafterConfig(**settings)).eval()
            self.drafter.load_state_dict(full.state_dict(), strict=False)
            self.drafter.keep(choose_tokens(counts, size=draft_vocab_size, always=[VOCAB - 1, 7], num_tokens=VOCAB))
        self.ends = self.whole.for_drafter(self.drafter, num_tokens=num_tokens)

    def live(self, number: int, method: Method, **sampling: Any) -> Any:
        return decode(
            self.verifier,
            self.drafter,
            self.ends,
            self.prompts[number],
            layers=LAYERS,
            max_new_tokens=32,
            method=method,
            storage_dtype="float32",
            **sampling,
        )

    def outside(self, ids: list[int]) -> list[bool]:
        return (self.ends.places(torch.tensor(ids)) < 0).tolist()


@pytest.fixture(scope="module")
def trimmed() -> Case:
    return Case(draft_vocab_size=SIZE)


@pytest.fixture(scope="module")
def padded() -> Case:
    """The head has more rows than there are tokens."""
    return Case(draft_vocab_size=0, num_tokens=40)


@pytest.mark.parametrize("name", ["trimmed", "padded"])
def test_replay_and_live_decoding_agree_and_nothing_outside_is_accepted(
    request: pytest.FixtureRequest, name: str
) -> None:
    case: Case = request.getfixturevalue(name)
    seen, misses = [], 0
    for number in range(8):
        ids = case.responses[number]
        rounds = replay(case.drafter, case.ends, case.rows[number], budgets=[8, 64])
        for method in ("chain", 8, 64):
            live = case.live(number, method)
            assert live.ids == ids
            assert live.accepted == rounds["chain" if method == "chain" else f"tree{method}"]
            seen += live.accepted
            at = 1
            for count in live.accepted:
                assert not any(case.outside(ids[at : at + count]))
                at += count + 1
        misses += sum(case.outside(ids))
    assert {0, 1, 2} <= set(seen), "the drafter must be partly right for this test to say anything"
    assert misses > 5, "and some tokens be outside"


def test_a_padded_row_is_never_proposed_however_likely_it_is(padded: Case) -> None:
    hidden = padded.whole.head_VH[45][None, None] * 100  # a row that is no token is what the drafter wants most
    assert padded.whole.logits(hidden).argmax() == 45
    _, ids = best_tokens(padded.ends, hidden, k=40)
    assert sorted(ids.flatten().tolist()) == list(range(40))


def test_rejection_sampling_drafts_kept_tokens_and_expects_nothing_of_others(trimmed: Case) -> None:
    answers = [trimmed.live(number, "rejection", temperature=1.0, seed=number) for number in range(6)]
    assert sum(sum(one.accepted) for one in answers) > 0
    for one in answers:
        at = 1
        for count in one.accepted:
            assert not any(trimmed.outside(one.ids[at : at + count]))
            at += count + 1
    ids = trimmed.ends.ids(torch.arange(SIZE)).tolist()
    unknown = [token for token in range(VOCAB) if token not in ids][:6]
    row = make_row(trimmed.verifier, [3, 4], unknown)
    [replayed] = replay_responses(trimmed.drafter, trimmed.ends, [row], budgets=[8], temperature=1.0)
    assert replayed.rejection == (5.0, 0.0)
    assert replayed.recall_hits == (0,) * len(replayed.recall_hits)


def test_the_parity_gate_passes_a_trimmed_drafter_and_stops_one_whose_tokens_moved(
    trimmed: Case, tmp_path: Path
) -> None:
    trimmed.verifier.model.save_pretrained(tmp_path / "verifier")
    for file in resolve("bundled:demo-verifier").glob("*token*"):
        shutil.copy(file, tmp_path / "verifier")
    pinned = pin(VerifierConfig(model=str(tmp_path / "verifier"), dtype="float32", device="cpu"))
    (tmp_path / "exported").mkdir()
    save_drafter(tmp_path / "exported", trimmed.drafter, head_UH=trimmed.ends.draft_head_UH)
    remember(
        tmp_path / REFERENCE,
        drafter=trimmed.drafter,
        ends=trimmed.ends,
        rows=[row for row in trimmed.rows if len(row.input_ids_T) > 24][:3],
        storage_dtype="float32",
    )
    request = tmp_path / "request.json"
    ask(request, tmp_path / "exported", reference=tmp_path / REFERENCE, verifier=pinned, budget=16)
    parity = answer(request)
    assert (parity.agreement, parity.defect) == (1.0, "")
    assert parity.compared > 200
    assert parity.rounds > 20

    path = tmp_path / "exported" / "model.safetensors"
    weights = load_file(path)
    drafted = int(load_file(tmp_path / REFERENCE)["drafts.0"].mode().values.mode().values)
    other = int((~weights["t2d"]).nonzero()[0])
    kept = sorted({*weights["t2d"].nonzero()[:, 0].tolist(), other} - {drafted})
    weights["d2t"] = torch.tensor(kept) - torch.arange(SIZE)
    weights["t2d"] = torch.isin(torch.arange(VOCAB), torch.tensor(kept))
    save_file(weights, path)
    assert answer(request).defect
