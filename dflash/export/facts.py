"""What is known of a drafter, from the manifests of all it was made from and the reports on it. Nothing is guessed.

Reads manifests and reports, no weights. What is not known (any more) is null.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import PurePath
from typing import Any, TypeGuard

from dflash.bundled import LICENCES, PACKAGE, PREFIX
from dflash.decoding.acceptance import CHAIN
from dflash.decoding.history import reports_on
from dflash.decoding.parity import REFERENCE
from dflash.decoding.report import SCHEMA_VERSION as REPORT_VERSION
from dflash.decoding.tables import groups
from dflash.decoding.verdict import load_evaluated
from dflash.drafter.shape import DrafterConfig
from dflash.inputs import HUB
from dflash.lineage import Lineage
from dflash.manifests import Manifest
from dflash.pinning import PinnedVerifier

SCHEMA_VERSION = 1
PACKAGES = ("dflash", "torch", "transformers", "safetensors")


def report_on(drafter: Manifest, made: Lineage) -> tuple[str, dict[str, Any]] | None:
    """Key and record of the report that speaks for a drafter (`reports_on`); None where there is none of this version.

    Its parity is that of the first report whose gate passed, if any did: that is about the drafter, not about prompts.
    `parity_report` is the key of that one.
    """
    found = ((m.key, dict(load_evaluated(m.path).report)) for m in reports_on(drafter, made.manifests))
    reports = ((key, report) for key, report in found if report["schema_version"] == REPORT_VERSION)
    if not (first := next(reports, None)):
        return None
    key, record = first
    gates = ((of, report["parity"]) for of, report in chain([first], reports))
    passed = ((of, gate) for of, gate in gates if gate and gate["compared"] and not gate["defect"])
    parity_report, parity = next(passed, (key, record["parity"]))
    return key, record | {"parity": parity, "parity_report": parity_report}


def is_record(found: object) -> TypeGuard[dict[str, Any]]:
    """Whether this is such a record, as other projects may have a provenance.json of another layout."""
    return (
        isinstance(found, dict)
        and found.get("schema_version") == SCHEMA_VERSION
        and isinstance(found.get("verifier"), dict)
    )


def is_hub_id(name: str, revision: str | None) -> bool:
    """Of a verifier: a relative folder looks the same, but has no revision."""
    return bool(revision) and name.count("/") == 1 and not name.startswith((".", "/", "~")) and ":" not in name


def facts_of(
    drafter: Manifest,
    config: DrafterConfig,
    verifier: PinnedVerifier,
    made: Lineage,
    *,
    name: str,
    dtypes: Sequence[str],
) -> dict[str, Any]:
    """The record that goes with an exported drafter as provenance.json; `name` is what the verifier is called there,
    `dtypes` are those of the weights as they lie here and as they are exported.
    """
    found, origin = report_on(drafter, made), drafter.summary.get("provenance")
    evaluation = None
    if found:
        evaluation = _evaluation(*found, reference=REFERENCE in drafter.files, weights=dtypes[0])
    elif is_record(origin):
        evaluation = origin.get("evaluation")
    if evaluation:
        evaluation = evaluation | {"casts": _casts(evaluation, dtypes)}
    if is_record(origin):  # it was imported, and came with a record of its own
        return origin | {"evaluation": evaluation}
    sources = {equal[0].stage: equal[0] for equal in made.ancestry([drafter])}
    trained_for = drafter.summary["verifier"]
    return {
        "schema_version": SCHEMA_VERSION,
        "drafter": drafter.key,
        "made": drafter.created.isoformat(timespec="seconds"),
        "parameters": drafter.summary.get("parameters"),
        "verifier": {
            "name": name if is_hub_id(name, verifier.revision) else shown(name),
            "revision": verifier.revision or None,
            "identity": verifier.identity,
            "dtype": trained_for["dtype"],
            "num_layers": verifier.num_layers,
            "hidden_size": verifier.hidden_size,
            "vocab_size": verifier.vocab_size,
        },
        "chat": drafter.summary.get("chat"),
        "shape": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            "layer_types": list(config.layer_types),
            "sliding_window": config.sliding_window,
        },
        "training": _training(drafter),
        "data": _data(sources),
        "evaluation": evaluation,
        "stages": {stage: manifest.recipe for stage, manifest in sources.items()},
        "versions": {package: version(package) for package in PACKAGES},
    }


def _training(drafter: Manifest) -> dict[str, Any] | None:
    if "hidden_states" not in drafter.inputs:
        return None
    names = ("rows", "steps", "tokens", "skipped", "best", "on_policy_share")
    return {name: drafter.summary.get(name) for name in names} | {"config": drafter.config}


def _data(sources: Mapping[str, Manifest]) -> dict[str, Any]:
    """Of the conversations that it was trained on; what artifacts are gone leave nulls."""
    prompts, generation, corpus = (sources.get(stage) for stage in ("prompts", "generation", "tokenization"))
    known = prompts.summary.get("sources", {}) if prompts else {}
    asked = ("backend", "temperature", "max_prompt_tokens", "max_new_tokens")
    return {
        "sources": [
            {
                "name": shown(name),
                "rows_in": counts["rows_in"],
                "rows": counts["rows"],
                "dropped": counts["dropped"],
                "licence": LICENCES.get(name),
            }
            for name, counts in known.items()
        ],
        "answers": generation
        and {name: generation.config[name] for name in asked} | {"tokens": generation.summary.get("tokens")},
        "corpus": corpus and {name: corpus.summary[name] for name in ("rows", "tokens", "supervised", "splits")},
    }


def shown(name: str) -> str:
    """A source as strangers may see it: of a path on this machine only the last part."""
    return name if name.startswith((PREFIX, PACKAGE, HUB)) else PurePath(name).name


def _evaluation(key: str, report: Mapping[str, Any], *, reference: bool, weights: str) -> dict[str, Any]:
    """`reference`: whether training left what it drafted, without which the parity gate compares with the evaluation's
    own drafts, of the same folder. `weights` is the dtype of what it measured.
    """
    return {
        "report": key,
        "weights": weights,
        "methods": report["methods"],
        "categories": {
            name: {
                field: numbers[field] for field in ("responses", "tokens", "rounds", "acceptance_length", "interval")
            }
            for name, numbers in groups(report)
        },
        "weak": weak_categories(report),
        "conditions": report.get("evaluated"),
        "temperature": report["conditions"]["temperature"],
        "parity": report["parity"],
        "parity_report": report["parity_report"],
        "parity_reference": "training" if reference else "evaluation",
        "notes": report["notes"],
    }


def _casts(evaluation: Mapping[str, Any], dtypes: Sequence[str]) -> list[str]:
    """What the weights that were measured have been cast to since, one after the other: a cast may round for good."""
    path = [evaluation.get("weights", dtypes[0]), *evaluation.get("casts", [])]
    for dtype in dtypes:
        if dtype != path[-1]:
            path.append(dtype)
    return path[1:]


def weak_categories(report: Mapping[str, Any]) -> list[str]:
    """Categories whose whole interval, of the chain, lies below the acceptance length of all responses."""
    overall = report["overall"]["acceptance_length"][CHAIN]
    measured = [(name, numbers["interval"][CHAIN]) for name, numbers in groups(report)]
    return [name for name, interval in measured if interval and overall is not None and interval[1] < overall]
