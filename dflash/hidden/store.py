"""Hidden states on disk: writing one shard, reading rows. Knows no model; how Zarr lays arrays out is known to `raw`.

A shard is a Zarr v3 group of arrays, a row per token: `features` (taps x hidden), `input_ids`, `loss_mask`,
`greedy_ids`; where asked for `final`, `topk_ids` and `topk_logprobs`; with fp8 the `scales` of the features. `offsets`
are the first token of each conversation, and the end. Conversations with unusable states are named by the attribute
`left_out`; their mask is 0, their states mean nothing, and ledger.json says why. A shard counts only with its manifest.

T tokens of a row, P of a batch, K taps or likeliest tokens, H hidden size, F features (taps x hidden size), R rows
"""

import json
import math
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from dflash.hidden.encoding import (
    ENCODINGS,
    GROUP,
    NUMBERS,
    bits,
    code_memory,
    decode_fp8,
    encode,
    encode_fp8,
    relative_errors,
)
from dflash.hidden.raw import ArrayReader, ArrayWriter, read_attributes, write_group
from dflash.manifests import (
    DAMAGED_MANIFEST,
    MANIFEST,
    Artifact,
    Damaged,
    Manifest,
    called_by_inputs,
    check_files,
    load_manifest,
    verify,
    write_atomically,
)

if TYPE_CHECKING:
    from dflash.hidden.remote import RemoteArray

FORMAT, FORMAT_VERSION = "dflash-hidden-states", 2
CHUNK_BYTES = 512 * 2**10  # little is read besides a row, and a checksum still finds its chunk in the cache
CHUNK_TOKENS = 512
FILE_BYTES = 16 * 2**30  # few files, since a shard of wide states has 40 GB; each is written as a stream
# A row's median token norm against that of all rows of the shard. Single tokens have a thousand times the usual norm,
# and medians of short rows see some of that; what must not pass is a row of another scale, precision or layer.
NORM_FACTOR = 32.0
LEDGER = "ledger.json"
REMOTE = "remote.json"  # of a shard whose arrays lie in an object store: where, their sizes and checksums
FINAL = "the output of the verifier's final norm, which its LM head reads"
SAME = ("storage_dtype", "num_taps", "hidden_size", "store_final", "top_k", "target_layer_ids", "verifier")


class RowStates(NamedTuple):
    """One conversation: features in the stored precision, ids and greedy choices as int64, mask as bool, all on CPU.

    The rest is None where it is not stored: the state that the verifier's head reads, and the verifier's likeliest
    tokens after each token, with their log-probabilities.
    """

    features_TF: torch.Tensor  # noqa: N815
    input_ids_T: torch.Tensor  # noqa: N815
    loss_mask_T: torch.Tensor  # noqa: N815
    greedy_ids_T: torch.Tensor  # noqa: N815
    final_TH: torch.Tensor | None = None  # noqa: N815
    topk_ids_TK: torch.Tensor | None = None  # noqa: N815
    topk_logprobs_TK: torch.Tensor | None = None  # noqa: N815


ARRAYS = ("features", "input_ids", "loss_mask", "greedy_ids", "final", "topk_ids", "topk_logprobs")  # of these fields


class PackedStates(NamedTuple):
    """Conversations one after the other, without padding: P tokens in all."""

    features_PF: torch.Tensor  # noqa: N815
    input_ids_P: torch.Tensor  # noqa: N815
    loss_mask_P: torch.Tensor  # noqa: N815
    greedy_ids_P: torch.Tensor  # noqa: N815
    final_PH: torch.Tensor | None  # noqa: N815
    topk_ids_PK: torch.Tensor | None  # noqa: N815
    topk_logprobs_PK: torch.Tensor | None  # noqa: N815
    lengths: tuple[int, ...]


class Row(NamedTuple):
    """Where a conversation lies, and what is known of it without reading it."""

    id: str
    category: str
    split: str
    bucket: int
    length: int
    num_supervised: int
    shard: int
    start: int


class ArrayKind(NamedTuple):
    """What an array holds per token, and how it is decoded."""

    dtype: str
    shape: tuple[int, ...]
    attributes: dict[str, Any]


class LeftOut(NamedTuple):
    """A conversation whose states no one could use; `row` is its number in the shard."""

    row: int
    id: str
    reason: str


def layout(row_bytes: int, num_tokens: int) -> tuple[int, int]:
    """(tokens per chunk, tokens per file): chunks of at most 512 KiB, files of at most 16 GiB."""
    chunk = min(CHUNK_TOKENS, 2 ** (max(1, CHUNK_BYTES // row_bytes).bit_length() - 1))
    file = chunk * max(1, FILE_BYTES // row_bytes // chunk)
    return chunk, min(file, -(-num_tokens // chunk) * chunk)


def write_shard(
    folder: Path,
    rows: Iterable[RowStates],
    *,
    ids: Sequence[str],
    lengths: Sequence[int],
    num_taps: int,
    hidden_size: int,
    storage_dtype: str,
    attributes: Mapping[str, Any],
    store_final: bool = False,
    top_k: int = 0,
    vocab_size: int = 2**31,
    max_left_out_share: float = 0.0,
) -> list[LeftOut]:
    """Write the rows, in order, as a Zarr group into an empty folder, a chunk at a time; returns those left out.

    Left out are rows of other shapes than announced, with ids outside the vocabulary, values that are not finite, a
    tap that is zero throughout or the same for different tokens, or norms far from the other rows'. Raises ValueError,
    with the first reason, where that is more than the share, and for a wrong number of rows.
    """
    assert storage_dtype != "fp8" or hidden_size % GROUP == 0
    kinds = _array_kinds(num_taps, hidden_size, storage_dtype=storage_dtype, store_final=store_final, top_k=top_k)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    mask_T = np.zeros(offsets[-1], np.uint8)  # written last: only then is it known which rows are kept
    left_out: list[LeftOut] = []
    norms: dict[int, torch.Tensor] = {}
    errors: list[tuple[float, int, float]] = []  # of each row: sum of squares, count, largest

    def leave_out(number: int, reason: str) -> None:
        left_out.append(LeftOut(number, ids[number], reason))
        mask_T[offsets[number] : offsets[number + 1]] = 0
        if len(left_out) > max_left_out_share * len(lengths):
            raise ValueError(
                f"row {left_out[0].id}: {left_out[0].reason} (extraction.max_left_out_share is "
                f"{max_left_out_share:g}, and this is number {len(left_out)} of {len(lengths)} rows)"
            )

    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(_writer(folder / name, kind, len(mask_T), dimension="token"))
            for name, kind in kinds.items()
        }
        count = 0
        for count, row in enumerate(rows, start=1):
            number = count - 1
            if count > len(lengths):
                raise ValueError(f"{folder}: more rows than the {len(lengths)} announced")
            reason, norms_K = _inspect(
                row, length=lengths[number], kinds=kinds, num_taps=num_taps, vocab_size=vocab_size
            )
            if reason:
                leave_out(number, reason)
                numbers = {name: np.zeros((lengths[number], *kind.shape), kind.dtype) for name, kind in kinds.items()}
            else:
                norms[number] = norms_K
                numbers = _numbers(row, kinds)
                mask_T[offsets[number] : offsets[count]] = numbers["loss_mask"]
                if storage_dtype == "fp8":
                    errors_N = relative_errors(
                        row.features_TF, numbers["features"], numbers["scales"], num_taps=num_taps
                    )
                    errors.append((errors_N.square().sum().item(), len(errors_N), errors_N.max().item()))
            for name in kinds.keys() - {"loss_mask"}:
                writers[name].append(numbers[name])
        if count != len(lengths):
            raise ValueError(f"{folder}: {count} rows, {len(lengths)} announced")
        for number, reason in _far_from_the_others(norms, num_taps):
            leave_out(number, reason)
        writers["loss_mask"].append(mask_T)
        kind = ArrayKind("int64", (), {})
        stack.enter_context(_writer(folder / "offsets", kind, len(offsets), dimension="row")).append(offsets)
    if left_out:
        write_atomically(folder / LEDGER, json.dumps([entry._asdict() for entry in left_out], indent=1))
    own = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "storage_dtype": storage_dtype,
        "num_taps": num_taps,
        "hidden_size": hidden_size,
        "store_final": store_final,
        "top_k": top_k,
        "left_out": [number for number, _, _ in left_out],
    }
    if errors:
        squares, counts, largest = zip(*errors, strict=True)
        rms = (sum(squares) / sum(counts)) ** 0.5
        own["fp8_error"] = {"of": "|decoded - exact| / |exact| per token and tap", "rms": rms, "max": max(largest)}
    write_group(folder, {**attributes, **own})
    return left_out


def _array_kinds(
    num_taps: int, hidden_size: int, *, storage_dtype: str, store_final: bool, top_k: int
) -> dict[str, ArrayKind]:
    """The arrays with a row per token."""
    width, final = num_taps * hidden_size, "float32" if storage_dtype == "float32" else "bfloat16"
    kinds = {
        "features": ArrayKind(NUMBERS[storage_dtype], (width,), ENCODINGS[storage_dtype]),
        "input_ids": ArrayKind("int32", (), {}),
        "loss_mask": ArrayKind("uint8", (), {}),
        "greedy_ids": ArrayKind("int32", (), {}),
    }
    if storage_dtype == "fp8":
        kinds["scales"] = ArrayKind("uint16", (width // GROUP,), ENCODINGS["bfloat16"])
    if store_final:
        kinds["final"] = ArrayKind(NUMBERS[final], (hidden_size,), ENCODINGS[final] | {"state": FINAL})
    if top_k:
        kinds["topk_ids"] = ArrayKind("int32", (top_k,), {})
        kinds["topk_logprobs"] = ArrayKind("float32", (top_k,), {})
    return kinds


def _writer(folder: Path, kind: ArrayKind, num_rows: int, *, dimension: str) -> ArrayWriter:
    chunk, file = layout(math.prod(kind.shape) * np.dtype(kind.dtype).itemsize, num_rows)
    return ArrayWriter(
        folder,
        row_shape=kind.shape,
        dtype=kind.dtype,
        chunk=chunk,
        file=file,
        dimension_names=[dimension, "channel"][: 1 + len(kind.shape)],
        attributes=kind.attributes,
    )


def _numbers(row: RowStates, kinds: Mapping[str, ArrayKind]) -> dict[str, np.ndarray]:
    """What goes into each array."""
    numbers = {}
    for name, tensor in zip(ARRAYS, row, strict=True):
        if name not in kinds or tensor is None:
            continue
        if "scales" in kinds and name == "features":
            numbers["features"], numbers["scales"] = encode_fp8(tensor)
        elif "logical_dtype" in kinds[name].attributes:
            numbers[name] = encode(tensor, kinds[name].attributes["logical_dtype"])
        else:
            numbers[name] = tensor.numpy()
    return numbers


def _inspect(
    row: RowStates, *, length: int, kinds: Mapping[str, ArrayKind], num_taps: int, vocab_size: int
) -> tuple[str, torch.Tensor]:
    """Why the row is of no use, or an empty text; and the median norm of its tokens at each tap and the final state."""
    given: dict[str, Any] = {name: tensor for name, tensor in zip(ARRAYS, row, strict=True) if name in kinds}
    shapes = {name: None if tensor is None else tuple(tensor.shape) for name, tensor in given.items()}
    wanted = {name: (length, *kinds[name].shape) for name in given}
    if shapes != wanted:
        return f"states of shapes {shapes}, expected {wanted}", torch.empty(0)
    for name in given.keys() & {"input_ids", "greedy_ids", "topk_ids"}:
        low, high = map(int, given[name].aminmax())
        if low < 0 or high >= vocab_size:
            return f"{name} from {low} to {high} in a vocabulary of {vocab_size}", torch.empty(0)
    states = list(row.features_TF.unflatten(1, (num_taps, -1)).unbind(1))
    if "final" in given:
        states.append(given["final"])
    norms_TK = torch.stack([torch.linalg.vector_norm(s, dim=-1, dtype=torch.float32) for s in states], dim=1)
    if not norms_TK.isfinite().all():
        return "hidden states are not finite; try another verifier.dtype, such as bfloat16", norms_TK[0]
    if "topk_logprobs" in given and not given["topk_logprobs"].isfinite().all():
        return "log-probabilities are not finite; try another verifier.dtype, such as bfloat16", norms_TK[0]
    several = len(row.input_ids_T.unique()) > 1
    for k, (state, norms_T) in enumerate(zip(states, norms_TK.unbind(1), strict=True)):
        if not norms_T.any():
            return f"{_tap(k, num_taps)} is zero throughout; choose other extraction.target_layer_ids", norms_TK[0]
        # one layer gives one state for all tokens only where the tokens are all the same
        if several and (norms_T == norms_T[0]).all() and (state == state[0]).all():
            return (
                f"{_tap(k, num_taps)} is the same for every token; choose other extraction.target_layer_ids",
                norms_TK[0],
            )
    return "", norms_TK.median(0).values


def _tap(number: int, num_taps: int) -> str:
    return f"tap {number}" if number < num_taps else "the final state"


def _far_from_the_others(norms: Mapping[int, torch.Tensor], num_taps: int) -> Iterator[tuple[int, str]]:
    """Rows with a tap of another order of magnitude than is usual in the shard, and the reason."""
    if not norms:
        return
    norms_RK = torch.stack(list(norms.values()))
    usual_K = norms_RK.median(0).values
    far_RK = (norms_RK > NORM_FACTOR * usual_K) | (norms_RK < usual_K / NORM_FACTOR)
    for i, number in enumerate(norms):
        if far_RK[i].any():
            k = int(far_RK[i].nonzero()[0])
            yield number, f"{_tap(k, num_taps)} has norms about {norms_RK[i, k]:.3g}, other rows about {usual_K[k]:.3g}"


class HiddenStates:
    """The hidden states of a corpus, read row by row. `info` is its states.json, `rows` its index in corpus order.

    Any number of threads may read at once, each into memory of its own; other processes may be sent it. Keeps no file
    open, and in memory only where the chunks of the files touched begin.
    """

    def __init__(
        self,
        folder: Path,
        *,
        info: dict[str, Any],
        rows: list[Row],
        attributes: dict[str, Any],
        remote: frozenset[str],
    ) -> None:
        self.folder = folder
        self.info = info
        self.rows = rows
        self._attributes = attributes  # of any of its shards
        self._remote = remote  # names of the shards that lie in an object store
        self._arrays: dict[tuple[int, str], ArrayReader | RemoteArray] = {}

    @classmethod
    def open(cls, folder: Path) -> "HiddenStates":
        """Open an extraction artifact whose files are all there and untouched; raises Damaged otherwise.

        A damaged shard loses its manifest, so that the next extraction redoes that shard and no other. Raises
        ValueError for shards of another format, or that do not belong together.
        """
        manifest = load_manifest(folder)
        described = folder / "states.json"
        try:
            info = json.loads(described.read_bytes())
        except (FileNotFoundError, ValueError) as error:
            raise Damaged(f"{described}: unreadable ({error}); run the extraction stage again") from None
        known = {
            "storage_dtype": info["storage_dtype"],
            "target_layer_ids": info["target_layer_ids"],
            "verifier": info["verifier"]["identity"],
        }
        attributes: dict[str, Any] = {}
        remote: set[str] = set()
        for name in sorted({name.split("/")[1] for name in manifest.files if name.startswith("shards/")}):
            shard = folder / "shards" / name  # as listed: other folders there are someone's copies
            part, attributes = verify_shard(shard)
            if REMOTE in part.files:
                remote.add(shard.name)
            _check_attributes(shard, attributes, known)
        _verify(manifest, folder)
        index = pl.read_parquet(folder / "index.parquet").select(Row._fields)
        rows = [Row(*values) for values in index.iter_rows()]
        return cls(folder, info=info, rows=rows, attributes=attributes, remote=frozenset(remote))

    @property
    def verifier_config(self) -> dict[str, Any]:
        """The verifier's config.json."""
        return json.loads((self.folder / "verifier_config.json").read_text())

    def frozen(self) -> dict[str, torch.Tensor]:
        """The verifier's `embed_tokens.weight`, `norm.weight` and, where it is not tied, `lm_head.weight`."""
        return load_file(self.folder / "verifier.safetensors")

    def array(self, shard: int, name: str) -> "ArrayReader | RemoteArray":
        """One array of a shard, as it is stored."""
        if (shard, name) not in self._arrays:
            folder = self._shard_folder(shard)
            if folder.name in self._remote:
                from dflash.hidden.remote import RemoteArray  # loads zarr, which others do without

                self._arrays[shard, name] = RemoteArray(folder / REMOTE, name)
            else:
                self._arrays[shard, name] = ArrayReader(folder / name)
        return self._arrays[shard, name]

    def read(self, row_number: int) -> RowStates:
        """The states of one row of `rows`, every byte checked against its CRC; raises Damaged naming the shard."""
        states = self._memory(self.rows[row_number].length, pinned=False)
        self._read(row_number, states, verify=True)
        return states

    def whole(self, shard: int, *names: str) -> list[NDArray[Any]]:
        """Arrays of a shard from end to end, for small ones; checked, and raises, as `read` does."""
        end = max(row.start + row.length for row in self.rows if row.shard == shard)
        try:
            return [self.array(shard, name).read(0, end, verify=True) for name in names]
        except Damaged as damage:
            raise _set_aside(self._shard_folder(shard), damage) from damage

    def buffers(self, num_tokens: int) -> RowStates:
        """Memory for a batch of up to so many tokens; pinned where there is a GPU."""
        return self._memory(num_tokens, pinned=torch.cuda.is_available())

    def read_into(self, row_numbers: Sequence[int], buffers: RowStates, *, verify: bool = True) -> PackedStates:
        """Read rows into `buffers`, one after the other; the batch is a view of them. Raises as `read` does.

        Without `verify` bytes are not checked against their CRC, which is faster; missing ones are still noticed.
        """
        batch = self._packed(row_numbers, buffers)
        for place, number in enumerate(row_numbers):
            self._read_packed(number, batch, place, verify=verify)
        return batch

    def _packed(self, row_numbers: Sequence[int], buffers: RowStates) -> PackedStates:
        """Views of `buffers` for these rows, not filled yet."""
        lengths = tuple(self.rows[number].length for number in row_numbers)
        total = sum(lengths)
        if total > len(buffers.input_ids_T):
            raise ValueError(f"{len(lengths)} rows of {total} tokens do not fit into {len(buffers.input_ids_T)} tokens")
        views: list[Any] = [None if memory is None else memory[:total] for memory in buffers]
        return PackedStates._make([*views, lengths])

    def _read_packed(self, row_number: int, batch: PackedStates, place: int, *, verify: bool) -> None:
        """Fill one row of a batch."""
        start = sum(batch.lengths[:place])
        part = slice(start, start + batch.lengths[place])
        row = RowStates._make(None if view is None else view[part] for view in batch[:-1])
        self._read(row_number, row, verify=verify)

    def stream(
        self,
        batches: Iterable[Sequence[int]],
        buffers: Sequence[RowStates],
        *,
        device: torch.device | None,
        verify: bool = True,
    ) -> Generator[tuple[PackedStates, int], None, None]:
        """Batches of rows, in order, read ahead into `buffers` by one thread less than there are.

        Beside each batch, how many more had been read when it was asked for. A batch is valid until the next is asked
        for; then its memory is filled again, once the copies to `device` that were queued by then, on its current
        stream, are done. Without a device nothing is waited for.
        """
        spare: deque[tuple[RowStates, torch.cuda.Event | None]] = deque((memory, None) for memory in buffers)
        pending: deque[tuple[RowStates, PackedStates, list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(len(buffers) - 1, thread_name_prefix="hidden-states")

        def load(number: int, batch: PackedStates, place: int, copies: torch.cuda.Event | None) -> None:
            if copies is not None:
                copies.synchronize()
            self._read_packed(number, batch, place, verify=verify)

        def oldest() -> Generator[tuple[PackedStates, int], None, None]:
            memory, batch, reads = pending.popleft()
            ready = sum(all(read.done() for read in reads) for _, _, reads in pending)
            for read in reads:
                read.result()
            yield batch, ready
            spare.append((memory, _queued_copies(device)))

        try:
            for numbers in batches:
                if not spare:
                    yield from oldest()
                memory, copies = spare.popleft()
                batch = self._packed(numbers, memory)
                # a task for each row: all threads are busy to the end, though rows differ a hundredfold
                reads = [pool.submit(load, number, batch, i, copies) for i, number in enumerate(numbers)]
                pending.append((memory, batch, reads))
            while pending:
                yield from oldest()
        finally:
            pool.shutdown(cancel_futures=True)

    def _memory(self, num_tokens: int, *, pinned: bool) -> RowStates:
        width = self._attributes["num_taps"] * self._attributes["hidden_size"]
        precision = torch.float32 if self._attributes["storage_dtype"] == "float32" else torch.bfloat16

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, pin_memory=pinned)

        final, top_k = self._attributes["store_final"], self._attributes["top_k"]
        return RowStates(
            empty(width, dtype=precision),
            empty(dtype=torch.int64),
            empty(dtype=torch.bool),
            empty(dtype=torch.int64),
            empty(self._attributes["hidden_size"], dtype=precision) if final else None,
            empty(top_k, dtype=torch.int64) if top_k else None,
            empty(top_k, dtype=torch.float32) if top_k else None,
        )

    def _read(self, row_number: int, out: RowStates, *, verify: bool) -> None:
        """Fill `out`, which is as long as the row."""
        row = self.rows[row_number]
        stop = row.start + row.length
        try:
            for name, tensor in zip(ARRAYS, out, strict=True):
                if tensor is None:
                    continue
                array = self.array(row.shard, name)
                if name == "features" and self._attributes["storage_dtype"] == "fp8":
                    array.read_into(row.start, code_memory(tensor), verify=verify)
                    decode_fp8(self.array(row.shard, "scales").read(row.start, stop, verify=verify), tensor)
                elif tensor.dtype == torch.int64:
                    tensor.copy_(torch.from_numpy(array.read(row.start, stop, verify=verify)))
                else:
                    array.read_into(row.start, bits(tensor, array.dtype), verify=verify)
        except Damaged as damage:
            raise _set_aside(self._shard_folder(row.shard), damage) from damage

    def _shard_folder(self, number: int) -> Path:
        return self.folder / "shards" / f"{number:04d}"


def _check_attributes(shard: Path, attributes: Mapping[str, Any], known: dict[str, Any]) -> None:
    """Raises ValueError unless the shard is of this format and agrees with what is `known`, which learns from it."""
    found = (attributes.get("format"), attributes.get("format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise ValueError(
            f"{shard}: format {found[0]} {found[1]}, expected {FORMAT} {FORMAT_VERSION}; run the extraction stage again"
        )
    for name in attributes.keys() & set(SAME):
        if attributes[name] != known.setdefault(name, attributes[name]):
            raise ValueError(
                f"{shard}: {name} is {attributes[name]}, that of the artifact is {known[name]}; delete the shard "
                "and run the extraction stage again"
            )


def _queued_copies(device: torch.device | None) -> torch.cuda.Event | None:
    """What to wait for before memory that is being copied to the device may be written again."""
    if device is None or device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def verify_shard(shard: Path, *, deep: bool = False) -> tuple[Manifest, dict[str, Any]]:
    """A shard's manifest and attributes, if all of it is there and whole, in an object store too.

    `deep` compares all checksums. Raises Damaged, and sets a damaged shard's manifest aside; OSError where the object
    store does not answer.
    """
    manifest = load_manifest(shard)
    try:
        _verify(manifest, shard, deep=deep)
        if REMOTE in manifest.files:
            from dflash.hidden import remote  # loads zarr, which others do without

            remote.check(shard / REMOTE, deep=deep)
        return manifest, read_attributes(shard)
    except Damaged as damage:
        raise _set_aside(shard, damage) from damage


def _verify(manifest: Manifest, folder: Path, *, deep: bool = False) -> None:
    """As manifests.verify, for a folder that may have been moved from under its data root."""
    here = manifest.model_copy(update={"location": str(folder.absolute())})
    check_parts(here)
    verify(here, deep=deep)


def check_parts(whole: Manifest, *, but: Collection[Path] = ()) -> None:
    """Raises Damaged, and sets the part's manifest aside, where one is not that which the whole was made of.

    A part's own manifest says nothing of itself, so that no check of the part alone notices. A part that was made anew
    is left alone: it waits for the whole to be made of it. Parts in `but` are not looked at.
    """
    for name, record in whole.files.items():
        part = (whole.path / name).parent
        if name.endswith(f"/{MANIFEST}") and part not in but:
            try:
                check_files(whole, {name: record}, deep=True)
            except Damaged as damage:
                if _made_again(part, whole):
                    raise Damaged(f"{part}: made again since; run the {whole.stage} stage again") from damage
                raise _set_aside(part, damage) from damage


def _made_again(part: Path, whole: Manifest) -> bool:
    """Whether the part belongs there and is whole, but its files are not those that the whole was made of.

    Files that are made again have other time stamps, of whatever clock, even where their bytes are the same.
    """
    inside = part.relative_to(whole.path).as_posix()
    try:
        found = load_manifest(part)
        if (found.key, found.location) != (called_by_inputs(found), f"artifacts/{whole.stage}/{whole.key}/{inside}"):
            return False
        check_files(found.model_copy(update={"location": str(part.absolute())}), found.files, deep=False)
    except Damaged:
        return False
    return any(whole.files.get(f"{inside}/{name}") != record for name, record in found.files.items())


def check_recorded(part: Artifact) -> None:
    """Raises Damaged, and sets the part's manifest aside, where it is not as it was when the part was made."""
    if load_manifest(part.path).artifact() != part:
        edited = f"{part.path / MANIFEST}: differs from the record of the task that made it"
        raise _set_aside(part.path, Damaged(edited))


def _set_aside(part: Path, cause: Exception) -> Damaged:
    """Take a part's manifest away, so that it counts as missing; returns the error to raise."""
    with suppress(FileNotFoundError):  # another reader was first
        (part / MANIFEST).rename(part / DAMAGED_MANIFEST)
    return Damaged(f"{part}: {cause}; its manifest is set aside: the next run redoes this part and no other")
