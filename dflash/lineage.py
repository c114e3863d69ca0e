"""What was made from what: all artifacts under the data root, as their manifests say. Reads nothing else."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dflash.corpus.chunks import CHUNKS
from dflash.manifests import DAMAGED_MANIFEST, MANIFEST, Manifest, home, load_manifest, manifests

MADE_FROM = ("hidden_states", "corpus", "conversations", "prompts")  # from a drafter up to its prompts


class Lineage:
    """All artifacts there are, and which was made from which."""

    def __init__(self, found: Sequence[Manifest]) -> None:
        self.manifests = list(found)
        self._named: dict[str, list[Manifest]] = {}  # by what others call it in their inputs
        for manifest in found:
            files = (record.sha256 for record in manifest.files.values()) if manifest.stage == "training" else ()
            for name in {manifest.key, manifest.identity, *files}:
                self._named.setdefault(name, []).append(manifest)

    def inputs(self, names: Iterable[str]) -> list[Manifest]:
        """The artifacts that are called so as inputs: by key, by content, or by a file of a drafter to start from."""
        return list({m.key: m for name in names for m in self._named.get(name, ())}.values())

    def used_by(self, manifest: Manifest) -> list[Manifest]:
        """The artifacts made from it."""
        return [one for one in self.manifests if manifest in self.inputs(one.inputs.values())]

    def ancestry(self, equal: list[Manifest]) -> Iterator[list[Manifest]]:
        """These, their hidden states, the corpus of those, and so on up to the prompts, or to what is gone.

        Artifacts of equal content are one step.
        """
        while equal:
            yield equal
            equal = self.inputs(one.inputs[name] for one in equal for name in MADE_FROM if name in one.inputs)

    def roots(self) -> list[Manifest]:
        """What nothing was made from, newest first: reports, mostly."""
        used = {one.key for manifest in self.manifests for one in self.inputs(manifest.inputs.values())}
        roots = [manifest for manifest in self.manifests if manifest.key not in used and not is_chunk(manifest)]
        return sorted(roots, key=lambda manifest: manifest.created, reverse=True)

    def chunks(self, conversations: Manifest) -> list[Manifest]:
        """The chunks of answers that conversations may be put together from: of the same questions to the verifier."""
        if conversations.stage != "generation" or "prompts" not in conversations.inputs:
            return []
        return [one for one in self.manifests if is_chunk(one) and _asking(one) == _asking(conversations)]

    def find(self, prefix: str) -> Manifest:
        """The artifact whose fingerprint, or its hash alone, begins so. Raises ValueError where not just one does."""
        found = [m for m in self.manifests if m.key.startswith(prefix) or m.key.rpartition("-")[2].startswith(prefix)]
        exact = [manifest for manifest in found if manifest.key == prefix]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            raise ValueError(f"{prefix}: several begin so; give more of {', '.join(sorted(m.key for m in found))}")
        raise ValueError(f"{prefix}: no artifact begins so under {home()}; dflash ls shows them")

    def drafter(self, name: str) -> Manifest:
        """Of a folder under the data root, or of a key as for `find`. Raises ValueError where it is no drafter."""
        path = Path(name).expanduser()
        if (path / MANIFEST).is_file():
            found = load_manifest(path)
            if found.path.resolve() != path.resolve():
                raise ValueError(
                    f"{path} is not {found.path}, where {found.key} of this data root lies; import it "
                    f"(dflash import {path}), or set DFLASH_HOME to the data root that it is in"
                )
        elif path.is_dir():
            raise ValueError(
                f"{path} holds no {MANIFEST}, so it was not trained here; import it first: dflash import {path}"
            )
        else:
            found = self.find(name)
        if found.stage != "training":
            raise ValueError(f"{name}: {found.key} is no drafter; dflash ls shows those that are there, as training-…")
        return found


def lineage(*, set_aside: bool = False) -> Lineage:
    """Of all artifacts under the data root, chunks of answers too, as far as their manifests can be read.

    With `set_aside` also of those that a check found damaged: their whole parts are still worth what they cost.
    """
    chunks = home() / CHUNKS
    found = [*manifests(), *_read(chunks.glob(f"*/{MANIFEST}"))]
    if set_aside:
        paths = [*(home() / "artifacts").glob(f"*/*/{DAMAGED_MANIFEST}"), *chunks.glob(f"*/{DAMAGED_MANIFEST}")]
        found += _read(path for path in paths if not path.with_name(MANIFEST).exists())
    return Lineage(found)


def _read(paths: Iterable[Path]) -> list[Manifest]:
    found = []
    for path in paths:
        try:
            found.append(Manifest.model_validate_json(path.read_bytes()))
        except (FileNotFoundError, ValueError):  # gone meanwhile, unreadable: whoever needs it says so
            continue
    return found


def is_chunk(manifest: Manifest) -> bool:
    return manifest.location.startswith(f"{CHUNKS}/")


def _asking(manifest: Manifest) -> tuple[object, ...]:
    config = {name: value for name, value in manifest.config.items() if name != "chunk"}
    inputs = {name: value for name, value in manifest.inputs.items() if name not in ("conversations", "prompts")}
    return manifest.recipe, config, inputs
