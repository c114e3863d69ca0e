"""After a report: its row in the history, the verdict against the verifier's champion, the promotion of a better one.

Always done again, also where the report was found: each part changes nothing the second time. Knows no model.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from dflash.config import EvaluationConfig
from dflash.decoding.acceptance import CHAIN, method_name, num_nodes, usual_budget
from dflash.decoding.champions import Champion, Overtaken, champion_of, promote
from dflash.decoding.history import append, reports_on
from dflash.decoding.statistics import SEED
from dflash.decoding.tables import code, escaped
from dflash.decoding.verdict import Comparison, Verdict, compare, load_evaluated
from dflash.drafter.shape import read_config
from dflash.keys import evaluation_key
from dflash.lineage import lineage
from dflash.manifests import Artifact, Damaged, Manifest, find, home, load_manifest
from dflash.pinning import PinnedVerifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judgement:
    """What became of a drafter: `first` and `champion` say that there was nobody else to compare it with.

    `champion` is the verifier's one afterwards, by the key of its artifact; None where there is none.
    """

    verdict: Verdict | Literal["first", "champion"]
    reason: str
    promoted: bool
    champion: str | None
    comparison: Comparison | None = None


def judge(
    config: EvaluationConfig,
    drafter: Artifact,
    report: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    *,
    tree_budget: int,
) -> Judgement:
    """Compare with the champion on the responses of this report, for which the champion is evaluated too if need be.

    By the tree of `tree_budget` (0: the chain) where it was evaluated. Promoted is what is better, or where there is
    none, unless the parity gate was off; where another one was promoted in the meantime, it is judged against that one.
    Raises ValueError where history or champion are damaged.
    """
    candidate = load_evaluated(report.path)
    append(candidate.report, key=report.key, created=load_manifest(report.path).created)
    champion = champion_of(verifier.identity)
    if champion and champion.drafter == drafter.key:
        return Judgement("champion", "it is the champion itself", promoted=False, champion=drafter.key)
    comparison = None
    verdict: Verdict | Literal["first"] = "first"
    reason = "the first of its verifier"
    if champion:
        rival, obstacle = _report_on(champion, config, hidden_states, verifier)
        if rival is None:
            return Judgement("not comparable", obstacle, promoted=False, champion=champion.drafter)
        comparison = compare(
            candidate,
            load_evaluated(rival.path),
            method=method_of(candidate.report["methods"], tree_budget=tree_budget),
            minimum_difference=config.minimum_difference,
            minimum_conversations=config.minimum_conversations,
            seed=SEED,
        )
        verdict, reason = comparison.verdict, f"{comparison.method}: {comparison.reason}"
    promoted = verdict in ("first", "better")
    if promoted and not (candidate.report["parity"] and candidate.report["parity"]["compared"]):
        promoted, reason = False, f"{reason}; not promoted, as the parity gate compared nothing"
    if promoted:
        try:
            champion = promote(
                verifier.identity,
                drafter=drafter.key,
                report=report.key,
                reason=reason,
                promoted=datetime.now(UTC),
                instead_of=champion,
            )
        except Overtaken as error:
            log.info("%s", error)
            return judge(config, drafter, report, hidden_states, verifier, tree_budget=tree_budget)
    log.info("verdict on %s: %s (%s)", drafter.key, verdict, reason)
    return Judgement(verdict, reason, promoted, champion.drafter if champion else None, comparison)


def markdown(judgement: Judgement) -> str:
    """The verdict as text for a UI, with that of each category where drafters were compared."""
    lines = [f"**{judgement.verdict}**: {escaped(judgement.reason)}", f"Champion: {code(judgement.champion or 'none')}"]
    if judgement.comparison:
        parts = judgement.comparison.categories.items()
        lines += ["\n".join(f"* {escaped(name)}: {part.verdict} ({escaped(part.reason)})" for name, part in parts)]
    return "\n\n".join(lines) + "\n"


def _report_on(
    champion: Champion, config: EvaluationConfig, hidden_states: Artifact, verifier: PinnedVerifier
) -> tuple[Artifact | None, str]:
    """The champion's report with these settings on these hidden states, made now if need be; else why there is none."""
    try:
        drafter = _drafter(champion.drafter)
        layers = list(read_config(drafter.path).target_layer_ids)
    except ValueError as error:
        return None, f"the champion {champion.drafter} is not whole any more: {error}"
    if layers != hidden_states.summary["target_layer_ids"]:
        return None, f"the champion has taps {layers}, the hidden states {hidden_states.summary['target_layer_ids']}"
    key = evaluation_key(config, drafter, hidden_states, verifier)
    (home() / "locks").mkdir(parents=True, exist_ok=True)
    with FileLock(home() / "locks" / f"{key}-champion.lock"):  # of two runs that judge at once one makes it
        try:
            found = find(key)
        except Damaged:
            found = None
        if not found:
            from dflash.decoding.evaluation import evaluate

            log.info("the champion %s has no report on these responses yet", champion.drafter)
            try:
                found = evaluate(config, drafter, hidden_states, verifier)
            except (ValueError, AssertionError) as error:  # the candidate's own report is sound
                return None, f"the champion {champion.drafter} cannot be evaluated any more: {error}"
    return found, ""


def _drafter(key: str) -> Artifact:
    """Raises ValueError where it is gone or damaged."""
    return load_manifest(home() / "artifacts" / "training" / key).artifact()


def method_of(methods: list[str], *, tree_budget: int | None = None) -> str:
    """What drafters are compared by: the tree of that budget or (0) the chain; where it was not evaluated, or no budget
    is given, the largest tree of up to 64 nodes.
    """
    asked = None if tree_budget is None else method_name(tree_budget) if tree_budget else CHAIN
    if asked in methods:
        return asked
    budgets = [num_nodes(method, num_slots=0) for method in methods if method != CHAIN]
    return method_name(usual_budget(budgets)) if budgets else CHAIN


def report_of(name: str) -> Path:
    """The folder of a report: given as such, by its key, or as the first on the drafter of a key (`reports_on`); the
    beginning of a key is enough. Raises ValueError where there is none, or several begin so.
    """
    if (Path(name) / "report.json").is_file():
        return Path(name)
    return _found(name).path


def _found(name: str) -> Manifest:
    made = lineage()
    found = made.find(name)
    if found.stage == "training":
        if reports := reports_on(found, made.manifests):
            return reports[0]
        raise ValueError(f"{name}: {found.key} has no report yet; run a recipe that evaluates it")
    if found.stage != "evaluation":
        raise ValueError(f"{name}: {found.key} is no report, and no drafter that may have one; dflash ls shows them")
    return found


def promote_by_hand(name: str, *, reason: str) -> tuple[str, Champion]:
    """Make the drafter of a report (as for `report_of`) its verifier's champion; the verifier's identity, and it."""
    report = _found(name)
    facts: dict[str, Any] = dict(load_evaluated(report.path).report)
    verifier = facts["verifier"]["identity"]
    _drafter(facts["drafter"])  # later ones could not be compared with one that is gone
    return verifier, promote(
        verifier,
        drafter=facts["drafter"],
        report=report.key,
        reason=reason,
        promoted=datetime.now(UTC),
        instead_of=champion_of(verifier),
    )


def all_champions() -> dict[str, Champion]:
    """By the identity of their verifiers."""
    found = {path.stem: champion_of(path.stem) for path in sorted((home() / "champions").glob("*.json"))}
    return {verifier: champion for verifier, champion in found.items() if champion}
