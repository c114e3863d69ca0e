"""The parity gate: a sound export passes, and each deliberate defect of an export is named."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_small import LAYERS, VOCAB, make_ends, make_prompts, make_row, make_verifier
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.bundled import resolve
from dflash.config import VerifierConfig
from dflash.decoding.live import Decoded, decode
from dflash.decoding.near_ties import NEAR_TIE
from dflash.decoding.parity import (
    MOST_ANCHORS,
    REFERENCE,
    Parity,
    Served,
    answer,
    ask,
    check,
    is_near_tie,
    remember,
)
from dflash.decoding.replay import response_span
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Context, Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.store import RowStates
from dflash.pinning import PinnedVerifier, pin
from dflash.verifier import Verifier, load_verifier


class Gate:
    """A verifier on disk, a drafter in memory with an export of it, and rows that both know."""

    def __init__(self, folder: Path) -> None:
        self.verifier: Verifier = make_verifier(seed=2)
        self.verifier.model.save_pretrained(folder / "verifier")
        for file in resolve("bundled:demo-verifier").glob("*token*"):
            shutil.copy(file, folder / "verifier")
        self.pinned: PinnedVerifier = pin(VerifierConfig(model=str(folder / "verifier"), dtype="float32", device="cpu"))
        config = DrafterConfig.from_verifier(
            self.verifier.model.config.to_dict(),
            block_size=6,
            num_layers=2,
            mask_token_id=VOCAB - 1,
            target_layer_ids=list(LAYERS),
            sliding_window=8,
        )
        self.drafter = self.louder(Drafter(config))
        self.ends = make_ends(self.verifier)
        prompts = [prompt for prompt in make_prompts(12, seed=2) if len(prompt) > 2]
        answers = self.verifier.generate(prompts, max_new_tokens=24)
        self.rows = [make_row(self.verifier, prompt, one.ids) for prompt, one in zip(prompts, answers, strict=True)]

    @staticmethod
    def louder(drafter: Drafter) -> Drafter:
        """Of weights so large that everything that is fed to it shows."""
        generator = torch.Generator().manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data = (
                parameter * 8 if parameter.ndim == 2 else 1 + torch.rand(parameter.shape, generator=generator)
            )
        return drafter.eval().requires_grad_(False)

    def request(self, folder: Path, **changes: Any) -> Path:
        """Of the drafter as it was trained, in so far as `changes` do not say otherwise; a sound export beside it."""
        trained: dict[str, Any] = {"drafter": self.drafter, "ends": self.ends, "rows": self.rows} | changes
        (folder / "exported").mkdir()
        save_drafter(folder / "exported", self.drafter)
        remember(folder / REFERENCE, storage_dtype="float32", **trained)
        ask(
            folder / "request.json",
            folder / "exported",
            reference=folder / REFERENCE,
            verifier=self.pinned,
            budget=16,
        )
        return folder / "request.json"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("parity"))


def test_a_sound_export_passes_in_a_process_of_its_own(gate: Gate, tmp_path: Path) -> None:
    parity = check(gate.request(tmp_path))
    assert parity.agreement == 1
    assert parity.compared > 500
    assert parity.rounds > 100
    assert parity.near_ties == 0
    assert not parity.defect


def long_row(gate: Gate, *, tokens: int = 90) -> RowStates:
    """Of a response that does not end by itself."""
    prompt = [3, 1, 4]
    [answered] = gate.verifier.generate([prompt], max_new_tokens=tokens)
    response = [*answered.ids, *[token % 50 + 8 for token in range(0, 7 * tokens, 7)]][:tokens]
    return make_row(gate.verifier, prompt, response)


def test_anchors_are_spread_over_the_whole_response(gate: Gate, tmp_path: Path) -> None:
    long, short = long_row(gate), long_row(gate, tokens=9)
    remember(tmp_path / REFERENCE, drafter=gate.drafter, ends=gate.ends, rows=[long, short], storage_dtype="float32")
    reference = load_file(tmp_path / REFERENCE)
    assert reference["ids.0"].tolist() == long.input_ids_T.tolist()
    anchors = reference["anchors.0"].tolist()
    assert (anchors[0], anchors[-1], len(anchors)) == (3, 3 + 90 - 2, MOST_ANCHORS)
    assert {after - before for before, after in pairwise(anchors)} == {2, 3}
    assert reference["anchors.1"].tolist() == list(range(3, 3 + 8))


def test_a_defect_that_shows_late_in_a_response_is_named(gate: Gate, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window": 50, "layer_types": ("sliding_attention",) * 2}
    windowed = Drafter(replace(gate.drafter.config, **changes))
    windowed.load_state_dict(gate.drafter.state_dict())
    request = gate.request(tmp_path, drafter=windowed.eval().requires_grad_(False), rows=[long_row(gate)])
    shutil.rmtree(tmp_path / "exported")
    (tmp_path / "exported").mkdir()
    save_drafter(tmp_path / "exported", windowed)
    settings(tmp_path / "exported", layer_types=["full_attention"] * 2, sliding_window=None)
    expect(answer(request), "mask", "window of 50")


def test_drafters_that_remember_their_first_anchors_only_are_checked_there(gate: Gate, tmp_path: Path) -> None:
    request = gate.request(tmp_path, rows=[long_row(gate, tokens=20)])
    with safe_open(tmp_path / REFERENCE, "pt") as file:
        metadata = file.metadata()
    kept = {name: part for name, part in load_file(tmp_path / REFERENCE).items() if "anchors" not in name}
    save_file(kept, tmp_path / REFERENCE, metadata=metadata)
    parity = answer(request)
    assert parity.agreement == 1
    assert parity.compared > 50


def test_in_bfloat16_rounds_are_compared_up_to_near_ties(gate: Gate, tmp_path: Path) -> None:
    pinned = pin(VerifierConfig(model=gate.pinned.path, dtype="bfloat16", device="cpu"))
    verifier, drafter = load_verifier(pinned), copy.deepcopy(gate.drafter).bfloat16()
    ends = Ends(verifier.frozen_weights(), dtype=torch.bfloat16)
    rows = [
        make_row(verifier, row.input_ids_T[:4].tolist(), row.input_ids_T[4:].tolist(), storage_dtype="bfloat16")
        for row in gate.rows[:4]
    ]
    (tmp_path / "exported").mkdir()
    save_drafter(tmp_path / "exported", drafter)
    remember(tmp_path / REFERENCE, drafter=drafter, ends=ends, rows=rows, storage_dtype="bfloat16")
    request = tmp_path / "request.json"
    ask(request, tmp_path / "exported", reference=tmp_path / REFERENCE, verifier=pinned, budget=16)
    parity = answer(request)
    assert not parity.defect
    assert parity.compared > 100
    assert parity.rounds > 50
    assert parity.near_ties < parity.rounds / 10


def test_what_was_drafted_in_bfloat16_is_compared_up_to_its_near_ties_in_float32(gate: Gate, tmp_path: Path) -> None:
    verifier = load_verifier(pin(VerifierConfig(model=gate.pinned.path, dtype="bfloat16", device="cpu")))
    rows = [
        make_row(verifier, row.input_ids_T[:4].tolist(), row.input_ids_T[4:].tolist(), storage_dtype="float32")
        for row in gate.rows
    ]
    drafter, ends = copy.deepcopy(gate.drafter).bfloat16(), Ends(verifier.frozen_weights(), dtype=torch.bfloat16)
    parity = answer(gate.request(tmp_path, drafter=drafter, ends=ends, rows=rows))
    assert (parity.defect, parity.compared > 100) == ("", True)


@pytest.mark.parametrize("what", ["rounds", "text"])
def test_live_decoding_that_differs_from_replay_is_named(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def other(*arguments: Any, **options: Any) -> Decoded:
        found = decode(*arguments, **options)
        if options["method"] != "chain" or len(found.accepted) < 3:
            return found
        if what == "text":
            return replace(found, ids=[*found.ids[:-1], (found.ids[-1] + 1) % VOCAB])
        return replace(found, accepted=[found.accepted[0] + 1, *found.accepted[1:]])

    monkeypatch.setattr("dflash.decoding.parity.decode", other)
    parity = answer(gate.request(tmp_path, rows=gate.rows[:2]))
    assert parity.defect == "live decoding"
    expected = {"rounds": r"chain: the round from token 0 accepts \d and not \d, other", "text": "chain: the text from"}
    assert re.search(expected[what] + ".* than in replay", parity.explanation)


@pytest.mark.parametrize("budget", [None, 1, 5])
def test_a_draft_is_a_near_tie_where_the_drafter_cannot_tell_tokens_apart(gate: Gate, budget: int | None) -> None:
    row = gate.rows[0]
    served = Served(gate.drafter, copy.copy(gate.ends), LAYERS)
    first, _ = response_span(row.loss_mask_T)

    def near_tie(label: int) -> bool:
        ids_T = row.input_ids_T.clone()
        ids_T[first + 1] = label
        return is_near_tie(
            served, row.features_TF, ids_T, anchor=first, slot=0, budget=budget, tolerance=NEAR_TIE["float32"]
        )

    hidden_1SH = served.drafter.draft(
        served.ends,
        row.input_ids_T[first : first + 1],
        anchors_A=torch.tensor([first]),
        context=served.drafter.context(row.features_TF[:first]),
    )
    order = served.ends.logits(hidden_1SH[0, 0]).argsort(descending=True).tolist()
    best, worst = order[0], order[-1]
    assert not near_tie(worst)
    head_VH = served.ends.head_VH.clone()
    head_VH[worst] = head_VH[best]
    served.ends.head_VH = served.ends.draft_head_UH = head_VH
    tree_of_one = budget in (None, 1)
    assert near_tie(worst) == near_tie(best) == tree_of_one, "in a larger tree both have a place"


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({name: change(name, weight) for name, weight in load_file(path).items()}, path)


DEFECTS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "taps one layer too deep": (
        "taps",
        r"must be \[1, 3\], not \[2, 4\]",
        lambda at: settings(at, dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [2, 4]}),
    ),
    "taps in reverse order": (
        "taps",
        r"must be \[1, 3\], not \[3, 1\]",
        lambda at: settings(at, dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [3, 1]}),
    ),
    "another mask token": (
        "mask token",
        "must be 60, not 5",
        lambda at: settings(at, dflash_config={"mask_token_id": 5, "target_layer_ids": list(LAYERS)}),
    ),
    "another theta": (
        "RoPE",
        r"'rope_theta': 10000.0.*not .*'rope_theta': 100.0",
        lambda at: settings(at, rope_theta=100.0, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
    "no window": (
        "mask",
        "window of 8",
        lambda at: settings(at, layer_types=["full_attention"] * 2, sliding_window=None),
    ),
    "another epsilon": ("norm", "rms_norm_eps must be 1e-06, not 0.7", lambda at: settings(at, rms_norm_eps=0.7)),
    "norms less one": (
        "norm",
        "weights of norms are [+]1",
        lambda at: weights(at, lambda _, weight: weight - 1 if weight.ndim == 1 else weight),
    ),
    "other weights": (
        "unknown",
        "closest, with",
        lambda at: weights(at, lambda name, weight: -weight if "gate_proj" in name else weight),
    ),
    "slightly other weights": (
        "unknown",
        "no single change of",
        lambda at: weights(at, lambda name, weight: 1.02 * weight if "gate_proj" in name else weight),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_of_an_exported_folder_is_named(gate: Gate, tmp_path: Path, name: str) -> None:
    defect, explanation, spoil = DEFECTS[name]
    request = gate.request(tmp_path)
    spoil(tmp_path / "exported")
    expect(answer(request), defect, explanation)


def expect(parity: Parity, defect: str, explanation: str) -> None:
    assert parity.defect == defect
    assert parity.agreement < 0.99
    assert re.search(explanation, parity.explanation)


class Ahead(Drafter):
    """Trained with blocks a position too far."""

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        return super().draft(ends, anchor_ids_A, anchors_A=anchors_A + 1, context=replace(context, start=1))


class Beyond(Drafter):
    """Trained with blocks that see their anchor's features."""

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        return super().draft(ends, anchor_ids_A, anchors_A=anchors_A, context=replace(context, start=-1))


@pytest.mark.parametrize(
    ("kind", "defect", "explanation"),
    [(Ahead, "positions", r"\+1 token"), (Beyond, "mask", "anchor's own features")],
)
def test_a_training_that_put_blocks_elsewhere_is_named(
    gate: Gate, tmp_path: Path, kind: type[Drafter], defect: str, explanation: str
) -> None:
    other = kind(gate.drafter.config)
    other.load_state_dict(gate.drafter.state_dict())
    longest = max(gate.rows, key=lambda row: len(row.input_ids_T))
    expect(answer(gate.request(tmp_path, drafter=other, rows=[longest])), defect, explanation)


def test_a_training_with_another_head_is_named(gate: Gate, tmp_path: Path) -> None:
    tied = copy.copy(gate.ends)
    tied.head_VH = tied.draft_head_UH = gate.ends.embedding_VH
    expect(answer(gate.request(tmp_path, ends=tied)), "head", "embedding was the head")


def test_a_training_on_normed_taps_is_named(gate: Gate, tmp_path: Path) -> None:
    def normed(row: RowStates) -> RowStates:
        taps_THK = row.features_TF.unflatten(-1, (len(LAYERS), -1))
        return row._replace(features_TF=gate.verifier.decoder.norm(taps_THK).flatten(-2))

    expect(answer(gate.request(tmp_path, rows=[normed(row) for row in gate.rows])), "norm", "final norm")


def test_a_process_that_does_not_end_is_not_waited_for(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.decoding.parity.SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"parity: another process took more than 0\.01 s to load .*exported"):
        check(gate.request(tmp_path))


def test_the_gate_says_in_one_line_what_is_wrong(gate: Gate, tmp_path: Path) -> None:
    request = gate.request(tmp_path)
    settings(tmp_path / "exported", dflash_config={"mask_token_id": 5, "target_layer_ids": list(LAYERS)})
    with pytest.raises(
        ValueError, match=r"parity: .*exported drafts .*%.* as in training; mask token: .*60, not 5"
    ) as error:
        check(request)
    assert "\n" not in str(error.value)
    (tmp_path / "exported" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"parity: .*another process: ValueError: .*model.safetensors is missing"):
        check(request)
