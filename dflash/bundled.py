"""Names such as `bundled:gsm8k-train`: the small verifier and the prompt samples that come with the package."""

from pathlib import Path

PREFIX = "bundled:"
ASSETS = Path(__file__).parent / "assets"
BUNDLED = {
    "demo-verifier": ASSETS / "demo_verifier",
    "gsm8k-train": ASSETS / "prompts" / "gsm8k_train.jsonl",
    "evaluation": ASSETS / "prompts" / "evaluation.jsonl",
}


def resolve(name: str) -> Path:
    """The path behind a bundled name; any other name is a path already. Raises ValueError for an unknown one."""
    if not name.startswith(PREFIX):
        return Path(name).expanduser()
    try:
        return BUNDLED[name.removeprefix(PREFIX)]
    except KeyError:
        choices = ", ".join(f"{PREFIX}{known}" for known in BUNDLED)
        raise ValueError(f"{name!r} is not bundled; choose from {choices}") from None
