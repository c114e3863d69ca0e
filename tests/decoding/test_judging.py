"""Verdicts on real drafters: one that was taught, one that was not; and the commands that show and change champions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evaluated_small import response, small_report
from test_evaluation import Inputs
from typer.testing import CliRunner

from dflash.decoding.champions import champion_of, promotions
from dflash.decoding.evaluation import evaluate
from dflash.decoding.history import read_history
from dflash.decoding.judging import Judgement, judge, markdown, method_of
from dflash.decoding.responses import write_responses
from dflash.decoding.verdict import Comparison, Difference
from dflash.keys import evaluation_key
from dflash.manifests import Artifact, find, home
from flows.cli import app


class Judged:
    """Two drafters of one verifier, the weak one first, as nights bring them."""

    def __init__(self, folder: Path) -> None:
        self.inputs = Inputs(folder)
        self.weak = self.inputs.save(self.inputs.new_drafter(), seed=1)
        self.strong = self.inputs.save(self.inputs.taught, seed=2)
        self.first = self.judge(self.weak, parity="on")
        self.second = self.judge(self.strong, parity="on")
        self.third = self.judge(self.weak, parity="off")  # for which the champion has no report yet
        self.fourth = self.judge(self.strong, parity="on")

    def report(self, drafter: Artifact, **settings: Any) -> Artifact:
        return evaluate(self.inputs.config(**settings), drafter, self.inputs.hidden_states, self.inputs.verifier)

    def judge(self, drafter: Artifact, **settings: Any) -> Judgement:
        inputs, config = self.inputs, self.inputs.config(**settings)
        report = self.report(drafter, **settings)
        return judge(config, drafter, report, inputs.hidden_states, inputs.verifier, tree_budget=16)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    return Judged(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def test_the_better_one_becomes_champion_and_the_worse_one_does_not(judged: Judged) -> None:
    assert (judged.first.verdict, judged.first.promoted) == ("first", True)
    assert (judged.second.verdict, judged.second.promoted) == ("better", True)
    assert judged.second.reason.startswith("tree16: ")
    assert (judged.third.verdict, judged.third.promoted) == ("worse", False)
    assert (judged.fourth.verdict, judged.fourth.promoted) == ("champion", False)
    assert judged.third.champion == judged.fourth.champion == judged.strong.key
    verifier = judged.inputs.verifier.identity
    assert [one.drafter for one in promotions(verifier)] == [judged.weak.key, judged.strong.key]
    # of the four, the last is the second again; the champion's report for the third is no night's
    assert read_history(verifier)["drafter"].to_list() == [judged.weak.key, judged.strong.key, judged.weak.key]


def test_who_is_overtaken_is_judged_against_the_new_champion(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([None])  # nobody was champion yet when this one began
    monkeypatch.setattr("dflash.decoding.judging.champion_of", lambda name: next(reads, champion_of(name)))
    inputs, config = judged.inputs, judged.inputs.config(parity="on")
    report = find(evaluation_key(config, judged.weak, inputs.hidden_states, inputs.verifier))
    assert report
    found = judge(config, judged.weak, report, inputs.hidden_states, inputs.verifier, tree_budget=16)
    assert (found.verdict, found.promoted, found.champion) == ("worse", False, judged.strong.key)


def test_a_champion_that_is_gone_is_not_compared_with(judged: Judged) -> None:
    aside = judged.strong.path.rename(judged.strong.path.with_name("aside"))
    try:
        found = judged.judge(judged.weak, parity="off")
    finally:
        aside.rename(judged.strong.path)
    assert (found.verdict, found.promoted, found.champion) == ("not comparable", False, judged.strong.key)
    assert "is not whole any more" in found.reason


def test_the_verdict_shows_names_as_they_are() -> None:
    part = Difference("same", "it <holds> 0", responses=3)
    comparison = Comparison("same", "it", "chain", 0.1, "a", "b", overall=part, categories={"*x*|y": part, "z": part})
    judgement = Judgement("same", "tree16: _it_", promoted=False, champion=None, comparison=comparison)
    assert markdown(judgement).splitlines() == [
        r"**same**: tree16: \_it\_", "", "Champion: `none`", "",
        r"* \*x\*\|y: same (it \<holds> 0)", r"* z: same (it \<holds> 0)",
    ]  # fmt: skip


def test_drafters_are_compared_by_their_deployment_where_it_was_evaluated() -> None:
    methods = ["chain", "tree8", "tree32", "tree256"]
    assert method_of(methods, tree_budget=256) == "tree256"
    assert method_of(methods, tree_budget=0) == "chain"
    assert method_of(methods, tree_budget=64) == method_of(methods) == "tree32"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_compare_says_by_its_exit_code_which_is_better(judged: Judged) -> None:
    strong, weak = judged.strong.key, judged.report(judged.weak, parity="on").key
    code, output = run("compare", strong, weak, "--json")
    assert (code, json.loads(output.splitlines()[-1])["verdict"]) == (0, "better")
    assert run("compare", weak, strong)[0] == 1
    assert run("compare", weak, weak)[0] == 0
    assert run("compare", weak, strong, "--minimum-difference", "9")[0] == 0
    code, output = run("compare", weak, strong, "--method", "tree99", "--json")
    assert (code, json.loads(output.splitlines()[-1])["verdict"]) == (3, "not comparable")
    for name, message in {
        "training-absent": "no artifact begins so",
        judged.inputs.hidden_states.key: "is no report, and no drafter that may have one",
    }.items():
        code, output = run("compare", weak, name)
        assert (code, message in output.replace("\n", " ")) == (2, True)


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    responses = [response(f"p{number}", category="[/maths]") for number in range(8)]
    (tmp_path / "report.json").write_text(json.dumps(small_report(responses)))
    write_responses(tmp_path, responses)
    code, output = run("compare", str(tmp_path), str(tmp_path))
    assert code == 0
    assert "[/maths]" in output


def test_a_champion_is_promoted_by_hand_and_shown(judged: Judged) -> None:
    verifier = judged.inputs.verifier.identity
    assert run("promote", judged.weak.key, "--reason", "to try the log")[0] == 0
    code, output = run("champion", "--log", "--json")
    listed = json.loads(output.splitlines()[-1])["champions"]
    assert code == 0
    assert [one["drafter"] for one in listed] == [judged.weak.key, judged.strong.key, judged.weak.key]
    assert (listed[-1]["reason"], listed[-1]["verifier"]) == ("to try the log", verifier)
    aside = judged.strong.path.rename(judged.strong.path.with_name("aside"))
    try:
        code, output = run("promote", listed[1]["report"])
    finally:
        aside.rename(judged.strong.path)
    assert code == 2
    assert judged.strong.key in "".join(output.split())
    current = champion_of(verifier)
    assert current
    assert current.drafter == judged.weak.key
    (home() / "champions" / f"{verifier}.json").write_text("no json")
    code, output = run("champion")
    assert code == 2
    assert "remove it and promote again" in " ".join(output.split())


def test_a_verdict_on_the_champion_itself_waits_for_no_torch() -> None:
    code = "import dflash.decoding.judging, tasks.evaluation, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
