"""The command line: recipes validate, and what cannot work is said in one line with exit code 2."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from dflash.config import Address, Recipe, SourceConfig, VerifierConfig
from dflash.corpus.answering import Workers
from dflash.corpus.records import Sampling
from dflash.manifests import Key, find, load_manifest, publish
from dflash.pinning import pin
from flows import cli, recipes

NO_PASSWORD = ["holds a user or password", "leave them out"]
RECIPES = recipes.deployments(recipes.prefect_yaml())


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_validates(name: str) -> None:
    recipe = recipes.load_recipe(name)
    assert RECIPES[name]["recipe"] == name
    assert recipe.training.block_size == 16
    assert recipe.tokenization.num_buckets == 6


def test_the_production_recipes_are_the_published_configuration() -> None:
    for name, mask, length in (("qwen3-8b-ddtree", 151669, 3072), ("qwen3.6-27b-ddtree", 248070, 8192)):
        recipe = recipes.load_recipe(name)
        t = recipe.training
        assert (t.mask_token_id, recipe.tokenization.max_length) == (mask, length)
        assert (t.block_size, t.num_anchors, t.num_layers, t.gamma) == (16, 512, 5, 10)
        assert (t.optimizer, t.beta1, t.beta2, t.learning_rate) == ("adamw", 0.9, 0.95, 6e-4)
        assert (t.warmup_share, t.clip_norm, t.noise_start, t.epochs) == (0.04, 1.0, 0.05, 6)
        assert t.slot_weights == "decay"
        fast = recipes.load_recipe(f"{name}-fast")
        assert fast.training == t.model_copy(update={"optimizer": "muon", "slot_weights": "dpace"})
        assert fast.model_copy(update={"training": t}) == recipe


def test_set_changes_one_value_inside_a_section_and_leaves_the_rest_of_it() -> None:
    changes = ["training.loss={ce: 0.5}", "training.loss.kl=1", "extraction.store_final=true"]
    changes += ["training.shape.sliding_window=32", "training.shape.sliding_layers=[0]"]
    recipe = recipes.load_recipe("demo", changes)
    assert (recipe.training.loss.ce, recipe.training.loss.kl) == (0.5, 1)
    assert (recipe.training.shape.sliding_window, recipe.training.shape.sliding_layers) == (32, [0])
    changed = {"loss": recipe.training.loss, "shape": recipe.training.shape}
    assert recipe.training == recipes.load_recipe("demo").training.model_copy(update=changed)


def test_set_changes_one_value_and_is_validated_like_the_rest() -> None:
    recipe = recipes.load_recipe(
        "demo", ["training.gamma=7", "evaluation.budgets=[8, 32]", "training.learning_rate=6e-4"]
    )
    assert recipe.training.gamma == 7
    assert recipe.evaluation.budgets == [8, 32]
    assert recipe.training.learning_rate == 6e-4
    assert recipes.load_recipe("pipeline/demo") == recipes.load_recipe("demo")
    recipe = recipes.load_recipe("demo", ["verifier.thinking=on", "generation.deduplicate=off"])  # booleans in YAML
    assert (recipe.verifier.thinking, recipe.generation.deduplicate) == ("on", "off")
    assert recipe.generation.decontaminate is True


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "demmo"], ["demmo", "demo", "smollm2", "qwen3-8b-ddtree"]),
        (["plan", "demmo"], ["demmo", "demo"]),
        (["run", "evaluate/demmo"], ["evaluate/demmo", "evaluate/demo", "evaluate/smollm2"]),
        (["run", "demo", "--set", "drafter=training-0"], ["drafter=training-0", "section.key=value"]),
        (["run", "demo", "--set", "training.gama=7"], ["training.gama", "gamma", "num_anchors"]),
        (["run", "demo", "--set", "trainig.gamma=7"], ["trainig", "training", "evaluation"]),
        (["run", "demo", "--set", "training.gamma"], ["training.gamma", "section.key=value"]),
        (["run", "demo", "--set", "training.gamma=-1"], ["training.gamma", "greater than 0"]),
        (["run", "demo", "--set", "training.gamma..x=1"], ["training.gamma..x=1", "section.key=value"]),
        (["run", "demo", "--set", "training.epochs.x=1"], ["training.epochs is no section", "training.epochs=VALUE"]),
        (["run", "demo", "--set", "training.gamma.x=1"], ["training.gamma", "valid number", "{'x': 1}"]),
        (["run", "demo", "--set", "training.shape.window=32"], ["training.shape.window", "choose", "sliding_window"]),
        (["run", "demo", "--set", "generation.prompts.0=x"], ["generation.prompts is no section", "prompts=VALUE"]),
        (["run", "demo", "--set", "training.optimizer=sgd"], ["training.optimizer", "adamw", "muon"]),
        (["run", "demo", "--set", "training.block_size=1"], ["training.block_size", "greater than or equal to 2"]),
        (["run", "demo", "--set", "evaluation.budgets=[64, 16]"], ["evaluation.budgets", "ascending"]),
        (["run", "demo", "--set", "tokenization.max_length=16"], ["tokenization.max_length", "block"]),
        (
            ["run", "demo", "--set", "generation.prompts=[{path: p, weigth: 1}]"],
            ["generation.prompts.0.weigth", "weight"],
        ),
        (["run", "demo", "--set", "generation.prompts=[{path: p, weight: .inf}]"], ["prompts.0.weight", "finite"]),
        (["run", "demo", "--set", "generation.base_url=ftp://x"], ["generation.base_url", "ftp://x", "http://"]),
        (["run", "demo", "--set", "extraction.address=tcp://me:planted@h:1"], ["extraction.address", *NO_PASSWORD]),
        (["run", "demo", "--set", "training.rendezvous=me:planted@h:1"], ["training.rendezvous", *NO_PASSWORD]),
        (["run", "demo", "--set", "generation.prompts=[https://me:planted@h/p]"], ["prompts.0.path", *NO_PASSWORD]),
        (["run", "demo", "--set", "evaluation.prompts=[{path: s3://me:pl/anted@h}]"], ["prompts.0.path", *NO_PASSWORD]),
        (["run", "demo", "--set", "generation.deduplicate=on"], ["generation.deduplicate", "near", "'on'"]),
        (["run", "demo", "--refresh", "trainin"], ["trainin", "training", "evaluation-extraction"]),
        (["run", "demo", "--set", "verifier.template_options={mod: 1}"], ["template_options", "read mod", "it knows"]),
        (["plan", "demo", "--set", "verifier.model=nowhere"], ["verifier.model", "nowhere"]),
        (["plan", "demo", "--set", "verifier.model=bundled:nothing"], ["bundled:nothing", "bundled:demo-verifier"]),
        (["plan", "demo", "--set", "generation.prompts=[nothing.jsonl]"], ["nothing.jsonl", "prompt file"]),
        (["plan", "demo", "--set", "training.mask_token_id=999999"], ["training.mask_token_id", "999999", "2048"]),
        (["plan", "demo", "--set", "training.mask_token_id=2"], ["training.mask_token_id", "eos"]),
        (["plan", "demo", "--set", "training.mask_token_id=0"], ["training.mask_token_id", "pad"]),
        (["plan", "demo", "--set", "extraction.target_layer_ids=[1, 5]"], ["extraction.target_layer_ids", "0..4"]),
        (["plan", "demo", "--set", "extraction.num_taps=5"], ["extraction.num_taps", "at most 3"]),
    ],
    ids=lambda value: value[-1] if isinstance(value[0], str) and len(value) < 6 else "",
)
def test_bad_input_is_one_line_with_place_and_remedy_and_exit_code_2(arguments: list[str], parts: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "flows.cli", *arguments], capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "planted" not in lines[0]
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_data_root_that_cannot_be_written_is_named_in_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # because root may write wherever there is a folder
    root = tmp_path / "file" / "home"
    monkeypatch.setenv("DFLASH_HOME", str(root))
    done = subprocess.run([sys.executable, "-m", "flows.cli", command, "demo"], capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert f"is DFLASH_HOME={root} a folder that can be written?" in done.stderr


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_stage_that_may_not_write_names_the_data_root_and_prints_no_traceback(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def forbidden(**_: object) -> None:
        raise OSError(number, os.strerror(number), str(home / "artifacts"))

    monkeypatch.setattr(recipes, "load_flow", lambda _: forbidden)
    monkeypatch.setattr(cli, "_log_to_terminal", lambda: None)
    with pytest.raises(cli.StageError, match=f"{home}/artifacts'; is DFLASH_HOME={home} a folder that can be written"):
        cli._run(recipes.load("demo", []), [])
    assert capsys.readouterr().err == ""


def test_a_servers_address_with_a_password_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:planted@127.0.0.1:9/api")
    test_bad_input_is_one_line_with_place_and_remedy_and_exit_code_2(
        ["run", "demo"], ["PREFECT_API_URL", *NO_PASSWORD, "PREFECT_API_AUTH_STRING"]
    )


@pytest.mark.parametrize(
    ("address", "taken"),
    [
        ("", True),
        ("prompts/week-[0-9]?.jsonl", True),
        ("hub:owner/name@main", True),
        ("host:29400", True),
        ("s3://bucket/me@home/part:1@2", True),
        ("http://host:8000/v1/models@2", True),
        ("http://me@host/v1", False),
        ("http://me:planted@host/v1", False),
        ("http://me:12345@host/v1", False),
        ("s3://me:pl/anted@bucket", False),
        ("me:planted@host:29400", False),
        ("http://host/v1?key=planted", False),
        ("s3://bucket/path#planted", False),
    ],
)
def test_an_address_may_have_an_at_in_its_path_but_no_user_password_or_options(address: str, taken: bool) -> None:
    """Forms ask the pattern, all else the type."""
    kind = TypeAdapter(Address)
    assert bool(re.search(kind.json_schema()["pattern"], address)) == taken
    with nullcontext() if taken else pytest.raises(ValueError, match="leave them out"):
        assert kind.validate_python(address) == address


def test_what_was_given_is_in_no_error_that_another_process_may_log() -> None:
    with pytest.raises(ValueError) as refused:
        SourceConfig(path="https://me:planted@host/prompts.jsonl")
    assert "planted" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("\n{% for %}", ["malformed", "line 2"]),
        ("{{ messages | nonsense }}", ["malformed", "line 1", "nonsense"]),
        ("", ["empty", "verifier.template"]),
        ("caf\xe9", ["own.jinja", "UTF-8"]),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_anything_runs(
    home: Path, tmp_path: Path, template: str, parts: list[str]
) -> None:
    own = tmp_path / "own.jinja"
    own.write_bytes(template.encode("latin-1"))
    test_bad_input_is_one_line_with_place_and_remedy_and_exit_code_2(
        ["run", "demo", "--set", f"verifier.template={own}"], parts
    )


def test_tracebacks_are_for_what_no_message_explains(home: Path) -> None:
    def raised(cause: Callable[[], object]) -> Exception:
        with pytest.raises(Exception) as error:
            cause()
        return error.value

    def broken() -> None:
        raise RuntimeError("shape mismatch")

    def published() -> None:
        with publish(Key(stage="training", recipe=1, config={}, inputs={}), summary={}):
            broken()

    verifier = pin(VerifierConfig(model="bundled:demo-verifier", device="cpu"))
    failing = Workers(verifier, ["cpu"])
    for process in failing.processes.values():
        process.kill()
    answer = partial(failing.answer, [("a/0", [1])], batch_size=1, sampling=Sampling(max_new_tokens=2))
    explained = [partial(load_manifest, home), partial(open, home / "nothing"), answer]
    assert [cli._is_explained(raised(cause)) for cause in explained] == [True] * 3
    unexplained = [broken, published, lambda: {}["key"]]
    assert [cli._is_explained(raised(cause)) for cause in unexplained] == [False] * 3


def test_plan_of_a_fresh_root_says_what_would_run_and_why(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "plan", "demo", "--json"], capture_output=True, text=True, check=True
    )
    plan = json.loads(done.stdout.splitlines()[-1])
    assert plan["recipe"] == "demo"
    assert [step["stage"] for step in plan["stages"]] == [
        "generation", "tokenization", "extraction",
        "evaluation-generation", "evaluation-tokenization", "evaluation-extraction",
        "training", "evaluation",
    ]  # fmt: skip
    assert {step["state"] for step in plan["stages"]} == {"would run"}
    assert plan["stages"][0]["reason"] == "never made"
    assert plan["stages"][1]["reason"] == "generation comes first"
    assert all(step["tokens"] > 0 for step in plan["stages"])


def test_ls_of_a_fresh_root_is_empty(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "ls", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {"artifacts": []}


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flows.cli", *arguments], capture_output=True, text=True)


def flip_a_byte_in_secret(file: Path) -> None:
    """Of equal size and time, so that only a reader of all bytes can notice."""
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_verify_reads_every_byte_and_sets_aside_what_is_damaged(home: Path) -> None:
    key = Key(stage="training", recipe=1, config={}, inputs={})
    with publish(key, summary={}) as (folder, artifact):
        (folder / "weights").write_bytes(b"abc")
    assert run_cli("verify").returncode == 0
    file = artifact().path / "weights"
    flip_a_byte_in_secret(file)
    assert find(key)
    done = run_cli("verify")
    assert done.returncode == 1
    assert f"{file}: content differs from its checksum" in done.stderr
    assert find(key) is None  # the next run makes it again


def test_verify_says_what_it_found_as_json(home: Path) -> None:
    with publish(Key(stage="training", recipe=1, config={}, inputs={}), summary={}) as (folder, artifact):
        (folder / "weights").write_bytes(b"abc")
    done = run_cli("verify", "--json")
    (found,) = json.loads(done.stdout.splitlines()[-1])["artifacts"]
    assert found == {
        "stage": "training", "fingerprint": artifact().key, "part": "", "path": str(artifact().path), "bytes": 3,
        "damage": "",
    }  # fmt: skip
    (artifact().path / "manifest.json").write_text("{")
    done = run_cli("verify", "--json")
    assert done.returncode == 1
    (found,) = json.loads(done.stdout.splitlines()[-1])["artifacts"]
    assert "unreadable" in found["damage"]


def test_defaults_of_the_method() -> None:
    training = Recipe.model_fields["training"].annotation.model_fields  # type: ignore[union-attr]
    assert {name: training[name].default for name in ("block_size", "num_layers", "num_anchors", "gamma", "beta2")} == {
        "block_size": 16, "num_layers": 5, "num_anchors": 512, "gamma": 10.0, "beta2": 0.95,
    }  # fmt: skip
