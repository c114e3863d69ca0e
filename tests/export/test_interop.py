"""Independent projects, each in a process and an environment of its own, load exported drafters and draft the same.

vLLM, whose environment takes gigabytes, is left to `make interop`.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import interop
from benchmarks.interop import Bench, Differs, run, same_logits, same_rounds
from benchmarks.peers import Unavailable, readers_python


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    try:
        readers_python()
    except Unavailable as reason:
        pytest.skip(f"the other projects cannot be installed: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_HOME", str(tmp_path_factory.mktemp("interop-home")))
        yield Bench.make(tmp_path_factory.mktemp("interop"), taught=False)


@pytest.mark.parametrize("name", ["zlab-windows", "specforge", "speculators", "speculators-trimmed"])
def test_others_load_an_exported_drafter_and_draft_the_same(bench: Bench, name: str) -> None:
    (result,) = run(bench, [name])
    assert result.passed, result.said


def test_a_drafter_whose_taps_are_off_by_one_is_noticed(bench: Bench) -> None:
    broken = bench.exported("off", "dflash")
    shutil.copytree(bench.exported("plain", "dflash"), broken)
    described = json.loads((broken / "config.json").read_text())
    right = list(described["dflash_config"]["target_layer_ids"])
    described["dflash_config"]["target_layer_ids"] = [layer + 1 for layer in right]
    (broken / "config.json").write_text(json.dumps(described))
    with pytest.raises(Differs, match="logits differ"):
        same_logits(bench, "zlab", name="off", ours="plain")


def test_other_rounds_are_noticed_unless_a_near_tie_explains_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def engine(_: Bench, *__: object, prompts: list[list[int]], max_new_tokens: int, **___: object) -> Path:
        ids = [one.ids for one in bench.verifier.generate(prompts, max_new_tokens=max_new_tokens)]
        counts = {"drafts": [1] * len(prompts), "accepted": [0] * len(prompts)}
        (tmp_path / "vllm.json").write_text(json.dumps({"ids": ids} | counts))
        return tmp_path

    monkeypatch.setattr(Bench, "ask", engine)
    monkeypatch.setattr(interop, "vllm_python", lambda: Path("python"))
    with pytest.raises(Differs, match=r"prompt 0: 0 tokens of 1 drafts accepted, \d+ of \d+ in replay"):
        monkeypatch.setattr(interop, "NEAR_TIE", 0.0)
        same_rounds(bench)
    with pytest.raises(Differs, match=r"nothing to compare: \d+ prompts, \d+ of them with near-ties"):
        monkeypatch.setattr(interop, "NEAR_TIE", float("inf"))
        same_rounds(bench)


def test_a_mistake_in_one_check_and_nothing_to_compare_fail_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Bench) -> str:
        raise KeyError("drafts")

    monkeypatch.setitem(interop.CHECKS, "zlab", (*interop.CHECKS["zlab"][:2], broken))
    monkeypatch.setattr(interop, "answered", lambda *_, **__: [])
    drafter = SimpleNamespace(config=SimpleNamespace(target_layer_ids=[1]))
    bench = SimpleNamespace(drafter=lambda _: drafter, verifier=None, prompts=[])
    first, second = run(cast(Bench, bench), ["zlab", "vllm"])
    assert (first.passed, first.said) == (False, "KeyError: 'drafts'")
    assert second.passed is False
    assert "nothing to compare" in second.said
