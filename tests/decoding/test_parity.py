"""The parity gate: a sound export passes, and each deliberate defect of an export is named."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_small import LAYERS, VOCAB, make_ends, make_prompts, make_row, make_verifier
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.bundled import resolve
from dflash.config import VerifierConfig
from dflash.decoding.parity import REFERENCE, Parity, answer, ask, check, remember
from dflash.drafter.export import save_drafter
from dflash.drafter.model import Context, Drafter, DrafterConfig, Ends
from dflash.hidden.store import RowStates
from dflash.pinning import PinnedVerifier, pin
from dflash.verifier import Verifier


class Gate:
    """A verifier on disk, a drafter in memory with an export of it, and rows that both know."""

    def __init__(self, folder: Path) -> None:
        self.verifier: Verifier = make_verifier(seed=2)
        self.verifier.model.save_pretrained(folder / "verifier")
        for file in resolve("bundled:demo-verifier").glob("*token*"):
            shutil.copy(file, folder / "verifier")
        self.pinned: PinnedVerifier = pin(VerifierConfig(model=str(folder / "verifier"), dtype="float32", device="cpu"))
        config = DrafterConfig.from_verifier(
            self.verifier.model.config.to_dict(),
            block_size=6,
            num_layers=2,
            mask_token_id=VOCAB - 1,
            target_layer_ids=list(LAYERS),
            sliding_window=8,
        )
        self.drafter = self.louder(Drafter(config))
        self.ends = make_ends(self.verifier)
        prompts = [prompt for prompt in make_prompts(12, seed=2) if len(prompt) > 2]
        answers = self.verifier.generate(prompts, max_new_tokens=24)
        self.rows = [make_row(self.verifier, prompt, one.ids) for prompt, one in zip(prompts, answers, strict=True)]

    @staticmethod
    def louder(drafter: Drafter) -> Drafter:
        """Of weights so large that everything that is fed to it shows."""
        generator = torch.Generator().manual_seed(1)
        for parameter in drafter.parameters():
            parameter.data = (
                parameter * 8 if parameter.ndim == 2 else 1 + torch.rand(parameter.shape, generator=generator)
            )
        return drafter.eval().requires_grad_(False)

    def request(self, folder: Path, **changes: Any) -> Path:
        """Of the drafter as it was trained, in so far as `changes` do not say otherwise; a sound export beside it."""
        trained: dict[str, Any] = {"drafter": self.drafter, "ends": self.ends, "rows": self.rows} | changes
        (folder / "exported").mkdir()
        save_drafter(folder / "exported", self.drafter)
        remember(folder / REFERENCE, storage_dtype="float32", **trained)
        ask(
            folder / "request.json",
            folder / "exported",
            reference=folder / REFERENCE,
            verifier=self.pinned,
            budget=16,
        )
        return folder / "request.json"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("parity"))


def test_a_sound_export_passes_in_a_process_of_its_own(gate: Gate, tmp_path: Path) -> None:
    parity = check(gate.request(tmp_path))
    assert parity.agreement == 1
    assert parity.compared > 500
    assert parity.rounds > 100
    assert not parity.defect


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({name: change(name, weight) for name, weight in load_file(path).items()}, path)


DEFECTS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "taps one layer too deep": (
        "taps",
        r"must be \[1, 3\], not \[2, 4\]",
        lambda at: settings(at, dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [2, 4]}),
    ),
    "taps in reverse order": (
        "taps",
        r"must be \[1, 3\], not \[3, 1\]",
        lambda at: settings(at, dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [3, 1]}),
    ),
    "another mask token": (
        "mask token",
        "must be 60, not 5",
        lambda at: settings(at, dflash_config={"mask_token_id": 5, "target_layer_ids": list(LAYERS)}),
    ),
    "another theta": (
        "RoPE",
        r"'rope_theta': 10000.0.*not .*'rope_theta': 100.0",
        lambda at: settings(at, rope_theta=100.0, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
    "no window": (
        "mask",
        "window of 8",
        lambda at: settings(at, layer_types=["full_attention"] * 2, sliding_window=None),
    ),
    "another epsilon": ("norm", "rms_norm_eps must be 1e-06, not 0.7", lambda at: settings(at, rms_norm_eps=0.7)),
    "norms less one": (
        "norm",
        "weights of norms are [+]1",
        lambda at: weights(at, lambda _, weight: weight - 1 if weight.ndim == 1 else weight),
    ),
    "other weights": (
        "unknown",
        "closest, with",
        lambda at: weights(at, lambda name, weight: -weight if "gate_proj" in name else weight),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_of_an_exported_folder_is_named(gate: Gate, tmp_path: Path, name: str) -> None:
    defect, explanation, spoil = DEFECTS[name]
    request = gate.request(tmp_path)
    spoil(tmp_path / "exported")
    expect(answer(request), defect, explanation)


def expect(parity: Parity, defect: str, explanation: str) -> None:
    assert parity.defect == defect
    assert parity.agreement < 0.99
    assert re.search(explanation, parity.explanation)


class Ahead(Drafter):
    """Trained with blocks a position too far."""

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        return super().draft(ends, anchor_ids_A, anchors_A=anchors_A + 1, context=replace(context, start=1))


class Beyond(Drafter):
    """Trained with blocks that see their anchor's features."""

    def draft(self, ends: Ends, anchor_ids_A: Tensor, *, anchors_A: Tensor, context: Context) -> Tensor:
        return super().draft(ends, anchor_ids_A, anchors_A=anchors_A, context=replace(context, start=-1))


@pytest.mark.parametrize(
    ("kind", "defect", "explanation"),
    [(Ahead, "positions", r"\+1 token"), (Beyond, "mask", "anchor's own features")],
)
def test_a_training_that_put_blocks_elsewhere_is_named(
    gate: Gate, tmp_path: Path, kind: type[Drafter], defect: str, explanation: str
) -> None:
    other = kind(gate.drafter.config)
    other.load_state_dict(gate.drafter.state_dict())
    longest = max(gate.rows, key=lambda row: len(row.input_ids_T))
    expect(answer(gate.request(tmp_path, drafter=other, rows=[longest])), defect, explanation)


def test_a_training_with_another_head_is_named(gate: Gate, tmp_path: Path) -> None:
    tied = copy.copy(gate.ends)
    tied.head_VH = gate.ends.embedding_VH
    expect(answer(gate.request(tmp_path, ends=tied)), "head", "embedding was the head")


def test_a_training_on_normed_taps_is_named(gate: Gate, tmp_path: Path) -> None:
    def normed(row: RowStates) -> RowStates:
        taps_THK = row.features_TF.unflatten(-1, (len(LAYERS), -1))
        return row._replace(features_TF=gate.verifier.decoder.norm(taps_THK).flatten(-2))

    expect(answer(gate.request(tmp_path, rows=[normed(row) for row in gate.rows])), "norm", "final norm")


def test_a_process_that_does_not_end_is_not_waited_for(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.decoding.parity.SECONDS", 0.01)
    with pytest.raises(ValueError, match=r"parity: another process took more than 0\.01 s to load .*exported"):
        check(gate.request(tmp_path))


def test_the_gate_says_in_one_line_what_is_wrong(gate: Gate, tmp_path: Path) -> None:
    request = gate.request(tmp_path)
    settings(tmp_path / "exported", dflash_config={"mask_token_id": 5, "target_layer_ids": list(LAYERS)})
    with pytest.raises(
        ValueError, match=r"parity: .*exported drafts .*%.* as in training; mask token: .*60, not 5"
    ) as error:
        check(request)
    assert "\n" not in str(error.value)
    (tmp_path / "exported" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"parity: .*another process: ValueError: .*model.safetensors is missing"):
        check(request)
