"""What `dflash verify` finds in hidden states, and what has to be made again after it."""

import shutil
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path

import polars as pl
import pytest
from hidden_small import flip_a_byte, make_corpus, pinned, save_verifier

from dflash import manifests
from dflash.config import ExtractionConfig
from dflash.hidden.extraction import extract_shard, seal
from dflash.hidden.planning import ShardPlan, missing, plan_shards
from dflash.hidden.store import HiddenStates
from dflash.keys import extraction_key
from dflash.manifests import MANIFEST, Artifact, Damaged, Manifest, file_sha256, find, load_manifest
from dflash.verification import verify_all

CONFIG = ExtractionConfig(target_layer_ids=[0, 2], storage_dtype="float32", shard_tokens=60)


class Extraction:
    """An extraction of a few shards."""

    def __init__(self, folder: Path) -> None:
        self.verifier = pinned(save_verifier(folder))
        self.corpus = make_corpus([9, 30, 12, 4, 25, 8, 16, 11, 40, 13])
        self.plans = plan_shards(CONFIG, self.corpus, self.verifier)
        self.shards = [self.extract(plan) for plan in self.plans]
        self.artifact = self.seal(self.shards)

    def extract(self, plan: ShardPlan) -> Artifact:
        return extract_shard(plan, CONFIG, self.corpus, self.verifier)

    def seal(self, shards: list[Artifact]) -> Artifact:
        return seal(shards, CONFIG, self.corpus, self.verifier)

    def damages(self) -> dict[str, str]:
        return {verdict.part or verdict.stage: verdict.damage for verdict in verify_all() if verdict.damage}


@pytest.fixture
def extraction(tmp_path: Path, home: Path) -> Extraction:
    return Extraction(tmp_path / "verifier")


def test_all_that_is_whole_is_said_to_be(extraction: Extraction) -> None:
    parts = [f"shards/{plan.number:04d}" for plan in extraction.plans]
    verdicts = list(verify_all())
    assert [verdict.part for verdict in verdicts] == [*parts, "", ""]
    assert not any(verdict.damage for verdict in verdicts)
    assert {verdict.bytes for verdict in verdicts if verdict.stage == "extraction" and not verdict.part} == {
        load_manifest(extraction.artifact.path).nbytes
    }


def test_a_damaged_shard_alone_is_set_aside(extraction: Extraction) -> None:
    shard = extraction.artifact.path / "shards" / "0001"
    flip_a_byte(shard / "features" / "c" / "0" / "0", 20)
    assert set(extraction.damages()) == {"shards/0001"}  # the whole is damaged nowhere else
    assert missing(extraction.plans) == [extraction.plans[1]]
    with pytest.raises(Damaged, match="shards/0001"):
        find(extraction_key(CONFIG, extraction.corpus, extraction.verifier))
    redone = extraction.extract(extraction.plans[1])
    shards = [load_manifest(shard.parent / f"{plan.number:04d}").artifact() for plan in extraction.plans]
    assert redone in shards
    extraction.seal(shards)
    assert not extraction.damages()


def publish_again(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    manifest = load_manifest(folder)
    (folder / MANIFEST).write_text(change(manifest).model_dump_json())


def edit(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"summary": manifest.summary | {"supervised": 1}})


def test_a_shard_whose_manifest_was_edited_is_redone(extraction: Extraction) -> None:
    publish_again(extraction.artifact.path / "shards" / "0001", edit)
    assert "shards/0001/manifest.json: " in extraction.damages()["extraction"]
    assert missing(extraction.plans) == [extraction.plans[1]]


def test_opening_sets_a_shard_aside_whose_manifest_was_edited(extraction: Extraction) -> None:
    publish_again(extraction.artifact.path / "shards" / "0001", edit)
    with pytest.raises(Damaged, match=r"shards/0001/manifest\.json: .*; its manifest is set aside"):
        HiddenStates.open(extraction.artifact.path)
    assert missing(extraction.plans) == [extraction.plans[1]]


def test_a_shard_whose_manifest_was_edited_is_not_sealed(extraction: Extraction) -> None:
    publish_again(extraction.artifact.path / "shards" / "0001", edit)
    with pytest.raises(Damaged, match=r"shards/0001/manifest\.json: differs from the record of the task that made it"):
        extraction.seal(extraction.shards)
    assert missing(extraction.plans) == [extraction.plans[1]]


def test_a_shard_that_was_made_again_waits_for_its_seal(extraction: Extraction) -> None:
    shard = extraction.artifact.path / "shards" / "0001"
    flip_a_byte(shard / "features" / "c" / "0" / "0", 20)
    with pytest.raises(Damaged, match="shards/0001"):
        HiddenStates.open(extraction.artifact.path)
    extraction.shards[1] = extraction.extract(extraction.plans[1])
    with pytest.raises(Damaged, match="shards/0001: made again since; run the extraction stage again"):
        HiddenStates.open(extraction.artifact.path)
    damages = extraction.damages()
    assert set(damages) == {"extraction"}
    assert "shards/0001: made again since" in damages["extraction"]
    assert not missing(extraction.plans)
    extraction.seal(extraction.shards)
    assert not extraction.damages()


def set_clock(patch: pytest.MonkeyPatch, minutes: int) -> None:
    """What manifests are written by from now on."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls.fromtimestamp(time.time() + 60 * minutes, tz)

    patch.setattr(manifests, "datetime", Clock)


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_shard_made_again_by_another_clock_waits_for_its_seal(extraction: Extraction, minutes: int) -> None:
    flip_a_byte(extraction.artifact.path / "shards" / "0001" / "features" / "c" / "0" / "0", 20)
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, minutes)
        extraction.shards[1] = extraction.extract(extraction.plans[1])
    with pytest.raises(Damaged, match="shards/0001: made again since"):
        HiddenStates.open(extraction.artifact.path)
    assert "shards/0001: made again since" in extraction.damages()["extraction"]
    assert not missing(extraction.plans)
    extraction.seal(extraction.shards)
    assert not extraction.damages()


@pytest.mark.parametrize("minutes", [-5, 5])
def test_a_shard_sealed_by_another_clock_is_redone_where_its_manifest_was_edited(
    extraction: Extraction, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    set_clock(monkeypatch, minutes)
    (extraction.artifact.path / MANIFEST).unlink()
    extraction.seal(extraction.shards)
    publish_again(extraction.artifact.path / "shards" / "0001", edit)
    with pytest.raises(Damaged, match=r"shards/0001/manifest\.json: .*; its manifest is set aside"):
        HiddenStates.open(extraction.artifact.path)
    assert missing(extraction.plans) == [extraction.plans[1]]


def test_another_shard_in_the_place_of_one_is_redone(extraction: Extraction) -> None:
    shards = extraction.artifact.path / "shards"
    shutil.rmtree(shards / "0001")
    shutil.copytree(shards / "0000", shards / "0001")
    with pytest.raises(Damaged, match=r"shards/0001"):
        HiddenStates.open(shards.parent)
    assert missing(extraction.plans) == [extraction.plans[1]]


@pytest.mark.parametrize("name", ["0001.bak", "0007"])
def test_a_folder_that_is_none_of_its_shards_does_not_matter(extraction: Extraction, name: str) -> None:
    shards = extraction.artifact.path / "shards"
    shutil.copytree(shards / "0001", shards / name)
    (shards / name / MANIFEST).unlink()
    assert len(HiddenStates.open(shards.parent).rows) == 10


def test_an_index_that_its_shards_do_not_bear_out_is_damage(extraction: Extraction) -> None:
    path = extraction.artifact.path / "index.parquet"
    index = pl.read_parquet(path)
    index.with_columns(length=pl.col("length") - 1).write_parquet(path)
    record = (
        load_manifest(path.parent)
        .files[path.name]
        .model_copy(update={"size": path.stat().st_size, "sha256": file_sha256(path)})
    )
    publish_again(
        path.parent, lambda manifest: manifest.model_copy(update={"files": manifest.files | {path.name: record}})
    )
    damages = extraction.damages()
    assert set(damages) == {"extraction"}
    assert "is not at" in damages["extraction"]
    assert not missing(extraction.plans)


def test_an_artifact_of_other_inputs_than_its_name_says_is_damage(extraction: Extraction) -> None:
    publish_again(
        extraction.artifact.path,
        lambda manifest: manifest.model_copy(update={"inputs": manifest.inputs | {"corpus": "another"}}),
    )
    assert "which its inputs call extraction-" in extraction.damages()["extraction"]
