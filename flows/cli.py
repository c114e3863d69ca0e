"""`dflash`: run, plan, list, and start the stack. Thin: everything it does is a function elsewhere."""

import dataclasses
import errno
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from dflash import manifests
from dflash import plan as planning
from dflash.config import EvaluationConfig, Recipe, Step
from flows import logs, recipes, server

if TYPE_CHECKING:
    from dflash.lineage import Lineage
    from dflash.manifests import Manifest
    from flows.steps import RunRecord

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A factory for speculative-decoding drafters. Recipes are the deployments of prefect.yaml.",
)
out = Console(width=None if sys.stdout.isatty() else 160, markup=False)  # names and reasons may hold brackets

FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
RecipeName = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A recipe of prefect.yaml, for example demo; another flow as evaluate/demo."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change a setting, e.g. training.epochs=3 or training.loss.kl=1. Repeatable.",
    ),
]
Revision = Annotated[
    str, typer.Option(help="Of a verifier on the hub; empty: the recorded one, else main.", show_default=False)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="As verifier.trust_remote_code: it is part of the identity.")
]
Json = Annotated[bool, typer.Option("--json", help="Make the last line of the output one JSON object.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Bad names, keys and values: one line, exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error), code=2)
    except OSError as error:
        fail(_with_the_root(error), code=2)


def _with_the_root(error: OSError) -> str:
    return f"{error}; is DFLASH_HOME={manifests.home()} a folder that can be written?"


def fail(message: str, *, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


@app.command()
def run(
    recipe: RecipeName,
    changes: Changes = None,
    refresh: Annotated[
        list[str] | None, typer.Option("--refresh", metavar="STAGE", help="Run this stage again. Repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a recipe in this process: only what is not cached yet is done. Needs no server; uses one that is up."""
    with usage_errors():
        start = recipes.load(recipe, changes or [])
        stages = recipes.check_steps(refresh or [])
        planning.preflight(start.recipe, trains=start.trains)
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a script's background job ignores it
    record = None
    code, message = 0, ""
    try:
        with usage_errors(), server.available() as url:
            where = url or "temporary Prefect server"
            print(f"recipe {recipe} · data {manifests.home()} · {where}", file=sys.stderr, flush=True)
            from flows import steps  # imports Prefect, which reads its settings then

            record = steps.RunRecord(recipe=start.name)
            steps.CURRENT.set(record)
            _run(start, stages)
    except (KeyboardInterrupt, Terminated) as stop:
        code = 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
        message = "interrupted; finished stages and checkpoints are kept, run again to continue"
    except StageError as failure:
        code, message = 1, str(failure)
    if record and not code:
        _show_result(record, url)
    if record and as_json:
        print(record.model_dump_json(exclude={"flow_run_id"}), flush=True)
    if code:
        fail(message, code=code)


class StageError(Exception):
    """A stage failed; the message is its cause."""


class Terminated(BaseException):
    """SIGTERM, raised where it arrives, as KeyboardInterrupt is for Ctrl-C."""


def _terminated(*_: object) -> NoReturn:
    raise Terminated


def _run(start: recipes.Start, refresh: list[Step]) -> None:
    """The flow in this process. Raises StageError for whatever went wrong in it."""
    from flows.watch import TAGS  # imports Prefect

    flow = recipes.load_flow(start.flow)
    TAGS.set(start.tags)
    _log_to_terminal()
    sections = {name: getattr(start.recipe, name) for name in Recipe.model_fields}
    try:
        flow(**sections, **start.own, recipe=start.name, refresh=refresh)
    except Exception as error:
        if not _is_explained(error):
            traceback.print_exc()
        if isinstance(error, OSError) and error.errno in FORBIDDEN and str(manifests.home()) in str(error.filename):
            raise StageError(_with_the_root(error)) from error
        raise StageError(str(error) or type(error).__name__) from error


def _is_explained(error: Exception) -> bool:
    """Whether the message is all there is to say: of bad input, of the world outside, and where dflash itself raises.

    Anything else is a mistake in a program, and its traceback is where to look.
    """
    if isinstance(error, (ValueError, OSError)):
        return True
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, RuntimeError) and raised_in.is_relative_to(Path(planning.__file__).parent)


@app.command()
def plan(recipe: RecipeName, changes: Changes = None, as_json: Json = False) -> None:
    """Say which stages are cached and which would run, why, and about how much they would handle.

    Runs none of them; a verifier that is not here yet is fetched, to be identified.
    """
    with usage_errors():
        steps = planning.plan(recipes.load_recipe(recipe, changes or []))
    table = _table("stage", "state", "reason", "fingerprint", "tokens", "bytes", title=f"plan of {recipe}")
    for step in steps:
        tokens = "" if step.tokens is None else f"{step.tokens:,}"
        table.add_row(step.stage, step.state, step.reason, step.fingerprint or "", tokens, _size(step.bytes))
    out.print(table)
    if as_json:
        print(json.dumps({"recipe": recipe, "stages": [step.model_dump() for step in steps]}), flush=True)


@app.command("ls")
def list_artifacts(
    as_json: Json = False,
    as_tree: Annotated[bool, typer.Option("--tree", help="Show what was made from what.")] = False,
) -> None:
    """List the artifacts: stage, fingerprint, size, age and what they were made from."""
    from dflash import housekeeping  # loads polars
    from dflash.lineage import lineage

    with usage_errors():
        used, quota = housekeeping.usage_and_quota()
    if quota is not None and used > quota:
        print(f"warning: {housekeeping.over_quota(used, quota)}", file=sys.stderr)
    table = _table("stage", "fingerprint", "size", "age", "inputs", title=str(manifests.home()))
    rows = []
    for manifest in manifests.manifests():
        age = (datetime.now(UTC) - manifest.created).total_seconds()
        inputs = ", ".join(f"{name} {value[:32]}" for name, value in manifest.inputs.items())
        table.add_row(manifest.stage, manifest.key, _size(manifest.nbytes), _age(age), inputs)
        rows.append(
            {
                "stage": manifest.stage,
                "fingerprint": manifest.key,
                "bytes": manifest.nbytes,
                "age_seconds": round(age),
                "inputs": manifest.inputs,
                "path": str(manifest.path),
            }
        )
    out.print(_lineage_tree(lineage()) if as_tree else table)
    if as_json:
        print(json.dumps({"artifacts": rows}), flush=True)


def _lineage_tree(made: "Lineage") -> Tree:
    """Reports on top, what they were made from below; what is shown a second time has its inputs where it was first."""
    shown: set[str] = set()

    def grow(above: Tree, manifest: "Manifest", name: str) -> None:
        again = manifest.key in shown
        facts = f"  {_size(manifest.nbytes)}, {_since(manifest.created)}{'  (see above)' if again else ''}"
        branch = above.add(Text.assemble(name, (manifest.key, "bold"), facts))
        shown.add(manifest.key)
        for input, value in {} if again else manifest.inputs.items():
            found = made.inputs([value])
            for one in found:
                grow(branch, one, f"{input}: ")
            if not found:
                branch.add(f"{input}: {value[:32]}")

    tree = Tree(str(manifests.home()))
    for root in made.roots():
        grow(tree, root, "")
    return tree


@app.command()
def show(
    fingerprint: Annotated[str, typer.Argument(help="Of an artifact, as dflash ls shows it; its beginning is enough.")],
    as_json: Json = False,
) -> None:
    """Show one artifact: its configuration, what it was made from, what was made from it, and what came out."""
    from dflash import housekeeping
    from dflash.lineage import lineage

    with usage_errors():
        made = lineage()
        facts = housekeeping.facts(made.find(fingerprint), made)
    table = _table("what", "value", title=str(facts["fingerprint"]))
    for name, value in facts.items():
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
        table.add_row(name, shown)
    out.print(table)
    if as_json:
        print(json.dumps(facts), flush=True)


VERDICT_CODES = {"better": 0, "same": 0, "worse": 1, "not comparable": 3}
Report = Annotated[
    str, typer.Argument(help="A report's folder, or the key of a report or drafter; its beginning is enough.")
]


@app.command()
def compare(
    candidate: Report,
    champion: Report,
    method: Annotated[str, typer.Option(help="chain or treeN; empty: the largest tree up to 64.")] = "",
    minimum_difference: Annotated[
        float, typer.Option(min=0, help="Of acceptance lengths, below which they are the same.")
    ] = EvaluationConfig.model_fields["minimum_difference"].default,
    minimum_conversations: Annotated[
        int, typer.Option(min=2, help="With fewer they are not comparable.")
    ] = EvaluationConfig.model_fields["minimum_conversations"].default,
    as_json: Json = False,
) -> None:
    """Compare two drafters on the same responses: exit 0 where the first is better or the same, 1 where it is worse, 3
    where they are not comparable.
    """
    from dflash.decoding import judging, statistics, verdict

    with usage_errors():
        one, other = (verdict.load_evaluated(judging.report_of(name)) for name in (candidate, champion))
        found = verdict.compare(
            one,
            other,
            method=method or judging.method_of(one.report["methods"]),
            minimum_difference=minimum_difference,
            minimum_conversations=minimum_conversations,
            seed=statistics.SEED,
        )
    table = _table("category", "verdict", "reason", title=f"{found.candidate} against {found.champion}, {found.method}")
    for name, part in found.categories.items():
        table.add_row(name, part.verdict, part.reason)
    table.add_row("all", found.verdict, found.reason)
    out.print(table)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)), flush=True)
    raise typer.Exit(VERDICT_CODES[found.verdict])


@app.command()
def promote(
    key: Annotated[str, typer.Argument(help="Of a report, or of a drafter that has one; its beginning is enough.")],
    reason: Annotated[str, typer.Option(help="Kept in the log of promotions.")] = "by hand",
) -> None:
    """Make a drafter the champion of its verifier, whatever the verdict."""
    from dflash.decoding import judging

    with usage_errors():
        verifier, champion = judging.promote_by_hand(key, reason=reason)
    print(f"champion of {verifier}: {champion.drafter} ({champion.report})", file=sys.stderr)


@app.command()
def champion(
    log: Annotated[bool, typer.Option("--log", help="Every promotion there was.")] = False, as_json: Json = False
) -> None:
    """Show the champion of each verifier: the drafter that others have to beat."""
    from dflash.decoding import champions, judging

    with usage_errors():
        current = judging.all_champions()
        rows = [
            (verifier, one)
            for verifier, last in current.items()
            for one in (champions.promotions(verifier) if log else [last])
        ]
    table = _table("verifier", "drafter", "report", "promoted", "reason", title=str(manifests.home() / "champions"))
    for verifier, one in rows:
        table.add_row(verifier, one.drafter, one.report, f"{one.promoted:%Y-%m-%d %H:%M}", one.reason)
    out.print(table)
    if as_json:
        listed = [{"verifier": verifier} | one.model_dump(mode="json") for verifier, one in rows]
        print(json.dumps({"champions": listed}), flush=True)


@app.command("export")
def export_folder(
    drafter: Annotated[str, typer.Argument(help="Its key, whose beginning is enough, or its folder.")],
    folder: Annotated[Path, typer.Option("--to", help="The folder to make.")],
    kind: Annotated[
        str, typer.Option("--format", help="dflash (z-lab, SpecForge, vLLM, SGLang) or speculators.")
    ] = "dflash",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32; empty: as trained, bit for bit.")] = "",
    verifier: Annotated[str, typer.Option(help="Where its verifier is now; empty: where it was.")] = "",
    revision: Revision = "",
    trust_remote_code: TrustRemoteCode = False,
    ungated: Annotated[bool, typer.Option("--ungated", help="Although the parity gate did not pass it.")] = False,
    as_json: Json = False,
) -> None:
    """Write a drafter into a folder that other projects load: weights, config, tokenizer, model card, checksums."""
    from dflash.export.exporting import export_drafter  # loads torch

    with usage_errors():
        made = export_drafter(
            drafter,
            folder,
            kind=kind,
            dtype=dtype,
            verifier=verifier,
            revision=revision,
            ungated=ungated,
            trust_remote_code=trust_remote_code,
        )
    print(f"exported to {made}", file=sys.stderr)
    if as_json:
        print(json.dumps({"folder": str(made.absolute()), "format": kind}), flush=True)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Of a drafter, as dflash export makes it.")],
    target: Annotated[str, typer.Argument(help="A folder, s3://bucket/path, gs://bucket/path or hub:OWNER/NAME.")],
    champion: Annotated[bool, typer.Option("--champion", help="Make it the champion there, too.")] = False,
    as_json: Json = False,
) -> None:
    """Bring a drafter into a registry, where it is the latest from then on. Nothing else ever uploads one.

    Credentials come from the environment: AWS_..., GOOGLE_..., HF_TOKEN. An interrupted push continues when run again.
    """
    from dflash import registry

    with usage_errors():
        made = registry.push(folder, target, champion=champion)
    print(f"pushed {made.drafter} to {target}: {' and '.join(made.aliases)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"drafter": made.drafter, "aliases": made.aliases, "sent": made.sent}), flush=True)


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="A folder, s3://bucket/path, gs://bucket/path or hub:OWNER/NAME.")],
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    name: Annotated[str, typer.Option(help="latest, champion, or the name of a drafter in the registry.")] = "latest",
    as_json: Json = False,
) -> None:
    """Bring a drafter out of a registry, every file compared with its checksum. Continues when run again."""
    from dflash import registry

    with usage_errors():
        found = registry.pull(source, folder, name=name)
    print(f"pulled {found} into {folder}", file=sys.stderr)
    if as_json:
        print(json.dumps({"drafter": found, "folder": str(folder.absolute())}), flush=True)


@app.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(help="Of a drafter: DFlash, SpecForge, speculators or TorchSpec.")],
    verifier: Annotated[str, typer.Option(help="As verifier.model of a recipe; empty: as the folder says.")] = "",
    revision: Revision = "",
    trust_remote_code: TrustRemoteCode = False,
    block_size: Annotated[int, typer.Option(min=0, help="Where the folder does not say it.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a drafter that others trained an artifact, to evaluate it, or to start training from its folder."""
    from dflash.export.importing import import_drafter, verifier_of  # loads torch and Transformers

    with usage_errors():
        pinned = verifier_of(folder, model=verifier, revision=revision, trust_remote_code=trust_remote_code)
        made = import_drafter(folder, pinned, block_size=block_size)
    print(f"imported as {made.key}: {made.path}", file=sys.stderr)
    if as_json:
        print(json.dumps({"drafter": made.key, "folder": str(made.path)}), flush=True)


@app.command()
def gc(
    days: Annotated[float, typer.Option(min=0, help="Keep what was used in so many days.")] = 14,
    keep: Annotated[int, typer.Option(min=0, help="Keep so many of the newest drafters, with all they need.")] = 3,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is.")] = False,
    as_json: Json = False,
) -> None:
    """Say what may be deleted, and delete it with --yes.

    Kept are the champions, the newest drafters, their reports, what was used lately or is in use, and all that was made
    from. What is deleted costs the time to make it again.
    """
    from dflash import housekeeping

    with usage_errors():
        items = housekeeping.survey(days=days, last=keep)
        removed, left = housekeeping.remove(items) if yes else ([], [])
    taken = {item.path for item in left}
    table = _table("stage", "fingerprint", "size", "used", "verdict", title=str(manifests.home()))
    for item in items:
        verdict = item.keep or ("now in use" if item.path in taken else "deleted" if yes else "may go")
        used = _since(datetime.fromtimestamp(item.used, UTC))
        table.add_row(item.stage, item.fingerprint, _size(item.bytes), used, verdict)
    out.print(table)
    total = sum(item.bytes for item in items)
    going = sum(item.bytes for item in (removed if yes else items) if not item.keep)
    if as_json:
        rows = [item.model_dump() | {"removed": item in removed} for item in items]
        print(json.dumps({"items": rows, "bytes": total, "freed" if yes else "may_go": going}), flush=True)
    done = f"freed {_size(going)} of {_size(total)}"
    print(done if yes else f"{_size(going)} of {_size(total)} may go: dflash gc --yes", file=sys.stderr)


@app.command()
def verify(as_json: Json = False) -> None:
    """Read every byte of every artifact and compare checksums, lengths and identities; exit 1 on damage.

    What is damaged is set aside: the next run makes it again, a shard of hidden states alone.
    """
    from dflash import verification  # loads torch

    with usage_errors():
        verdicts = list(verification.verify_all())
    table = _table("stage", "fingerprint", "part", "size", "damage", title=str(manifests.home()))
    for verdict in verdicts:
        table.add_row(verdict.stage, verdict.fingerprint, verdict.part, _size(verdict.bytes), verdict.damage or "none")
    out.print(table)
    damages = [verdict.damage for verdict in verdicts if verdict.damage]
    if as_json:
        print(json.dumps({"artifacts": [verdict.model_dump() for verdict in verdicts]}), flush=True)
    if damages:
        fail("; ".join(damages), code=1)
    print(f"all {len(verdicts)} artifacts and parts are whole", file=sys.stderr)


@app.command()
def up(
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Who reaches it can run code here: another than localhost needs a password in "
            "PREFECT_SERVER_API_AUTH_STRING, as user:password."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of server and UI.")] = 4200,
    detach: Annotated[bool, typer.Option("--detach", help="Return when it is up; dflash down stops it.")] = False,
) -> None:
    """Start a Prefect server and a worker, register every deployment, print the UI's address. Ctrl-C stops them."""
    with usage_errors():
        project = recipes.prefect_yaml().parent
        if detach:
            server.up_in_background(project, host=host, port=port)
        else:
            raise typer.Exit(server.up(project, host=host, port=port))


@app.command()
def down() -> None:
    """Stop what `dflash up` started: what runs saves its work and is cancelled, then worker and server end."""
    with usage_errors():
        server.down()


@app.command()
def alerts() -> None:
    """Have the server send notifications: of drafters that are worse, of failed runs, when retraining is due, of the
    quota. By DFLASH_ALERTS_URL, a webhook (Slack's or any other), else by the block dflash-alerts that is there.
    """
    with usage_errors(), server.available():
        from prefect.client.orchestration import get_client  # reads Prefect's settings

        from flows import automations

        with get_client(sync_client=True) as client:
            for name in automations.apply(client, address=os.environ.get(automations.ADDRESS)):
                print(name)


def _log_to_terminal() -> None:
    """The library's own lines, short and once; Prefect's only where something is wrong."""
    console = Console(stderr=True)
    if logs.as_json():
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(logs.JsonLines())
    elif console.is_terminal:  # above the progress bar
        handler = RichHandler(console=console, show_path=False, show_level=False)
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("dflash")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    # what Prefect's engine says of a failure is in the UI; here the cause is said once, in the last line
    for name in ("dflash", "prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).propagate = False


def _show_result(record: "RunRecord", url: str | None) -> None:
    from dflash.decoding.tables import terminal_rows  # loads nothing heavy, but only a finished run needs it

    if record.report:
        header, rows = terminal_rows(json.loads(Path(record.report).with_suffix(".json").read_text()))
        table = _table(*header, title="acceptance length")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        out.print(table)
    steps = ", ".join(f"{step.stage} {step.state} {step.seconds:.1f} s" for step in record.stages)
    page = (url or "http://127.0.0.1:4200/api").removesuffix("/api") + f"/runs/flow-run/{record.flow_run_id}"
    for name, text in (
        ("steps", steps),
        ("report", record.report),
        ("drafter", record.drafter),
        ("verdict", record.verdict and f"{record.verdict}; champion {record.champion}"),
        ("retrain", record.retraining and f"retraining is {record.retraining}"),
        ("run page", page if url else f"{page} (after: dflash up)"),
    ):
        if text:
            print(f"{name:<9}{text}")


def _table(*header: str, title: str) -> Table:
    """Only texts may wrap: names are there to be copied."""
    table = Table(title=title)
    for name in header:
        table.add_column(name, no_wrap=name not in ("reason", "inputs", "damage", "value", "verdict"), overflow="fold")
    return table


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}" if size < 100 or unit == "B" else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _since(time: datetime) -> str:
    return _age((datetime.now(UTC) - time).total_seconds())


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
