"""What extraction stores besides: fp8, the final state, the likeliest tokens; and which rows it leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr
from hidden_small import make_corpus, pinned, save_verifier

from dflash.config import ExtractionConfig
from dflash.hidden import extraction
from dflash.hidden.encoding import as_stored
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.planning import estimate, plan_shards
from dflash.hidden.store import HiddenStates
from dflash.manifests import Artifact
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

LENGTHS = [9, 30, 12, 4, 25, 8, 16, 11]
CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=60, batch_tokens=1)


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("wide"), hidden_size=64)


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wide_folder: Path) -> PinnedVerifier:
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return pinned(wide_folder)


def extract(config: ExtractionConfig, corpus: Artifact, verifier: PinnedVerifier) -> Artifact:
    plans = plan_shards(config, corpus, verifier)
    return seal([extract_shard(plan, config, corpus, verifier) for plan in plans], config, corpus, verifier)


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "fp8"])
def test_all_that_is_stored_is_the_verifiers_own(verifier: PinnedVerifier, storage_dtype: Any) -> None:
    config = CONFIG.model_copy(update={"storage_dtype": storage_dtype, "store_final": True, "top_k": 3})
    artifact = extract(config, make_corpus(LENGTHS), verifier)
    states, alone = HiddenStates.open(artifact.path), load_verifier(verifier)
    for number in range(len(LENGTHS)):
        row = states.read(number)
        exact = alone.forward(row.input_ids_T[None], layers=[0, 2], final=True, top_k=3)
        assert torch.equal(row.features_TF, as_stored(exact.features_BTF[0], storage_dtype))
        assert row.final_TH is not None
        assert torch.equal(row.final_TH, exact.final_BTH[0].to(row.final_TH.dtype))
        assert row.topk_ids_TK is not None
        assert torch.equal(row.topk_ids_TK, exact.topk_ids_BTK[0])
        assert row.topk_logprobs_TK is not None
        assert torch.equal(row.topk_logprobs_TK, exact.topk_logprobs_BTK[0])


@pytest.mark.parametrize("storage_dtype", ["float32", "fp8"])
def test_the_estimate_counts_all_that_is_stored(verifier: PinnedVerifier, storage_dtype: Any) -> None:
    config = CONFIG.model_copy(
        update={"storage_dtype": storage_dtype, "store_final": True, "top_k": 8, "shard_tokens": 10**6}
    )
    artifact = extract(config, make_corpus([128] * 32), verifier)
    written = sum(path.stat().st_size for path in artifact.path.rglob("*") if path.is_file())
    assert estimate(config, 128 * 32, verifier) == pytest.approx(written, rel=0.05)


def test_fp8_is_refused_before_anything_runs_where_the_width_does_not_allow_it(
    tmp_path: Path, verifier: PinnedVerifier
) -> None:
    narrow = verifier.model_copy(update={"hidden_size": 96})
    config = CONFIG.model_copy(update={"storage_dtype": "fp8"})
    with pytest.raises(ValueError, match="fp8 needs a hidden size divisible by 64, the verifier's is 96; use bfloat16"):
        plan_shards(config, make_corpus(LENGTHS), narrow)


def test_more_likely_tokens_than_the_verifier_has_are_refused_before_anything_runs(verifier: PinnedVerifier) -> None:
    corpus = make_corpus(LENGTHS)
    assert plan_shards(CONFIG.model_copy(update={"top_k": 53}), corpus, verifier)
    with pytest.raises(ValueError, match=r"extraction.top_k: 54 tokens are more than the verifier's 53; choose fewer"):
        plan_shards(CONFIG.model_copy(update={"top_k": 54}), corpus, verifier)


class Stumbling(Verifier):
    """A verifier whose states are not finite for rows of 16 tokens."""

    def forward(self, input_ids_BT: torch.Tensor, **options: Any) -> Any:
        outputs = super().forward(input_ids_BT, **options)
        return outputs._replace(
            features_BTF=outputs.features_BTF * (float("nan") if input_ids_BT.shape[1] == 16 else 1)
        )


def test_where_no_row_is_left_the_first_reason_is_given(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_verifier(verifier)
    loaded.__class__ = Stumbling
    monkeypatch.setattr(extraction, "loaded_verifier", lambda _: loaded)
    config = CONFIG.model_copy(update={"max_left_out_share": 1})
    with pytest.raises(ValueError, match=r"no row is left: all 2 are left out, the first \(row0\d\): .*not finite"):
        extract(config, make_corpus([16, 16]), verifier)


def test_a_row_without_usable_states_is_in_the_ledger_and_not_in_the_index(
    verifier: PinnedVerifier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = make_corpus(LENGTHS)
    whole = HiddenStates.open(extract(CONFIG, corpus, verifier).path)
    config = CONFIG.model_copy(update={"max_left_out_share": 0.5, "shard_tokens": 61})
    loaded = load_verifier(verifier)
    loaded.__class__ = Stumbling
    monkeypatch.setattr(extraction, "loaded_verifier", lambda _: loaded)
    artifact = extract(config, corpus, verifier)
    states = HiddenStates.open(artifact.path)
    assert [row.id for row in states.rows] == [row.id for row in whole.rows if row.length != 16]
    expected = {row.id: whole.read(number) for number, row in enumerate(whole.rows)}
    for number, row in enumerate(states.rows):
        assert all(torch.equal(a, b) for a, b in zip(states.read(number)[:4], expected[row.id][:4], strict=True))
    assert artifact.summary["left_out"] == 1
    assert artifact.summary["rows"] == len(LENGTHS) - 1
    assert artifact.summary["tokens"] == sum(LENGTHS) - 16
    (ledger,) = artifact.path.glob("shards/*/ledger.json")
    (entry,) = json.loads(ledger.read_text())
    (left_out,) = [row for row in whole.rows if row.length == 16]
    assert entry["id"] == left_out.id
    assert "not finite" in entry["reason"]
    assert left_out.id in caplog.text
    assert zarr.open_group(ledger.parent, mode="r").attrs["left_out"] == [entry["row"]]
