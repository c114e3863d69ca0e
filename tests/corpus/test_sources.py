import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dflash.config import SourceConfig
from dflash.corpus import sources
from dflash.corpus.records import Rejected
from dflash.corpus.sources import MAX_ROW_BYTES, estimate_rows, read_rows, sample_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"Why {i}?", "response": "Because."} for i in range(2500)]
ESCAPED = {"prompt": "a\u2028b\u0085c 😀"}


def rows_of(path: Path | str, **options: Any) -> list[tuple[str, Any]]:
    return list(read_rows(SourceConfig(path=str(path), **options)))


def values_of(path: Path | str, **options: Any) -> list[Any]:
    return [row for _, row in rows_of(path, **options)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)).encode()


def parquet(rows: list[Any]) -> bytes:
    file = io.BytesIO()
    pl.DataFrame(rows).write_parquet(file, row_group_size=700)
    return file.getvalue()


def zstd(content: bytes) -> bytes:
    middle = len(content) // 2
    frame = zstandard.ZstdCompressor().compress
    return frame(content[:middle]) + frame(b"") + frame(content[middle:])


FILES: dict[str, Callable[[list[Any]], bytes]] = {
    "rows.jsonl": lines,
    "rows.ndjson": lines,
    "rows.JSONL": lines,
    "unended.jsonl": lambda rows: lines(rows)[:-1],
    "windows.jsonl": lambda rows: b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n"),
    "rows.json": lambda rows: json.dumps(rows).encode(),
    "marked.json": lambda rows: b"\xef\xbb\xbf \n" + json.dumps(rows, indent=1).encode(),
    "held.json": lambda rows: json.dumps({"version": [1], "about": {"data": [{}]}, "data": rows}).encode(),
    "lines.json": lines,
    "rows.parquet": parquet,
    "rows.jsonl.gz": lambda rows: gzip.compress(lines(rows[:9])) + gzip.compress(lines(rows[9:])),
    "rows.jsonl.zst": lambda rows: zstd(lines(rows)),
    "rows.json.zst": lambda rows: zstd(json.dumps(rows).encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_rows_in_order(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name](ROWS))
    assert rows_of(tmp_path / name) == [(f"{tmp_path / name}:{i}", row) for i, row in enumerate(ROWS, start=1)]


@pytest.mark.parametrize("name", FILES)
def test_texts_arrive_as_they_were_written(tmp_path: Path, name: str):
    rows = [ESCAPED | {"tools": [{"x": 1.5}]}] * 2
    (tmp_path / name).write_bytes(FILES[name](rows))
    assert values_of(tmp_path / name) == rows


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"held.json"}))
def test_a_file_without_rows_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name]([]))
    with pytest.raises(ValueError, match=f"{name}: the file is empty; give at least one row or leave the file out"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_without_bytes_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match="the file is empty; give at least one row or leave the file out"):
        rows_of(tmp_path / name)


def test_files_follow_each_other_in_order_of_their_names(tmp_path: Path):
    for name in ("b.jsonl", "a/c.json", "a/b.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(FILES[f"rows{Path(name).suffix}"]([{"prompt": name}]))
    assert [row["prompt"] for row in values_of(tmp_path)] == ["a/b.parquet", "a/c.json", "b.jsonl"]


@pytest.mark.parametrize(
    ("line", "reason", "message"),
    [
        (b'{"prompt": "Why?"', "bad_json", "at column 18; give one JSON object per row"),
        (b"{" * 100, "bad_json", "at column 2"),
        (b"[" * 100_000, "bad_json", "nested too deeply"),
        (b'{"n": ' + b"9" * 5000 + b"}", "bad_json", "digits"),
        (b'{"prompt": "caf\xe9"}', "bad_encoding", "byte 16 is no UTF-8; save the file as UTF-8"),
        (b'{"prompt": "a\0b"}', "bad_encoding", "NUL"),
        ('{"prompt": "Why?"}'.encode("utf-16"), "bad_encoding", ""),
        (b'["Why?"]', "not_an_object", "a JSON list; give an object"),
        (b'"Why?"', "not_an_object", "a JSON str"),
        (b'{"prompt": "' + b"x" * (50 * 2**20) + b'"}', "too_large", "a row of more than 16,777,216 bytes"),
    ],
)
def test_a_row_that_cannot_be_read_is_rejected_and_the_next_one_is_read(
    tmp_path: Path, line: bytes, reason: str, message: str
):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "before"}\n' + line.replace(b"\n", b"") + b'\n \n{"prompt": "after"}')
    (_, before), (place, rejected), (last, after) = rows_of(path)
    assert (before, after) == ({"prompt": "before"}, {"prompt": "after"})
    assert (place, last) == (f"{path}:3", f"{path}:5")
    assert isinstance(rejected, Rejected)
    assert rejected.reason == reason
    assert message in str(rejected)
    assert "\n" not in str(rejected)
    assert len(str(rejected)) < 300


@pytest.mark.parametrize("length", [MAX_ROW_BYTES - 1, MAX_ROW_BYTES, MAX_ROW_BYTES + 1, 2 * MAX_ROW_BYTES + 1])
@pytest.mark.parametrize("end", [b"", b"\n", b"\n{}\n"])
def test_a_line_is_too_large_exactly_above_the_limit(tmp_path: Path, length: int, end: bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a":"' + b"x" * (length - 8) + b'"}' + end)
    first, *others = values_of(path)
    assert isinstance(first, Rejected) == (length > MAX_ROW_BYTES)
    assert others == ([{}] if end.endswith(b"}\n") else [])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_long_line_is_never_in_memory_as_a_whole(tmp_path: Path, name: str):
    path = tmp_path / name
    pack = {".jsonl": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[path.suffix]
    path.write_bytes(pack(b"x" * 200 * 2**20 + b"\n{}\n"))
    tracemalloc.start()
    try:
        first, second = values_of(path)
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_ROW_BYTES
    finally:
        tracemalloc.stop()
    assert (first.reason, second) == ("too_large", {})


def test_elements_of_a_list_that_are_no_objects_are_rejected(tmp_path: Path):
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "Why?"}, "Why?", null, {}]')
    first, second, third, last = values_of(path)
    assert (first, last) == ({"prompt": "Why?"}, {})
    assert [second.reason, third.reason] == ["not_an_object"] * 2


@pytest.mark.parametrize(
    "content",
    [
        b'[{"a": 1}, {"a": 2}, {"a',
        b'[{"a": 1}, {"a": 2}, ',
        b'[{"a": 1}, {"a": 2}, {"a": [}, {"a": 4}]',
        b'[{"a": 1}, {"a": 2}], {"a": 3}]',
        b'[{"a": 1}, {"a": 2}] 3',
        b'{"data": [{"a": 1}, {"a": 2}], "about": [1, 2',
        b'{"data": [{"a": 1}, {"a": 2}, ' + b'{"a": 1},' * 2**21,
    ],
)
def test_a_malformed_list_is_refused_with_its_row(tmp_path: Path, content: bytes):
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    place = r"rows.json:\d{7}" if len(content) > 2**20 else "rows.json:3"
    with pytest.raises(ValueError, match=place + r": malformed JSON \(.*; mend it, or give JSON lines$"):
        rows_of(path)


ODD_ROWS = [
    (b'{"prompt": "Why?", "score": NaN}', ""),
    (b'{"prompt": "Why?", "n": 123456789012345678901234567890}', ""),
    (b'{"prompt": "caf\xe9"}', "bad_encoding"),
    (b'{"prompt": "a\0b"}', "bad_encoding"),
    (b'{"prompt": oops}', "bad_json"),
    (b'{"prompt": "He said "why?" and left"}', "bad_json"),
    (b'{"prompt": "' + b"x, [" * (5 * 2**20) + b'"}', "too_large"),
    (b'["Why?", "x"]', "not_an_object"),
]


@pytest.mark.parametrize(("row", "reason"), ODD_ROWS)
@pytest.mark.parametrize("whole", [b"[%s]", b'{"version": 1, "data": [%s]}'])
def test_an_odd_element_of_a_list_is_what_it_is_as_a_line_and_the_next_one_is_read(
    tmp_path: Path, row: bytes, reason: str, whole: bytes
):
    rows = (b'{"prompt": "before"}', row, b'{"prompt": "after"}')
    (tmp_path / "rows.json").write_bytes(whole % b", ".join(rows))
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(rows))
    before, odd, after = values_of(tmp_path / "rows.json")
    [_, line, _] = values_of(tmp_path / "rows.jsonl")
    assert (before, after) == ({"prompt": "before"}, {"prompt": "after"})
    assert repr(odd) == repr(line)
    assert (odd.reason if isinstance(odd, Rejected) else "") == reason


def test_half_a_surrogate_is_in_a_list_what_it_is_in_a_line(tmp_path: Path):
    row = b'{"prompt": "a\\ud800b"}'
    (tmp_path / "rows.json").write_bytes(b"[" + row + b"]")
    assert values_of(tmp_path / "rows.json") == [{"prompt": "a\ud800b"}]  # for conversations to reject


JSON_VALUES = st.recursive(
    st.none() | st.integers() | st.text('a"\\{}[], \n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a"\\:{', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.fixed_dictionaries({"v": JSON_VALUES}), min_size=1, max_size=4), st.integers(1, 9), st.booleans())
def test_the_rows_of_a_list_do_not_depend_on_its_spaces_nor_on_how_it_is_read(
    rows: list[Any], piece: int, indented: bool
):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE_BYTES", piece)
        for whole in (rows, {"v": [1, [{}]], "data": rows, "n": 1}):
            path = Path(folder) / "rows.json"
            path.write_text(json.dumps(whole, indent=1 if indented else None))
            assert values_of(path) == rows


@pytest.mark.parametrize(
    "row",
    [{"messages": [{"role": "user"}]}, {"tools": [{}], "id": 1, "messages": []}, {"prompt": "Why?"}, {"prompt": ["["]}],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_row_that_holds_a_list_is_no_list_of_rows(tmp_path: Path, row: dict[str, Any], indent: int | None):
    (tmp_path / "rows.json").write_text(json.dumps(row, indent=indent))
    assert values_of(tmp_path / "rows.json") == [row]
    (tmp_path / "rows.json").write_text("\n".join(json.dumps(row, indent=indent) for _ in range(3)))
    assert values_of(tmp_path / "rows.json") == [row] * 3


def test_lines_by_another_name_are_lines_whatever_the_first_one_holds(tmp_path: Path):
    rows = [{"data": [{"a": 1}]}, {"prompt": "Why?"}]
    (tmp_path / "rows.json").write_bytes(lines(rows))
    assert values_of(tmp_path / "rows.json") == rows


@pytest.mark.parametrize("size", [1, 2 * MAX_ROW_BYTES])
def test_of_two_lists_of_rows_none_is_taken_for_the_data(tmp_path: Path, size: int):
    both = {"train": [{"prompt": "x" * size}], "test": [{"prompt": "Why?"}]}
    (tmp_path / "rows.json").write_text(json.dumps(both))
    with pytest.raises(ValueError, match=r"rows.json: holds two lists of rows, 'train' and 'test'; save each"):
        rows_of(tmp_path / "rows.json")


def test_a_malformed_first_line_of_lines_by_another_name_is_one_rejected_row(tmp_path: Path):
    (tmp_path / "rows.json").write_bytes(b'{"prompt" "Why?"}\n{"prompt": "Why?"}\n')
    first, second = values_of(tmp_path / "rows.json")
    assert (first.reason, second) == ("bad_json", {"prompt": "Why?"})


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl.zst", "rows.json.zst", "rows.parquet"])
@pytest.mark.parametrize("damage", ["cut", "cut early", "overwritten"])
def test_damaged_files_are_refused_by_name(tmp_path: Path, name: str, damage: str):
    path = tmp_path / name
    content = FILES[name](ROWS)
    middle = len(content) // 3
    damaged = {
        "cut": content[:-3],
        "cut early": content[:middle],
        "overwritten": content[:middle] + bytes(500) + content[middle + 500 :],
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=f"^{path}:") as caught:
        rows_of(path)
    assert "\n" not in str(caught.value)
    if damage == "cut early" and name.endswith("parquet"):
        with pytest.raises(ValueError, match=f"^{path}: damaged .*; fetch or write the file again$"):
            estimate_rows(SourceConfig(path=str(tmp_path)))


def test_a_text_that_only_calls_itself_packed_is_refused(tmp_path: Path):
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        (tmp_path / name).write_bytes(lines(ROWS[:20]))
        with pytest.raises(ValueError, match=f"{name}: damaged after row 0 .*; fetch or write the file again"):
            rows_of(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}: damaged \(.*; fetch or write the file again"):
            estimate_rows(SourceConfig(path=str(tmp_path / name)))


def test_a_file_that_disappears_while_others_are_read_is_named(tmp_path: Path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes(lines(ROWS[:2]))
    rows = read_rows(SourceConfig(path=str(tmp_path)))
    next(rows)
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(ValueError, match=r"b.jsonl: gone after row 0; leave the file in place"):
        list(rows)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_file_without_permission_is_named(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name](ROWS[:2]))
    (tmp_path / name).chmod(0)
    with pytest.raises(ValueError, match=f"{name}: .*(check its permissions|ermission denied)"):
        rows_of(tmp_path / name)


def test_only_columns_of_conversations_are_read_from_parquet(tmp_path: Path):
    frame = pl.DataFrame({"messages": [[{"role": "user", "content": "Why?"}]], "embedding": [[0.0] * 9]})
    frame.write_parquet(tmp_path / "rows.parquet")
    assert values_of(tmp_path / "rows.parquet") == [{"messages": [{"role": "user", "content": "Why?"}]}]
    frame.select("embedding").write_parquet(tmp_path / "rows.parquet")
    assert values_of(tmp_path / "rows.parquet") == [{"embedding": [0.0] * 9}]


CALLING: list[dict[str, Any]] = [
    {"tools": [{"name": "add", "parameters": {"a": {"type": "int"}, "b": {"type": "int"}}}]},
    {"tools": [{"name": "say", "parameters": {"text": {"type": "text"}}}, {"name": "stop"}]},
    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "tool_calls": [{"arguments": {"a": 1}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"arguments": {"text": "a"}}]}]},
]


def test_a_table_adds_no_nulls_to_tools_and_calls(tmp_path: Path):
    (tmp_path / "rows.parquet").write_bytes(parquet(CALLING))
    assert values_of(tmp_path / "rows.parquet") == CALLING
    (tmp_path / "rows.jsonl").write_bytes(lines([{"tools": [{"default": None}]}]))
    assert values_of(tmp_path / "rows.jsonl") == [{"tools": [{"default": None}]}]


def test_a_cell_of_a_table_may_be_too_large(tmp_path: Path):
    rows = [{"messages": [{"role": "user", "content": "x" * size}]} for size in (1, MAX_ROW_BYTES, 1)]
    (tmp_path / "rows.parquet").write_bytes(parquet(rows))
    first, large, last = values_of(tmp_path / "rows.parquet")
    assert (first, large.reason, last) == (rows[0], "too_large", rows[2])


@pytest.mark.parametrize("name", FILES)
def test_reading_may_stop_at_any_row(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name](ROWS))
    source = SourceConfig(path=str(tmp_path / name))
    assert [row for _, row in sample_rows(source, count=3)] == ROWS[:3]
    with closing(read_rows(source)) as rows:
        assert [row for _, row in islice(rows, 1500)] == ROWS[:1500]


@pytest.mark.parametrize("name", FILES)
def test_estimates_are_exact_in_rows_for_small_files_and_near_in_characters(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(FILES[name](ROWS))
    source = SourceConfig(path=str(tmp_path / name))
    rows, characters = estimate_rows(source)
    assert rows == len(ROWS)
    assert characters == pytest.approx(len(lines(ROWS)), rel=0.3)
    assert estimate_rows(source.model_copy(update={"limit": 100})) == (100, round(characters * 100 / rows))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_estimates_of_large_files_are_near(tmp_path: Path, name: str):
    rows = [{"prompt": os.urandom(80 + 20 * (i % 7)).hex()} for i in range(50_000)]
    for part in ("a", "b"):
        (tmp_path / f"{part}{name}").write_bytes(FILES[name](rows))
    assert estimate_rows(SourceConfig(path=str(tmp_path)))[0] == pytest.approx(100_000, rel=0.15)


def test_bundled_samples_are_sources():
    [(place, row)] = sample_rows(SourceConfig(path="bundled:gsm8k-train"), count=1)
    assert place.endswith("gsm8k_train.jsonl:1")
    assert "messages" in row
    assert estimate_rows(SourceConfig(path="bundled:evaluation"))[0] == 80


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A downloaded dataset of two splits."""
    pytest.importorskip("datasets")
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines([row | {"n": 1} for row in ROWS[:20]]))
    (folder / "test.jsonl").write_bytes(lines(ROWS[20:25]))
    return folder


def test_a_dataset_is_read_by_split(dataset: Path):
    assert rows_of(f"hub:{dataset}") == [(f"hub:{dataset}:{i}", row) for i, row in enumerate(ROWS[:20], start=1)]
    assert values_of(f"hub:{dataset}", split="test") == ROWS[20:25]
    assert estimate_rows(SourceConfig(path=f"hub:{dataset}"))[0] == 25


@pytest.mark.parametrize("option", [{"split": "dev"}, {"subset": "french"}])
def test_a_split_or_subset_that_is_not_there_is_named(dataset: Path, option: dict[str, str]):
    [value] = option.values()
    with pytest.raises(ValueError, match=f"^hub:{dataset}: .*{value}.*; check name, subset and split$") as caught:
        rows_of(f"hub:{dataset}", **option)
    assert "\n" not in str(caught.value)


def test_a_dataset_adds_no_nulls_to_tools_and_calls(dataset: Path):
    (dataset / "train.jsonl").unlink()
    (dataset / "train.parquet").write_bytes(parquet(CALLING))
    (dataset / "test.jsonl").unlink()
    assert values_of(f"hub:{dataset}") == CALLING


def test_a_dataset_without_a_name_is_refused():
    for read in (rows_of, lambda path: estimate_rows(SourceConfig(path=path))):
        with pytest.raises(ValueError, match=r"^hub:: no dataset is named; give hub:OWNER/NAME"):
            read("hub:")


def test_a_damaged_dataset_is_refused_by_name(dataset: Path):
    (dataset / "train.jsonl").write_bytes(lines(ROWS[:3]) + b'{"prompt": oops}\n')
    with pytest.raises(ValueError, match=f"^hub:{dataset}: cannot be read after row"):
        rows_of(f"hub:{dataset}")
