"""Extraction computes one batch while the one before is written, checks rows alone, and takes labels from the data."""

import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hidden_small import make_corpus, pinned, save_verifier

from dflash.config import ExtractionConfig
from dflash.hidden import extraction
from dflash.hidden.extraction import _ahead, extract_shard, seal, spot_check
from dflash.hidden.planning import plan_shards
from dflash.hidden.store import HiddenStates, RowStates
from dflash.manifests import Artifact, find, load_manifest
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier
from tests.test_families import FAMILIES, build, random_ids

LENGTHS = [9, 30, 12, 4, 25, 8, 16, 11]
CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=1000, batch_tokens=40)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("verifier"))


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> PinnedVerifier:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return pinned(folder)


def extract(config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier) -> Artifact:
    plans = plan_shards(config, corpus, verifier)
    return seal([extract_shard(plan, config, corpus, verifier) for plan in plans], config, corpus, verifier)


def replace_verifier(patch: pytest.MonkeyPatch, verifier: PinnedVerifier, kind: type[Verifier]) -> Verifier:
    loaded = load_verifier(verifier)
    loaded.__class__ = kind
    patch.setattr(extraction, "loaded_verifier", lambda _: loaded)
    return loaded


def test_an_item_is_computed_while_the_one_before_it_is_in_use_and_never_more() -> None:
    begun = [threading.Event() for _ in range(5)]

    def compute() -> Iterator[int]:
        for number, event in enumerate(begun):
            event.set()
            yield number

    used = []
    for number in _ahead(compute()):
        used.append(number)
        if number + 1 < len(begun):
            assert begun[number + 1].wait(10)
        assert not any(event.is_set() for event in begun[number + 2 :])
    assert used == list(range(5))


def test_what_fails_on_either_side_is_raised_and_ends_the_other() -> None:
    def compute() -> Iterator[int]:
        yield 0
        raise OSError("the verifier's trouble")

    used = []
    with pytest.raises(OSError, match="the verifier's trouble"):
        used.extend(_ahead(compute()))

    computed = []

    def endless() -> Iterator[int]:
        while True:
            computed.append(len(computed))
            yield computed[-1]

    def write() -> None:
        for number in items:
            if number == 3:
                raise OSError("disk full")

    items = _ahead(endless())
    with pytest.raises(OSError, match="disk full"):
        write()
    items.close()
    assert len(computed) <= 5
    assert not any(thread.name.startswith("verifier") for thread in threading.enumerate())


def test_bytes_do_not_depend_on_what_is_faster(verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_corpus(LENGTHS)
    (plan,) = plan_shards(CONFIG, corpus, verifier)

    def content() -> dict[str, bytes]:
        shard = extract_shard(plan, CONFIG, corpus, verifier)
        return {name: (shard.path / name).read_bytes() for name in load_manifest(shard.path).files}

    overlapped = content()
    monkeypatch.setattr(extraction, "_ahead", lambda batches: batches)
    assert content() == overlapped


class Forgetful(Verifier):
    """Gives every row of a batch the states of the first."""

    def forward(self, input_ids_BT: torch.Tensor, **options: Any) -> Any:
        outputs = super().forward(input_ids_BT, **options)
        return outputs._replace(features_BTF=outputs.features_BTF[:1].expand_as(outputs.features_BTF))


def test_a_shard_whose_rows_alone_have_other_states_fails_with_the_numbers(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_verifier(monkeypatch, verifier, Forgetful)
    monkeypatch.setattr(extraction, "SPOT_CHECKS", len(LENGTHS))  # the first row of each batch has its own states
    corpus = make_corpus(LENGTHS)
    (plan,) = plan_shards(CONFIG, corpus, verifier)
    numbers = r"row row\d\d: alone, its states after layer 0 differ by \d\S* of their norm .* at most 0\.0001"
    with pytest.raises(ValueError, match=numbers) as caught:
        extract_shard(plan, CONFIG, corpus, verifier)
    assert "\n" not in str(caught.value)
    assert find(plan.key, location=plan.location) is None
    assert not any(thread.name.startswith("verifier") for thread in threading.enumerate())
    alone = CONFIG.model_copy(update={"batch_tokens": 1})  # where there is nothing to mix up
    extract(alone, corpus, verifier)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_spot_check_lets_rounding_pass_and_nothing_else(folder: Path, dtype: str) -> None:
    loaded = load_verifier(pinned(folder, dtype=dtype))
    ids = [torch.arange(3, 3 + n) for n in (40, 25)]
    batch_BT = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    outputs = loaded.forward(batch_BT, layers=[0, 2], final=True)

    def row(features_TF: torch.Tensor, final_TH: torch.Tensor) -> RowStates:
        return RowStates(features_TF, ids[1], ids[1] > 0, outputs.greedy_BT[1, :25], final_TH)

    features_TF, final_TH = outputs.features_BTF[1, :25], outputs.final_BTH[1, :25]
    options: dict[str, Any] = {"layers": [0, 2], "greedy": True}
    assert spot_check(loaded, row(features_TF, final_TH), **options) == ""
    assert "after layer 0" in spot_check(loaded, row(features_TF.roll(1, 0), final_TH), **options)
    assert "after layer 2" in spot_check(loaded, row(features_TF[:, :32].repeat(1, 2), final_TH), **options)
    assert "after the final norm" in spot_check(loaded, row(features_TF, final_TH * 1.2), **options)
    assert "differ by nan" in spot_check(loaded, row(features_TF * float("nan"), final_TH), **options)


class Slipping(Verifier):
    """Gives the second token of every row of a batch what belongs to the first."""

    slips: ClassVar[str] = "features_BTF"

    def forward(self, input_ids_BT: torch.Tensor, **options: Any) -> Any:
        outputs = super().forward(input_ids_BT, **options)
        if len(input_ids_BT) > 1:
            getattr(outputs, self.slips)[:, 1] = getattr(outputs, self.slips)[:, 0]
        return outputs


@pytest.mark.parametrize("slips", ["features_BTF", "final_BTH", "greedy_BT", "topk_ids_BTK", "topk_logprobs_BTK"])
def test_one_token_that_is_wrong_in_every_row_of_a_batch_fails_a_shard(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, slips: str
) -> None:
    monkeypatch.setattr(Slipping, "slips", slips)
    replace_verifier(monkeypatch, verifier, Slipping)
    config = CONFIG.model_copy(update={"batch_tokens": 1000, "store_final": True, "top_k": 3})
    corpus = make_corpus([100, 90, 80])
    (plan,) = plan_shards(config, corpus, verifier)
    what = r"its state(s|) after .*" if slips in ("features_BTF", "final_BTH") else "likeliest tokens after token 1 "
    with pytest.raises(ValueError, match=f"row row0[012]: alone, .*{what}.* set extraction.batch_tokens to 1"):
        extract_shard(plan, config, corpus, verifier)


@pytest.mark.parametrize(("family", "dtype"), [("Qwen3", "float32"), ("Qwen3", "bfloat16"), ("Qwen3-MoE", "bfloat16")])
def test_a_single_token_of_another_state_or_choice_is_found_unless_experts_may_explain_it(
    family: str, dtype: str
) -> None:
    loaded = build(next(one for one in FAMILIES if one.name == family)).model.to(getattr(torch, dtype))
    loaded = Verifier(loaded, None, eos_ids=frozenset())
    ids_T = random_ids(100)
    outputs = loaded.forward(ids_T[None], layers=[0, 2], top_k=4)
    good = RowStates(
        outputs.features_BTF[0],
        ids_T,
        ids_T > 0,
        outputs.greedy_BT[0],
        None,
        outputs.topk_ids_BTK[0],
        outputs.topk_logprobs_BTK[0],
    )
    assert spot_check(loaded, good, layers=[0, 2], greedy=True) == ""
    for field in ("features_TF", "greedy_ids_T", "topk_ids_TK", "topk_logprobs_TK"):
        for wrong in (1, 2):
            part = getattr(good, field).clone()
            part[50 : 50 + wrong] = part[20] - (5 if field == "topk_logprobs_TK" else 0)
            assert ids_T[20] != ids_T[50]
            found = spot_check(loaded, good._replace(**{field: part}), layers=[0, 2], greedy=True)
            assert bool(found) == (wrong > loaded.has_experts), (field, wrong, found)
    of_the_data = good._replace(greedy_ids_T=ids_T, topk_ids_TK=None, topk_logprobs_TK=None)
    assert spot_check(loaded, of_the_data, layers=[0, 2], greedy=False) == ""
    assert spot_check(loaded, of_the_data, layers=[0, 2], greedy=True)


def test_what_batches_change_in_any_family_is_no_alarm() -> None:
    for family in FAMILIES:
        for dtype in ("float32", "bfloat16"):
            loaded = Verifier(build(family).model.to(getattr(torch, dtype)), None, eos_ids=frozenset())
            rows = [random_ids(n, seed=n) for n in (40, 7, 25)]
            batch = loaded.forward(
                torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), layers=[0, 1, 2], final=True, top_k=4
            )
            for i, ids_T in enumerate(rows):
                parts = [part[i, : len(ids_T)] for part in batch]
                features_TF, greedy_T, topk_ids_TK, topk_logprobs_TK, final_TH = parts
                row = RowStates(features_TF, ids_T, ids_T > 0, greedy_T, final_TH, topk_ids_TK, topk_logprobs_TK)
                assert spot_check(loaded, row, layers=[0, 1, 2], greedy=True) == "", (family.name, dtype)


@pytest.mark.parametrize("store_final", [False, True])
def test_labels_from_the_data_are_the_next_tokens_and_cost_no_layer_behind_the_last_tap(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, store_final: bool
) -> None:
    corpus = make_corpus(LENGTHS)
    whole = HiddenStates.open(extract(CONFIG, corpus, verifier).path)
    loaded = replace_verifier(monkeypatch, verifier, Verifier)
    passes = []
    loaded.decoder.layers[3].register_forward_hook(lambda *_: passes.append(1))
    artifact = extract(CONFIG.model_copy(update={"greedy": False, "store_final": store_final}), corpus, verifier)
    assert bool(passes) == store_final
    states = HiddenStates.open(artifact.path)
    for number in range(len(LENGTHS)):
        row, expected = states.read(number), whole.read(number)
        assert torch.equal(row.features_TF, expected.features_TF)
        assert row.greedy_ids_T.tolist() == [*row.input_ids_T[1:].tolist(), 0]
    assert "in the data" in states.info["greedy_ids"]
    assert states.info["on_policy_share"] is None
    assert "verifier's choice" in whole.info["greedy_ids"]
    assert 0 <= whole.info["on_policy_share"] <= 1
    shard = json.loads((artifact.path / "shards/0000/zarr.json").read_text())
    assert shard["attributes"]["greedy_ids"] == states.info["greedy_ids"]


def test_the_verifier_is_gone_when_its_memory_is_given_back(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, alive = [], []

    def load(pinned: PinnedVerifier) -> Verifier:
        loaded = load_verifier(pinned)
        models.append(weakref.ref(loaded.model))
        return loaded

    def give_back() -> None:
        gc.collect()
        alive.append([model() is not None for model in models])

    monkeypatch.setattr(extraction, "load_verifier", load)
    monkeypatch.setattr(extraction, "give_back", give_back)
    extract(CONFIG, make_corpus(LENGTHS), verifier)
    assert alive == [[False]]
