"""Housekeeping: what may go is what nobody comes back to, and what is kept is kept with all that it needs."""

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash import housekeeping
from dflash.corpus.chunks import CHUNKS
from dflash.decoding.champions import promote
from dflash.manifests import (
    DAMAGED_MANIFEST,
    HOST,
    MANIFEST,
    Artifact,
    Key,
    find,
    home,
    in_progress,
    manifests,
    publish,
    verify,
)
from tests.test_interruption import Command

MONTH = 30 * housekeeping.DAY


def make(stage: str, number: int = 0, *, location: str = "", content: bool = False, **inputs: str) -> Artifact:
    """A month old."""
    key = Key(stage=stage, recipe=1, config={"number": number}, inputs=inputs)
    with publish(key, summary={}, location=location, content_identity=content) as (folder, artifact):
        (folder / "data").write_text(f"{stage} {number} {inputs}")
    age(artifact().path)
    return artifact()


def age(folder: Path, seconds: float = MONTH) -> None:
    then = time.time() - seconds
    record = json.loads((folder / MANIFEST).read_text()) if (folder / MANIFEST).exists() else None
    for path in sorted(folder.rglob("*")):
        os.utime(path, (then, then))
        if record and path.name == "data":
            record["files"]["data"]["mtime_ns"] = path.stat().st_mtime_ns
    if record:
        (folder / MANIFEST).write_text(json.dumps(record))
        os.utime(folder / MANIFEST, (then, then))
    os.utime(folder, (then, then))


class Line:
    """All artifacts of one run, the states in two parts as the pipeline has them."""

    def __init__(self, number: int) -> None:
        self.prompts = make("prompts", number, content=True, source=f"file {number}")
        asked = {"verifier": f"verifier {number}"}
        chunk = Key(stage="generation", recipe=1, config={"number": number}, inputs={"conversations": "ids", **asked})
        self.chunk = make("generation", number, location=f"{CHUNKS}/{chunk}", conversations="ids", **asked)
        self.conversations = make("generation", number, content=True, prompts=self.prompts.identity, **asked)
        self.corpus = make("tokenization", number, content=True, conversations=self.conversations.identity)
        self.states = make("extraction", number, corpus=self.corpus.identity, **asked)
        self.drafter = make("training", number, hidden_states=self.states.identity)
        self.report = make("evaluation", number, drafter=self.drafter.identity, hidden_states=self.states.identity)

    def all(self) -> set[str]:
        return {artifact.location for artifact in vars(self).values()}


def collect(*, days: float = 14, last: int = 0) -> set[str]:
    """Locations of what was removed."""
    removed, left = housekeeping.remove(housekeeping.survey(days=days, last=last))
    assert not left
    return {Path(item.path).relative_to(home()).as_posix() for item in removed}


def test_what_nothing_needs_goes_and_the_last_drafters_stay_with_all_they_were_made_from(home: Path) -> None:
    old, new = Line(1), Line(2)
    assert collect(last=1) == old.all()
    assert collect(last=1) == set()
    for location in new.all():
        assert (home / location / MANIFEST).exists()
    assert collect(last=0) == new.all()


def test_a_champion_stays_with_its_reports_however_old(home: Path) -> None:
    champion, newer = Line(1), Line(2)
    promote(
        "verifier 1", drafter=champion.drafter.key, report=champion.report.key, reason="first",
        promoted=datetime.now(UTC), instead_of=None,
    )  # fmt: skip
    assert collect() == newer.all()
    (home / "champions" / "verifier 1.json").write_text("{")
    with pytest.raises(ValueError, match="promote again"):  # who they are is not known: nothing may go
        collect()


def test_what_was_used_lately_stays_and_using_it_is_enough(home: Path) -> None:
    line = Line(1)
    verify(line.states)  # as a run does
    kept = {part.location for part in (line.states, line.corpus, line.conversations, line.chunk, line.prompts)}
    assert collect(days=1) == line.all() - kept
    assert collect(days=0) == kept


def test_a_drafter_to_start_from_is_needed_by_what_started_from_it(home: Path) -> None:
    first = Line(1)
    weights = next(iter(manifests_by_key()[first.drafter.key].files.values())).sha256
    make("training", 9, **{"initialisation.model.safetensors": weights})
    assert collect(last=1) == {first.report.location}


def manifests_by_key() -> dict[str, housekeeping.Manifest]:
    return {manifest.key: manifest for manifest in manifests()}


def test_what_an_active_run_used_stays_even_with_no_days_at_all(home: Path) -> None:
    """The run is another process, as always; when it dies, without a word, its things may go."""
    used, unused = Line(1), Line(2)
    code = (
        "import sys, time\n"
        "from dflash.housekeeping import protect_run\n"
        "from dflash.manifests import load_manifest, verify, home\n"
        "lock = protect_run('a-run')\n"
        f"verify(load_manifest(home() / {used.states.location!r}))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    assert run.stdout.readline() == "ready\n"
    kept = {part.location for part in (used.states, used.corpus, used.conversations, used.chunk, used.prompts)}
    assert collect(days=0) == unused.all() | used.all() - kept
    reasons = {item.fingerprint: item.keep for item in housekeeping.survey(days=0, last=0)}
    assert reasons[used.states.key] == "used by a run"
    assert reasons[used.corpus.key] == f"for {used.states.key}"
    run.kill()
    run.communicate()
    assert collect(days=0) == kept


@pytest.mark.parametrize("lock", ["{}", "{}-trainer"])
def test_what_is_being_made_is_left(home: Path, lock: str) -> None:
    line = Line(1)
    folder = in_progress(line.drafter.key)
    (folder / "step").write_text("")
    age(folder)
    with FileLock(home / "locks" / f"{lock.format(line.drafter.key)}.lock"):
        assert collect(days=0) == {line.report.location}
    assert collect(days=0) == line.all() - {line.report.location} | {f"in_progress/{line.drafter.key}"}


def test_an_artifact_that_a_run_begins_to_use_after_the_survey_is_left(home: Path) -> None:
    line = Line(1)
    items = housekeeping.survey(days=14, last=0)
    verify(line.states)
    removed, left = housekeeping.remove(items)
    assert [item.fingerprint for item in left] == [line.states.key]
    assert len(removed) == 6
    assert find(Key(**manifests_by_key()[line.states.key].model_dump(include=set(Key.model_fields))), deep=True)


def test_a_use_in_the_very_moment_of_removal_brings_it_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(1)
    items = [item for item in housekeeping.survey(days=14, last=0) if item.fingerprint == line.states.key]
    real = Path.rename

    def used_meanwhile(path: Path, target: Path) -> Path:
        if path == line.states.path:
            os.utime(path / MANIFEST)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", used_meanwhile)
    assert housekeeping.remove(items) == ([], items)
    verify(line.states, deep=True)


def test_an_interrupted_training_keeps_its_states_as_long_as_its_checkpoint(home: Path) -> None:
    line = Line(1)
    folder = in_progress("training-unfinished")
    (folder / "step-000010").mkdir()
    text = json.dumps({"settings": {"inputs": {"hidden_states": line.states.identity}}})
    (folder / "step-000010" / "checkpoint.json").write_text(json.dumps({"sha256": "", "text": text}))
    assert collect() == {line.drafter.location, line.report.location}
    age(folder)
    assert {"in_progress/training-unfinished", line.states.location} <= collect()


def test_leftovers_go_and_what_is_being_written_stays(home: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stage = home / "artifacts" / "extraction"
    for name in (f".extraction-1.{HOST}.{ended.pid}", f".extraction-1.{HOST}.{os.getpid()}", "extraction-2"):
        (stage / name).mkdir(parents=True)
        (stage / name / "part").write_text("half")
    assert collect() == {f"artifacts/extraction/.extraction-1.{HOST}.{ended.pid}"}
    age(stage / "extraction-2")
    assert collect() == {"artifacts/extraction/extraction-2"}


def test_a_damaged_artifact_that_is_needed_stays_for_its_whole_parts(home: Path) -> None:
    line = Line(1)
    (line.states.path / MANIFEST).rename(line.states.path / DAMAGED_MANIFEST)
    age(line.states.path)
    assert collect(last=1) == set()
    assert collect(last=0) == line.all()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_there_is_what_is_kept_is_whole_and_has_all_it_was_made_from(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Artifacts that share inputs in any way, used at any time, and a policy: the closure law."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("law")))
        made: list[Artifact] = []
        for number in range(data.draw(st.integers(1, 10))):
            inputs = data.draw(st.lists(st.sampled_from(made), max_size=3, unique_by=lambda a: a.key)) if made else []
            stage = data.draw(st.sampled_from(["generation", "extraction", "training", "evaluation"]))
            names = {
                "drafter" if one.stage == "training" else f"input {i}": one.identity for i, one in enumerate(inputs)
            }
            made.append(make(stage, number, content=stage == "generation", **names))
        recent = data.draw(st.lists(st.sampled_from(made), max_size=2))
        for artifact in recent:
            verify(artifact)
        last = data.draw(st.integers(0, 2))
        removed = collect(days=1, last=last)

        left = {manifest.key: manifest for manifest in manifests()}
        assert removed == {artifact.location for artifact in made if artifact.key not in left}
        known = {artifact.identity for artifact in made} | {artifact.key for artifact in made}
        names = {name for manifest in left.values() for name in (manifest.key, manifest.identity)}
        for manifest in left.values():
            verify(manifest, deep=True)
            assert {value for value in manifest.inputs.values() if value in known} <= names
        drafters = [artifact.key for artifact in made if artifact.stage == "training"]
        assert {artifact.key for artifact in recent} | set(drafters[len(drafters) - last :]) <= set(left)


def test_the_quota_is_one_number_and_more_is_a_warning(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("training")
    assert housekeeping.usage_and_quota() == (0, None)
    monkeypatch.setenv("DFLASH_QUOTA_GB", "0.0000001")
    used, quota = housekeeping.usage_and_quota()
    assert quota == 100
    assert used > quota
    done = dflash("ls")
    assert "DFLASH_QUOTA_GB" in done.stderr
    assert "dflash gc" in done.stderr
    monkeypatch.setenv("DFLASH_QUOTA_GB", "much")
    done = dflash("ls")
    assert done.returncode == 2
    assert done.stderr == "error: DFLASH_QUOTA_GB=much: give a number of GB, such as 500\n"


def dflash(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flows.cli", *arguments], capture_output=True, text=True)


def test_show_tells_an_artifact_by_a_few_letters_what_it_is_of_and_what_came_of_it(home: Path) -> None:
    line = Line(1)
    for name in (line.states.key, line.states.key[:18], line.states.key.rpartition("-")[2][:6]):
        facts = json.loads(dflash("show", name, "--json").stdout.splitlines()[-1])
        assert facts["fingerprint"] == line.states.key
        assert facts["inputs"] == {"corpus": line.corpus.key, "verifier": "verifier 1"}
        assert set(facts["used_by"]) == {line.drafter.key, line.report.key}
        assert facts["config"] == {"number": 1}
    assert line.corpus.key in dflash("show", line.states.key).stdout

    ambiguous, unknown = dflash("show", "generation"), dflash("show", "nothing")
    assert (ambiguous.returncode, unknown.returncode) == (2, 2)
    assert line.conversations.key in ambiguous.stderr
    assert "dflash ls" in unknown.stderr


def test_the_tree_has_reports_on_top_and_what_they_were_made_from_below(home: Path) -> None:
    line = Line(1)
    lines = dflash("ls", "--tree").stdout.splitlines()
    depth: dict[str, int] = {}
    for text in lines:
        for part in (line.report, line.drafter, line.states, line.corpus, line.conversations, line.prompts):
            if part.key in text:
                depth.setdefault(part.key, text.index(part.key.partition("-")[0]))
    assert list(depth) == [
        part.key for part in (line.report, line.drafter, line.states, line.corpus, line.conversations, line.prompts)
    ]
    assert sum("(see above)" in text for text in lines) == 1  # the states, of the report


def test_gc_deletes_only_when_told_to(home: Path) -> None:
    line = Line(1)
    done = dflash("gc", "--keep", "0", "--json")
    assert "may go: dflash gc --yes" in done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {item["fingerprint"] for item in result["items"] if not item["keep"]} == {
        item.fingerprint for item in housekeeping.survey(days=14, last=0)
    }
    assert len(manifests()) == 6
    done = dflash("gc", "--keep", "0", "--yes", "--json")
    assert done.stderr.startswith("freed ")
    assert json.loads(done.stdout.splitlines()[-1])["freed"] == result["may_go"] > 0
    assert not manifests()
    assert not list((home / "artifacts").glob(f"*/*/{line.report.key}"))


@pytest.mark.timeout(600)
def test_after_gc_a_run_of_what_was_kept_makes_nothing_again(tmp_path: Path, prefect_server: str) -> None:
    """Two real runs; what only the older one needs goes."""
    older = Command(tmp_path, prefect_server, **{"training.max_steps": 3})
    newer = Command(tmp_path, prefect_server, **{"generation.max_prompts": 20})
    first = older.finish()
    newer.finish()
    environment = {**os.environ, "DFLASH_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "flows.cli"]
    done = subprocess.run(
        [*command, "gc", "--days", "0", "--keep", "1", "--yes"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not Path(first["drafter"]).exists()
    assert subprocess.run([*command, "verify"], env=environment, capture_output=True).returncode == 0
    assert {stage["state"] for stage in newer.finish()["stages"]} == {"cached"}
    again = {stage["stage"]: stage["state"] for stage in older.finish()["stages"]}
    assert {name for name, state in again.items() if state == "ran"} == {
        "generation", "tokenization", "extraction", "training", "evaluation",
    }  # fmt: skip
