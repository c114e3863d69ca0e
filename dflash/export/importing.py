"""Import: a drafter that others trained, or that was exported, as an artifact to evaluate or to start training from.

A folder of any format of dflash.drafter.formats and its verifier in, an artifact of stage training out, in the
published layout. Reads safetensors only: other files of weights could run code.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dflash.config import VerifierConfig
from dflash.drafter.export import HEAD, check_weights, not_finite, read_tensors, save_drafter
from dflash.drafter.formats import SPECULATORS, Origin, Speculators, as_published, format_of, own_weights
from dflash.drafter.model import Drafter
from dflash.drafter.published import checked
from dflash.drafter.shape import DrafterConfig
from dflash.drafter.vocabulary import MAPS
from dflash.export.exporting import CHECKSUMS, PROVENANCE, revision_of
from dflash.export.facts import is_record
from dflash.keys import imported_key
from dflash.manifests import Artifact, Damaged, file_sha256, find, publish
from dflash.pinning import PinnedVerifier, check_mask_token, pin
from dflash.text_config import with_defaults

log = logging.getLogger(__name__)

CHECKSUM = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")
"""A line as sha256sum writes it: in text or binary mode, of a file that was named with or without its folder."""


def verifier_of(
    folder: Path, *, model: str = "", revision: str = "", trust_remote_code: bool = False
) -> PinnedVerifier:
    """The verifier `model`, else the one that a drafter's folder says it is for; of the revision that it says, unless
    one is given. Raises ValueError where it says none, or it is not here.
    """
    recorded = _recorded(folder).get("verifier", {})
    if model:
        revision = revision or revision_of(model, recorded)
        return pin(VerifierConfig(model=model, revision=revision, trust_remote_code=trust_remote_code))
    path = folder / "config.json"
    settings = _json(path)
    try:
        said = checked(Origin, settings).speculators_config
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    # a record calls a verifier that lay in a folder by that folder's last name only
    name = (said and said.verifier and said.verifier.name_or_path) or recorded.get("name")
    if not name:
        raise ValueError(f"{folder}: it does not say which verifier it is for; give --verifier")
    try:
        revision = revision or revision_of(name, recorded)
        return pin(VerifierConfig(model=name, revision=revision, trust_remote_code=trust_remote_code))
    except ValueError as error:
        raise ValueError(
            f"{folder}: its verifier {name!r} at revision {revision!r} is not found ({error}); give --verifier, or "
            "--revision"
        ) from None


def import_drafter(folder: Path, verifier: PinnedVerifier, *, block_size: int) -> Artifact:
    """Check a drafter's folder against its verifier and publish it; the same one again is found.

    `block_size` is for formats that do not say it, else 0. Raises ValueError, with all that is wrong in one line, where
    files are missing or not whole, the format or a part of it is unknown, weights are missing, unknown or misshapen, or
    it is for another verifier.
    """
    folder = folder.expanduser()
    check_sums(folder)
    settings = _json(folder / "config.json")
    recorded = _recorded(folder)
    _refuse_other(folder, recorded, verifier)
    try:
        kind = format_of(settings)
        if kind == SPECULATORS:  # which leaves out what is the default of its class
            layers = checked(Speculators, settings).transformer_layer_config
            settings["transformer_layer_config"] = with_defaults(layers)
        published = as_published(settings, num_target_layers=verifier.num_layers, block_size=block_size)
        config = DrafterConfig.from_json(published)
        _check_shape(config, verifier)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    weights, borrowed = own_weights(read_tensors(folder))
    with torch.device("meta"):
        drafter = Drafter(config)
    if config.draft_vocab_size:
        weights |= {name: borrowed.pop(name) for name in MAPS if name in borrowed}
    _check_taps(folder, weights, config)
    check_weights(folder, weights, drafter)
    if broken := not_finite(weights):
        raise ValueError(f"{folder}: {', '.join(broken)} hold numbers that are not finite; get or train it again")
    drafter.load_state_dict(weights, assign=True)
    head_UH = _check_borrowed(folder, borrowed, verifier, kept_U=drafter.kept_U)
    dtypes = sorted({str(weight.dtype).removeprefix("torch.") for weight in drafter.weights().values()})
    if len(dtypes) > 1:
        raise ValueError(f"{folder}: weights of several dtypes, {', '.join(dtypes)}; save them as one")

    identifying = [*sorted(folder.glob("*.safetensors")), *folder.glob(PROVENANCE)]
    files = {path.name: file_sha256(path) for path in identifying}
    key = imported_key(config.to_json(dtype=dtypes[0]), files, verifier)
    try:
        if found := find(key):
            return found
    except Damaged as damage:
        log.warning("%s", damage)
    trained_in = recorded.get("verifier", {}).get("dtype")
    summary = {
        "parameters": sum(weight.numel() for weight in drafter.weights().values()),
        "verifier": {
            "name": verifier.name,
            "identity": verifier.identity,
            "dtype": trained_in,
            "revision": verifier.revision or None,
        },
        "imported": {"folder": folder.name, "format": kind},
        "provenance": recorded or None,
    }
    if recorded.get("chat"):
        summary["chat"] = recorded["chat"]
    with publish(key, summary=summary) as (scratch, artifact):
        save_drafter(scratch, drafter, head_UH=head_UH)
    log.info("%s: a drafter of format %s for %s", artifact().key, kind, verifier)
    return artifact()


def check_sums(folder: Path) -> None:
    """Raises ValueError naming the first file that is missing or differs from the folder's checksums, if it has any."""
    if not (folder / CHECKSUMS).exists():
        return
    try:
        lines = (folder / CHECKSUMS).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / CHECKSUMS} is damaged ({error}); get the folder again") from None
    for number, line in enumerate(lines, start=1):
        found = CHECKSUM.fullmatch(line)
        if not found or Path(found[2]).is_absolute() or ".." in Path(found[2]).parts:
            raise ValueError(f"{folder / CHECKSUMS}:{number}: {line!r} is no checksum and name; get the folder again")
        path = folder / found[2]
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {CHECKSUMS} names it; get the folder again")
        if file_sha256(path) != found[1]:
            raise ValueError(f"{path} differs from its checksum in {CHECKSUMS}; get the folder again")


def _recorded(folder: Path) -> dict[str, Any]:
    """The record that an export left in the folder; nothing where there is none or it is of another layout."""
    path = folder.expanduser() / PROVENANCE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); get the folder again") from None
    if is_record(found):
        return dict(found)
    log.warning("%s is no record of dflash export of this version, and not used", path)
    return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; give the folder of a DFlash drafter") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); get the folder again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object; give the folder of a DFlash drafter")
    return found


def _refuse_other(folder: Path, recorded: Mapping[str, Any], pinned: PinnedVerifier) -> None:
    known = recorded.get("verifier")
    if known and known.get("identity") != pinned.identity:
        raise ValueError(
            f"{folder}: it is for verifier {known.get('name')} ({str(known.get('identity'))[:8]}), not for "
            f"{pinned.name} ({pinned.identity[:8]}); give the right one with --verifier, and --revision or "
            "--trust-remote-code where it needs them"
        )


def _check_shape(config: DrafterConfig, pinned: PinnedVerifier) -> None:
    for what, ours, theirs in (
        ("hidden size", config.verifier_hidden_size, pinned.hidden_size),
        ("vocabulary", config.vocab_size, pinned.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(f"it has {what} {ours}, its verifier {pinned.name} {theirs}; give the right --verifier")
    check_mask_token(config.mask_token_id, pinned, place="mask_token_id")


def _check_taps(folder: Path, weights: Mapping[str, Tensor], config: DrafterConfig) -> None:
    """A readable word on the usual mistake, before the shapes of all weights are looked at."""
    if "fc.weight" not in weights or weights["fc.weight"].ndim != 2:
        return
    width, taps = weights["fc.weight"].shape[1], len(config.target_layer_ids)
    if width != taps * config.verifier_hidden_size:
        raise ValueError(
            f"{folder}: fc.weight reads {width} features, but config.json names {taps} taps "
            f"({', '.join(map(str, config.target_layer_ids))}) of {config.verifier_hidden_size}; is it its own?"
        )


def _check_borrowed(
    folder: Path, borrowed: Mapping[str, Tensor], pinned: PinnedVerifier, *, kept_U: Tensor | None
) -> Tensor | None:
    """Drafters here work between their verifier's embedding and head: one with others would draft otherwise.

    Returns the head's rows of a trimmed vocabulary, `kept_U`, where there is one.
    """
    embedding = "embed_tokens.weight"
    head_UH = None
    for name, names in {embedding: [embedding], HEAD: [HEAD, embedding]}.items():
        trimmed = kept_U is not None and name == HEAD
        if name not in borrowed and not trimmed:
            continue
        own = _verifier_tensor(Path(pinned.path), names)
        if own is not None and trimmed:
            own = head_UH = own[kept_U]
        theirs = borrowed.get(name)
        if own is not None and theirs is not None and not torch.equal(own.to(theirs.dtype), theirs):
            raise ValueError(f"{folder}: {name} is not that of its verifier {pinned.name}, and drafters here use that")
    return head_UH


def _verifier_tensor(folder: Path, names: list[str]) -> Tensor | None:
    """The verifier's weight that is called so, but for what stands before: the shortest of such names."""
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files.update(dict.fromkeys(file.keys(), path))
    for name in names:
        if found := min((key for key in files if key.endswith(name)), key=len, default=None):
            with safe_open(files[found], "pt") as file:
                return file.get_tensor(found)
    return None
