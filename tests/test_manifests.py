"""Artifacts: published whole or not at all, and checked before they are trusted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.manifests import HOST, MANIFEST, Artifact, Damaged, Key, find, load_manifest, manifests, publish, verify

KEY = Key(stage="tokenization", recipe=1, config={"max_length": 8}, inputs={"conversations": "abc"})


def make(key: Key = KEY, text: str = "hello", *, content_identity: bool = False) -> Artifact:
    with publish(key, summary={"rows": 1}, content_identity=content_identity) as (folder, result):
        (folder / "part").mkdir()
        (folder / "part" / "data.txt").write_text(text)
    return result()


def test_a_published_artifact_is_found_and_whole(home: Path) -> None:
    artifact = make()
    assert artifact.path == home / "artifacts" / "tokenization" / str(KEY)
    assert find(KEY, deep=True) == artifact
    assert [m.key for m in manifests()] == [str(KEY)]
    assert artifact.identity == str(KEY)


@pytest.mark.parametrize("change", [{"recipe": 2}, {"config": {"max_length": 9}}, {"inputs": {"conversations": "abd"}}])
def test_whatever_decides_the_output_changes_the_key(change: dict[str, object]) -> None:
    assert str(KEY.model_copy(update=change)) != str(KEY)


def test_content_identity_follows_the_bytes_not_the_key(home: Path) -> None:
    other = KEY.model_copy(update={"recipe": 2})
    assert make(KEY, content_identity=True).identity == make(other, content_identity=True).identity
    assert make(KEY, content_identity=True).identity != make(other, "other", content_identity=True).identity


def test_a_failure_while_writing_leaves_nothing(home: Path) -> None:
    with pytest.raises(RuntimeError), publish(KEY, summary={}) as (folder, _):
        (folder / "data.txt").write_text("half")
        raise RuntimeError
    assert find(KEY) is None
    assert not list((home / "artifacts" / "tokenization").iterdir())


def test_what_a_killed_attempt_left_is_removed_by_the_next(home: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    folder = home / "artifacts" / "tokenization"
    left, others = [folder / f".{KEY}.{HOST}.{pid}" for pid in (ended.pid, os.getppid())]
    other_host = folder / f".{KEY}.{HOST}-2.{ended.pid}"
    other_key = folder / f".{KEY.model_copy(update={'recipe': 2})}.{HOST}.{ended.pid}"
    for scratch in (left, others, other_host, other_key):
        scratch.mkdir(parents=True)
        (scratch / "data.txt").write_text("half")
    make()
    assert [path.exists() for path in (left, others, other_host, other_key)] == [False, True, True, True]


MAKER = """
from tests.test_manifests import make, verify
for number in range(60):
    verify(make(text="the same"), deep=True)
"""


@pytest.mark.usefixtures("home")
def test_two_processes_that_make_the_same_at_once_do_not_disturb_each_other() -> None:
    makers = [subprocess.Popen([sys.executable, "-c", MAKER]) for _ in range(2)]
    assert [maker.wait() for maker in makers] == [0, 0]
    assert find(KEY, deep=True)


def test_a_failure_while_replacing_never_leaves_the_old_manifest_beside_new_files(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr("dflash.manifests.write_atomically", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError):
        make(text="new")
    assert find(KEY) is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "4 bytes, expected 5"),
        (flip, "differs from its checksum"),
    ],
)
def test_damage_is_found_and_the_file_named(home: Path, damage, message: str) -> None:
    artifact = make()
    damage(artifact.path / "part" / "data.txt")
    with pytest.raises(Damaged, match=message) as error:
        verify(artifact)
    assert "part/data.txt" in str(error.value)
    with pytest.raises(Damaged):
        find(KEY)
    make()
    assert find(KEY)


def test_damage_with_an_untouched_time_stamp_is_found_by_a_deep_check(home: Path) -> None:
    artifact = make()
    file = artifact.path / "part" / "data.txt"
    before = file.stat()
    flip(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    verify(artifact)
    with pytest.raises(Damaged):
        verify(artifact, deep=True)


def test_a_damaged_manifest_is_one_clear_line(home: Path) -> None:
    artifact = make()
    (artifact.path / MANIFEST).write_text("{")
    with pytest.raises(Damaged, match="run its stage again"):
        find(KEY)


def test_one_unreadable_artifact_does_not_hide_the_others(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = make(), make(KEY.model_copy(update={"recipe": 2}))
    (broken.path / MANIFEST).write_text("{")
    assert [manifest.key for manifest in manifests()] == [whole.key]
    assert broken.key in caplog.text


def test_a_copied_root_stays_valid_and_is_hashed_only_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make()
    shutil.copytree(home, tmp_path / "moved", copy_function=shutil.copyfile)
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "moved"))
    assert find(KEY) == artifact
    recorded = load_manifest(artifact.path).files["part/data.txt"]
    assert (artifact.path / "part" / "data.txt").stat().st_mtime_ns == recorded.mtime_ns
