"""What README and docs say can be done: commands, options, settings, paths and links are there; cheap commands run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from dflash.bundled import resolve
from dflash.config import Recipe
from flows import cli, recipes
from scripts import configuring
from tests.test_up import SMALL

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
FOR_PEOPLE = {"NAME": "demo", "RECIPE": "demo", "STAGE": "training", "STEP": "training", "N": "4300"}
"""What a reader puts in; keys of artifacts are put in where a command is run."""
ELSEWHERE = {
    "dask", "docker", "kubectl", "podman", "ray", "sbatch", "scancel", "squeue", "source", "ssh", "systemctl", "unset",
    "wandb",
}  # fmt: skip
"""Programs of others: their arguments are theirs."""
DFLASH: Any = typer.main.get_command(cli.app)
CHEAP = (
    "dflash run demo ", "dflash run prepare-data/", "dflash run train-drafter/", "dflash run evaluate/",
    "dflash run nightly-evaluation/", "dflash export ", "dflash import FOLDER", "dflash push ", "dflash pull ",
    "dflash alerts", "dflash plan demo ", "dflash ls", "dflash show ", "dflash verify", "dflash champion",
    "dflash compare ", "dflash promote ", "dflash gc", "prefect work-pool create ", "python benchmarks/intervals.py",
)  # fmt: skip
"""In the order in which they are run: a drafter is there before it is exported, and a folder before it is read."""


@dataclass(frozen=True)
class Command:
    document: str
    line: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"


def command_lines(document: Path) -> Iterator[str]:
    """Of blocks that begin with a command, and commands within the text."""
    text = document.read_text()
    for block in FENCE.finditer(text):
        lines = block["body"].replace("\\\n", " ").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        if block["kind"] in ("", "bash") and lines and program(lines[0]) in {*CHECKS, *ELSEWHERE}:
            yield from lines
    for span in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        line = " ".join(span.split())
        if " " in line and program(line) in {*CHECKS, "--set"}:
            yield line


def split(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    words = [word.replace("/NAME", "/demo") for word in words]
    return [FOR_PEOPLE.get(word, word) for word in words]


def program(line: str) -> str:
    try:
        words = split(line)
    except ValueError:  # no command at all
        return ""
    return words[0].removeprefix(".venv/bin/") if words else ""


def commands() -> list[Command]:
    return [
        Command(document.name, line, (program(line), *split(line)[1:]))
        for document in DOCUMENTS
        for line in command_lines(document)
    ]


def check_dflash(name: str, *options: str) -> None:
    assert name in DFLASH.commands
    if options in ((), ("…",)):  # the command is spoken of, not given
        return
    context = DFLASH.commands[name].make_context(name, list(options))
    if recipe := context.params.get("recipe"):
        recipes.load_recipe(recipe, context.params["changes"] or [])
        recipes.check_steps(context.params.get("refresh") or [])


def check_make(*words: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, assigned, _ = word.partition("=")
        assert re.search(rf"^{name} \??:?=" if assigned else rf"^{name}:", makefile, re.MULTILINE), word


def check_python(*words: str) -> None:
    if words[0] == "-m":
        if words[1] in ("pip", "pytest"):
            return CHECKS[words[1]](*words[2:])
        spec = importlib.util.find_spec(words[1])
        assert spec
        assert spec.origin
        return None
    source = (ROOT / words[0]).read_text()
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in source, word
    return None


def check_prefect(*words: str) -> None:
    from prefect.cli._app import _app

    if words == ("…",):
        return
    options = list(words[1:] if words[0] == "--no-prompt" else words)
    _app.parse_args(options, exit_on_error=False, print_error=False)
    for template in options[options.index("--base-job-template") + 1 :][:1] if "--base-job-template" in options else []:
        assert (ROOT / template).is_file()


def check_pip(*words: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if asked := re.match(r"\.\[(.*)\]", word):
            assert set(asked[1].split(",")) <= set(extras)


def check_pytest(*words: str) -> None:
    for word in words:
        assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), word


def check_export(*words: str) -> None:
    """Variables of ours are read somewhere; Prefect's are settings of it."""
    from prefect.settings.legacy import _get_settings_fields
    from prefect.settings.models.root import Settings

    ours = "".join(
        path.read_text() for folder in ("dflash", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")
    )
    for word in words:
        name = word.partition("=")[0]
        others = name.startswith("PREFECT_INTEGRATIONS_")
        assert others or name in ours or name in _get_settings_fields(Settings), name


def check_srun(*words: str) -> None:
    rest = [word for word in words if not word.startswith("-")]
    check(Command("srun", "", tuple(words[words.index(rest[0]) :])))


CHECKS: dict[str, Any] = {
    "dflash": check_dflash, "make": check_make, "python": check_python, "prefect": check_prefect, "pip": check_pip,
    "pytest": check_pytest, "export": check_export, "srun": check_srun,
}  # fmt: skip


def check(command: Command) -> None:
    name, *words = command.words
    if name in CHECKS:
        CHECKS[name](*words)
    elif name == "--set":
        recipes.load_recipe("demo", words)
    else:
        assert name in ELSEWHERE, f"{name}: a program that this test does not know"


def test_every_command_exists_with_its_options_settings_and_recipes() -> None:
    found = commands()
    assert {command.document for command in found} >= {"README.md", "operating.md", "configuring.md"}
    assert len(found) > 60
    wrong = []
    for command in found:
        try:
            check(command)
        except (Exception, SystemExit) as error:
            wrong.append(f"{command}: {type(error).__name__} {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "dflash runs demo", "dflash run demmo", "dflash run demo --sett a.b=1", "dflash plan demo --set training.g=7",
        "make tset", "make demo RECIPES=x", "python benchmarks/nothing.py", "python benchmarks/training.py --swep x",
        "prefect workpool ls", "prefect worker start --poool local", "pip install '.[nothing]'", "rm -rf /",
        "export DFLASH_HOMES=/x", "export PREFECT_API_URI=x", "pytest tests/test_nothing.py",
        "srun --gres=gpu:1 prefect worker strat", "--set 'trainin.epochs=3'",
    ],
)  # fmt: skip
def test_a_command_that_does_not_exist_is_noticed(line: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(Command("", line, tuple(split(line))))


def test_settings_that_are_named_exist() -> None:
    names = re.compile(rf"`(?:DFLASH__)?({'|'.join(Recipe.model_fields)})\.(\w+)")
    found = [
        (document.name, section, key)
        for document in DOCUMENTS
        if document.name != "report.md"  # which speaks of the report's fields
        for section, key in names.findall(document.read_text())
    ]
    assert len(found) > 30
    wrong = [one for one in found if one[2] not in configuring.models()[one[1]].model_fields]
    assert not wrong


def test_settings_in_yaml_blocks_are_valid() -> None:
    found = 0
    for document in DOCUMENTS:
        for block in FENCE.finditer(document.read_text()):
            content = yaml.safe_load(block["body"]) if block["kind"] == "yaml" else None
            if isinstance(content, dict) and set(content) <= set(Recipe.model_fields):
                for section, settings in content.items():
                    configuring.models()[section].model_validate(settings)
                    found += 1
    assert found


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]+\.(?:py|md|yaml|yml|toml|txt|json|sh))\b", text):
        assert (ROOT / path).exists() or f"/{path}" in text, path


def test_the_readmes_tree_has_the_files_that_exist() -> None:
    (tree,) = (
        block["body"] for block in FENCE.finditer(DOCUMENTS[0].read_text()) if block["body"].startswith("flows/")
    )
    names = set(re.findall(r"\b\w+\.py\b", tree))
    assert len(names) > 30
    there = {path.name for folder in ("dflash", "tasks", "flows") for path in (ROOT / folder).rglob("*.py")}
    assert names <= there, names - there
    tops = {path.name for folder in ("flows", "dflash") for path in (ROOT / folder).glob("*.py")} - {"__init__.py"}
    assert tops <= names, tops - names


def test_every_module_has_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["dflash"])
    named = {name for layer in layers for name in layer.split(" | ")}
    found = {
        ".".join(path.relative_to(ROOT / "dflash").with_suffix("").parts)
        for path in (ROOT / "dflash").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert {name for name in found if not named & {name, name.partition(".")[0]}} == set()


def test_the_table_of_settings_is_that_of_the_configuration() -> None:
    stale = "python scripts/configuring.py writes docs/configuring.md anew"
    assert configuring.DOCUMENT.read_text() == configuring.document(), stale


@pytest.mark.timeout(600)  # on a busy machine
@pytest.mark.usefixtures("prefect_server")
def test_cheap_commands_run(tmp_path: Path) -> None:
    """Each line of README and docs that takes seconds, on a small demo; `up` and `down` are in test_up.py."""
    lines = dict.fromkeys(re.sub(r"^\.venv/bin/", "", command.line) for command in commands())
    cheap = {line: number for line in lines for number, start in enumerate(CHEAP) if line.startswith(start)}
    assert set(cheap.values()) == set(range(len(CHEAP))), "there is a line for each"
    ordered = sorted(cheap, key=lambda line: ("--yes" in line, cheap[line]))
    small = {**SMALL, "evaluation": {**SMALL["evaluation"], "live_prompts": 0, "parity": "off"}}
    changes = [f"--set={s}.{key}={json.dumps(value)}" for s, values in small.items() for key, value in values.items()]
    new_prompts = tmp_path / "this-week.jsonl"
    new_prompts.write_text("".join(resolve("bundled:evaluation").read_text().splitlines(keepends=True)[3:6]))
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(ordered), json.dumps(changes), str(tmp_path)],
        env={**os.environ, "DFLASH_HOME": str(tmp_path / "home"), "DFLASH_ALERTS_URL": "http://127.0.0.1:9/"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("home/artifacts/training/training-*"))) > 1


ONE_AFTER_ANOTHER = """
import json, re, runpy, shlex, sys
from pathlib import Path
from prefect.cli._app import _app as prefect
from flows import cli
from dflash.manifests import home

lines, small, root = [*map(json.loads, sys.argv[1:3]), sys.argv[3]]
exported = {}
for number, line in enumerate(lines):
    program, *words = shlex.split(line, comments=True)
    kind = "speculators" if "speculators" in words or words[0] == "import" else "dflash"
    folder = f"{root}/folder-{number}" if words[0] in ("export", "pull") else exported.get(kind, "")
    if words[0] == "export":
        exported[kind] = folder
    if words[0] in ("run", "export"):  # an imported drafter has no report
        keys = sorted(path.name for path in home().glob("artifacts/training/training-*"))
    known = dict.fromkeys(("KEY", "FINGERPRINT", "CHAMPION", "DRAFTER"), keys[0] if keys else "")
    known |= {"CANDIDATE": keys[-1] if keys else "", "NAME": "demo", "FOLDER": folder}
    known |= {"s3://bucket/drafters": f"{root}/registry", "prompts/this-week.jsonl": f"{root}/this-week.jsonl"}
    pattern = re.compile("|".join(rf"\\b{re.escape(name)}\\b" for name in known))
    words = [pattern.sub(lambda found: known[found[0]], word) for word in words]
    more = {"run": small, "plan": small, "export": ["--ungated"], "benchmarks/intervals.py": ["--sets", "9"]}
    words += more.get(words[0], [])
    print(line, file=sys.stderr, flush=True)
    try:
        if program == "dflash":
            code = cli.app(words, standalone_mode=False)
        elif program == "prefect":
            code = prefect(words, exit_on_error=False)
        else:
            sys.argv = words
            code = runpy.run_path(words[0], run_name="__main__") and 0
    except SystemExit as stop:
        code = stop.code
    expected = (0, 1, 3) if words[0] == "compare" else (0, None)
    if code not in expected:
        sys.exit(f"{line}: exit code {code}")
"""
