"""What the nightly evaluation shows beside reports: the verifier's history, as a plot and in W&B. Evaluates nothing."""

import hashlib
import json
from pathlib import Path

from dflash import plots
from dflash.decoding.history import read_history, series
from dflash.decoding.page import history_figure
from dflash.decoding.verdict import load_evaluated
from dflash.manifests import home
from dflash.training.tracking import tracked_run, tracking_mode

STEP = "evaluation/step"


def history_svg(report: Path) -> str:
    """The acceptance lengths of all evaluations that can stand beside the report in this folder, as an SVG."""
    facts = load_evaluated(report).report
    history = series(read_history(facts["verifier"]["identity"]), like=facts)
    return plots.inline_svg(history_figure(history), label="History of the acceptance length")


def track(report: Path, *, recipe: str, mode: str, project: str) -> int:
    """Log the verifier's evaluations that were not logged yet; returns how many there are in all.

    All that can stand beside each other (of one verifier and its dtype, one schema version, as many responses and
    tokens) are one run, with a row per report, whose number in the history is the step. `mode` is training.tracking,
    `report` the folder of one of them.
    """
    facts = load_evaluated(report).report
    verifier = facts["verifier"]
    history = series(read_history(verifier["identity"]), like=facts)
    lengths: dict[float, dict[str, float]] = {}
    for method, points in history.items():
        for created, length in points:
            if length is not None:
                lengths.setdefault(created.timestamp(), {})[f"evaluation/acceptance_length/{method}"] = length
    rows = [{STEP: float(number)} | lengths[created] for number, created in enumerate(sorted(lengths))]
    beside = json.dumps([facts["schema_version"], verifier["dtype"], facts["overall"]["tokens"]])  # as in the history
    kind = f"{facts['overall']['responses']}-{hashlib.sha256(beside.encode()).hexdigest()[:6]}"
    run_id = f"evaluations-{verifier['identity'][:12]}-{kind}"
    logged = home() / "wandb" / f"{run_id}.rows"  # how many were logged, so that a night with nothing new starts no run
    if tracking_mode(mode) == "disabled" or (logged.exists() and int(logged.read_text()) == len(rows)):
        return len(rows)
    with tracked_run(
        mode,
        run_id=run_id,
        project=project,
        name=f"evaluations of {verifier['name']}",
        group="",
        settings={"recipe": recipe, "verifier": dict(verifier), "hidden_states": dict(facts["hidden_states"])},
        history=rows,
        step=STEP,
    ):
        pass
    logged.write_text(str(len(rows)))
    return len(rows)
