import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.config import SourceConfig
from dflash.inputs import category_of, files_of, format_of, hub_revision, identity_of


@pytest.fixture(autouse=True)
def data_root(home: Path) -> Path:
    return home


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four conversation files, and others that are none."""
    data = ("a.jsonl", "b/c.parquet", "b/d.json.gz", "e.JSONL.zst")
    for name in (*data, ".hidden.jsonl", ".cache/a.jsonl", "b/.cache/b/g.jsonl", "README.md", "b/f.gz"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    return tmp_path / "data"


def names(path: Path | str, root: Path) -> list[str]:
    return [file.relative_to(root).as_posix() for file in files_of(SourceConfig(path=str(path)))]


def test_a_folder_gives_its_conversation_files_sorted(folder: Path):
    assert names(folder, folder) == ["a.jsonl", "b/c.parquet", "b/d.json.gz", "e.JSONL.zst"]


def test_a_pattern_gives_the_files_that_match_and_a_file_itself(folder: Path):
    assert names(folder / "*.jsonl", folder) == ["a.jsonl"]
    assert names(folder / "**" / "*.[jp]*", folder) == ["a.jsonl", "b/c.parquet", "b/d.json.gz"]
    assert names(folder / "e.JSONL.zst", folder) == ["e.JSONL.zst"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(folder: Path):
    (folder / "a[1].jsonl").write_text("")
    assert names(folder / "a[1].jsonl", folder) == ["a[1].jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "none.jsonl: no such prompt file; give a file, folder"),
        ("*.csv", r"\*.csv: no file matches this pattern"),
        ("README.md", "README.md: unknown kind of file; expected .jsonl, .ndjson, .json, .parquet, maybe with .gz"),
        ("b/f.gz", "f.gz: unknown kind of file"),
        ("*", "README.md: unknown kind of file"),
        ("empty", "empty: the folder holds no .jsonl, .ndjson, .json, .parquet file"),
        ("a.parquet.zst", "a.parquet.zst: a Parquet file is compressed inside, and only read as such; unpack it"),
    ],
)
def test_what_is_no_source_is_refused_with_a_remedy(folder: Path, name: str, message: str):
    (folder / "empty").mkdir()
    if name.endswith(".zst"):
        (folder / name).touch()
    with pytest.raises(ValueError, match=message) as caught:
        files_of(SourceConfig(path=str(folder / name)))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("name", ["", "b"])
def test_a_folder_without_permission_is_named_and_not_taken_for_an_empty_one(folder: Path, name: str):
    (folder / name).chmod(0)
    try:
        with pytest.raises(ValueError, match=r"data(/b)?: the folder cannot be read .*; change its permissions"):
            files_of(SourceConfig(path=str(folder)))
    finally:
        (folder / name).chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_in_a_folder_without_permission_is_named(folder: Path):
    (folder / "b").chmod(0)
    try:
        with pytest.raises(ValueError, match=r"b/c.parquet: cannot be read .*; change its permissions"):
            files_of(SourceConfig(path=str(folder / "b/c.parquet")))
    finally:
        (folder / "b").chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_without_permission_has_no_identity(folder: Path):
    (folder / "a.jsonl").chmod(0)
    with pytest.raises(ValueError, match=r"a.jsonl: cannot be read .*; change its permissions"):
        identity_of(SourceConfig(path=str(folder)))


def test_formats_and_categories_come_from_names():
    assert [format_of(Path(name)) for name in ("a.ndjson.gz", "a.b.JSON", "a.parquet")] == [
        ".jsonl",
        ".json",
        ".parquet",
    ]
    assert [category_of(Path(name)) for name in ("x/chats.v2.jsonl.gz", ".jsonl")] == ["chats", ".jsonl"]


@pytest.mark.parametrize("prefix", ["", "hub:"])
def test_an_identity_is_of_contents_and_file_names_not_of_places(folder: Path, prefix: str):
    def identity(path: Path) -> str:
        return identity_of(SourceConfig(path=f"{prefix}{path}"))

    before = identity(folder)
    moved = folder.parent / "elsewhere" / "data"
    shutil.copytree(folder, moved)
    (moved / "README.md").write_text("changed")
    assert identity(moved) == before
    (moved / "a.jsonl").write_text("changed")
    assert identity(moved) != before
    (folder / "a.jsonl").rename(folder / "a2.jsonl")
    assert identity(folder) != before


def test_subset_and_split_are_part_of_a_datasets_identity(folder: Path):
    source = SourceConfig(path=f"hub:{folder}")
    others = [source.model_copy(update=change) for change in ({"split": "test"}, {"subset": "french"})]
    assert len({identity_of(s) for s in (source, *others)}) == 3
    assert len({hub_revision(s) for s in (source, *others)}) == 1


def test_a_dataset_that_cannot_be_reached_is_named():
    with pytest.raises(
        ValueError, match=r"^hub:nobody/nothing at 'main': not reachable on the hub \(.*\); check the name"
    ):
        identity_of(SourceConfig(path="hub:nobody/nothing"))


def test_without_a_network_a_dataset_is_named_too():
    # nothing listens at this address; in a process of its own, as the tests' own is offline
    code = "from dflash.inputs import _commit\ntry: _commit('nobody/nothing', 'main')\nexcept ValueError as e: print(e)"
    environment = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("hub:nobody/nothing at 'main': not reachable on the hub (ConnectError); check the")


def test_a_dataset_without_a_name_has_no_identity():
    with pytest.raises(ValueError, match=r"^hub:: no dataset is named; give hub:OWNER/NAME"):
        identity_of(SourceConfig(path="hub:"))
