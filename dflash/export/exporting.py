"""Export stage: a drafter as a folder that other projects load, with a model card, its record and checksums.

A trained drafter in, a folder out, which is no artifact and in no cache. Weights are not touched but for the dtype.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dflash.config import VerifierConfig
from dflash.drafter.export import not_finite, read_weights
from dflash.drafter.formats import FORMATS, PUBLISHED, speculators_config
from dflash.drafter.model import Drafter
from dflash.drafter.shape import read_config
from dflash.export.card import model_card
from dflash.export.facts import facts_of, is_record, report_on
from dflash.lineage import Lineage, lineage
from dflash.manifests import HOST, Manifest, file_sha256, remove_leftovers, verify
from dflash.pinning import PinnedVerifier, pin, tokenizer_files

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16", "float32")
CHECKSUMS = "SHA256SUMS"  # as sha256sum --check takes them
PROVENANCE = "provenance.json"
WEIGHTS = "model.safetensors"


def export_drafter(
    source: str,
    folder: Path,
    *,
    kind: str,
    dtype: str,
    verifier: str,
    revision: str,
    ungated: bool,
    trust_remote_code: bool = False,
) -> Path:
    """Write a drafter, given by its key (the beginning is enough) or its folder, into a new folder; returns that.

    `kind` is one of FORMATS. `dtype` is that of the weights, empty: as trained, bit for bit. `verifier` and `revision`
    say where its verifier lies now; empty: where it did. `trust_remote_code` is as in its recipe: the code is then part
    of the verifier's identity. Nothing is written where anything is wrong: raises ValueError for an unknown kind or
    dtype, weights beyond it, a drafter that is damaged, that the parity gate did not pass (unless `ungated`) or
    that no other project could load, for another verifier, and for a folder that holds something.
    """
    if kind not in FORMATS:
        raise ValueError(f"format {kind!r} is unknown; expected one of {', '.join(FORMATS)}")
    if dtype and dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; expected one of {', '.join(DTYPES)}, or none to keep it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already; give a folder that does not exist")
    made = lineage()
    drafter = made.drafter(source)
    verify(drafter.artifact(), deep=True)
    if not ungated:
        _refuse_unchecked(drafter, made)
    config = read_config(drafter.path)
    if config.hidden_size != config.verifier_hidden_size:
        raise ValueError(
            f"{drafter.key}: hidden size {config.hidden_size}, its verifier's is {config.verifier_hidden_size}; no "
            "other project loads such a drafter: train one without training.shape.hidden_size"
        )
    pinned = _verifier_of(drafter, verifier, revision=revision, trust_remote_code=trust_remote_code)
    name = verifier or drafter.summary["verifier"]["name"]
    weights = load_file(drafter.path / WEIGHTS)
    stored = str(weights["fc.weight"].dtype).removeprefix("torch.")
    dtype = dtype or stored
    if dtype != stored:
        weights = {n: w.to(getattr(torch, dtype)) if w.is_floating_point() else w for n, w in weights.items()}
        if beyond := not_finite(weights):
            raise ValueError(
                f"{drafter.key}: {', '.join(beyond)} hold numbers that {dtype} does not have; choose another of "
                f"{', '.join(DTYPES)}, or none to keep {stored}"
            )
    if kind == PUBLISHED:
        settings = config.to_json(dtype=dtype)
    else:
        architectures = json.loads((Path(pinned.path) / "config.json").read_text()).get("architectures") or []
        settings = speculators_config(config, dtype=dtype, verifier=name, architectures=architectures)
    if config.rope["partial_rotary_factor"] != 1:
        log.warning(
            "the drafter rotates %g of each head: engines that build on Transformers' Qwen3 rotate all of it",
            config.rope["partial_rotary_factor"],
        )
    facts = facts_of(drafter, config, pinned, made, name=name, dtypes=[stored, dtype])
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.parent, folder.name)
    aside = folder.parent / f".{folder.name}.{HOST}.{os.getpid()}"
    aside.mkdir()
    try:
        if dtype == stored:
            shutil.copyfile(drafter.path / WEIGHTS, aside / WEIGHTS)
        else:
            save_file(weights, aside / WEIGHTS, metadata={"format": "pt"})
        with torch.device("meta"):
            read_weights(aside, Drafter(config))
        (aside / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (aside / PROVENANCE).write_text(json.dumps(facts, indent=1) + "\n")
        (aside / "README.md").write_text(model_card(facts, kind=kind, dtype=dtype))
        for file in tokenizer_files(Path(pinned.path)):
            (aside / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(Path(pinned.path) / file, aside / file)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        sums = [f"{file_sha256(path)}  {path.relative_to(aside).as_posix()}\n" for path in files]
        (aside / CHECKSUMS).write_text("".join(sums))
        for path in [*files, aside / CHECKSUMS]:
            with path.open("rb") as written:
                os.fsync(written.fileno())
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log.info("%s is in %s: %s, %s", drafter.key, folder, kind, dtype)
    return folder


def _refuse_unchecked(drafter: Manifest, made: Lineage) -> None:
    found = report_on(drafter, made)
    if found is None:
        why = "has no report of this version: it was not evaluated, or did not pass the parity gate, which says why"
    elif not found[1]["parity"]:
        why = f"was evaluated with the parity gate off ({found[0]})"
    elif not found[1]["parity"]["compared"]:  # with a defect there is no report
        why = f"gave the parity gate nothing to compare ({found[0]})"
    else:
        return
    raise ValueError(
        f"{drafter.key} {why}: whether others would draft with it as it was trained is not known; evaluate it with "
        "evaluation.parity on, or export it all the same with --ungated"
    )


def _verifier_of(drafter: Manifest, model: str, *, revision: str, trust_remote_code: bool) -> PinnedVerifier:
    """Of the revision that is recorded, unless another is given. Raises ValueError where it is gone, or another one
    than the drafter was trained for.
    """
    trained_for = drafter.summary["verifier"]
    model = model or trained_for["name"]
    origin = drafter.summary.get("provenance")
    known = [trained_for, origin["verifier"]] if is_record(origin) else [trained_for]
    revision = revision or revision_of(model, *known)
    pinned = pin(VerifierConfig(model=model, revision=revision, trust_remote_code=trust_remote_code))
    if pinned.identity != trained_for["identity"]:
        raise ValueError(
            f"{drafter.key} was trained for verifier {trained_for['name']} ({trained_for['identity'][:8]}); what is "
            f"there as {pinned.name} is another one ({pinned.identity[:8]}): give the right one with --verifier, and "
            "--revision or --trust-remote-code where the recipe has them"
        )
    return pinned


def revision_of(model: str, *records: Mapping[str, Any]) -> str:
    """The first revision that is recorded for a verifier of that name, else the usual one."""
    found = (str(record["revision"]) for record in records if record.get("revision") and record.get("name") == model)
    return next(found, str(VerifierConfig.model_fields["revision"].default))
