"""Trainers of other projects beside ours: an environment for them, one case for all, and each as a process of its own.

Knows nothing of timing and nothing of what is compared. Used by benchmarks/training.py and interop.py, and tests.

B batch, T tokens, F features, A anchors
"""

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from dflash.drafter.export import save_drafter
from dflash.drafter.model import Drafter
from dflash.drafter.shape import DrafterConfig

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "peers.txt"
READERS = HERE / "interop.txt"
ENGINES = HERE / "vllm.txt"
BUILT_FOR_GPUS = ("torchvision", "torchaudio", "torchcodec")  # by the index: with torch for CPUs they do not load
MINUTES = 15  # that pip may take


class Unavailable(Exception):
    """An environment cannot be built here; says why."""


def peers_python() -> Path:
    """The interpreter of the peers' environment, built at the first call (seconds: it sees the packages of this one).

    It lies inside this environment, whose packages it borrows, and is rebuilt when the requirements change.
    """
    return _built("peers", REQUIREMENTS, "--no-deps", borrowing=True)


def readers_python() -> Path:
    """The same for projects that load exported drafters: z-lab's package is called as this one, so they are apart."""
    return _built("interop", READERS, "--no-deps", borrowing=True)


def vllm_python() -> Path:
    """The same for vLLM, which brings all that it needs in versions of its own: minutes, and gigabytes."""
    return _built("vllm", ENGINES, borrowing=False, without=BUILT_FOR_GPUS)


def is_built(requirements: Path = ENGINES, name: str = "vllm") -> bool:
    """Whether an environment is there already, as it is required now."""
    mark = Path(sys.prefix) / name / "installed.txt"
    return mark.exists() and mark.read_text() == requirements.read_text()


def _built(name: str, requirements: Path, *options: str, borrowing: bool, without: Sequence[str] = ()) -> Path:
    folder = Path(sys.prefix) / name
    python, mark = folder / "bin" / "python", folder / "installed.txt"
    try:
        with FileLock(f"{folder}.lock"):
            if not is_built(requirements, name):
                _run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
                paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
                if borrowing:
                    Path(paths["purelib"], "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
                pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--python", python)
                _run(*pip, "install", "--quiet", "--ignore-installed", *options, "--requirement", requirements)
                if without:
                    _run(*pip, "uninstall", "--quiet", "--yes", *without)
                mark.write_text(requirements.read_text())
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written: {error}") from error
    return python


def _run(*command: object) -> None:
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60 * MINUTES)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took more than {MINUTES} minutes") from None
    if done.returncode:
        raise Unavailable(f"{command[0]} failed: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")


def write_case(
    folder: Path,
    shape: DrafterConfig,
    *,
    lengths: Sequence[int],
    prompt: int,
    anchors: Tensor | None = None,
    seed: int = 0,
    **settings: Any,
) -> None:
    """A random drafter, ends and batch into a folder. The first `prompt` tokens of each row are not supervised.

    `anchors` (B, A): the same blocks for everyone; None: each takes all that there are. `settings` are for
    benchmarks/trainers.py: dtype, device, threads, slot_weights, gamma, alpha, learning_rate.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T = len(lengths), max(lengths)
    lengths_B = torch.tensor(lengths)
    inside_BT = torch.arange(T) < lengths_B[:, None]
    loss_mask_BT = inside_BT & (torch.arange(T) >= prompt)
    F = len(shape.target_layer_ids) * shape.hidden_size
    save_drafter(folder, Drafter(shape, generator=generator))
    ends = {
        name: torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * 0.05
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    save_file(ends, folder / "ends.safetensors")
    batch = {
        "features": torch.randn(B, T, F, generator=generator) * inside_BT[..., None],
        "input_ids": torch.randint(shape.mask_token_id, (B, T), generator=generator) * inside_BT,
        "loss_mask": loss_mask_BT,
        "lengths": lengths_B,
        "anchors": _all_anchors(loss_mask_BT) if anchors is None else anchors,
    }
    save_file(batch, folder / "batch.safetensors")
    (folder / "case.json").write_text(json.dumps(settings | {"all_anchors": anchors is None}))


def _all_anchors(loss_mask_BT: Tensor) -> Tensor:
    """(B, A), -1 where a row has fewer than others."""
    rows = [(row_T[:-1] & row_T[1:]).nonzero()[:, 0] for row_T in loss_mask_BT]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


class Trainer:
    """A running trainer; it works only while it is asked for a step, so that several never work at once."""

    def __init__(self, name: str, folder: Path) -> None:
        python = Path(sys.executable) if name == "dflash" else peers_python()
        settings = json.loads((folder / "case.json").read_text())
        threads = {"OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1"}
        self.errors = (folder / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            [python, HERE / "trainers.py", name, folder],
            env=os.environ | threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.name = name
        self.memory = self._answer()

    def step(self, what: str = "step") -> dict[str, float]:
        """loss, norm, seconds, cpu_seconds, peak_mb (since it was loaded); of ours also parts of the cpu_seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            last = self.errors.read().strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"{self.name} ended with exit code {self.process.returncode}: {last[0]}")
        return dict(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()
