"""Champions: the drafter of each verifier that others have to beat, and how it came to be. Compares nothing.

$DFLASH_HOME/champions/<verifier identity>.json     who it is
$DFLASH_HOME/champions/<verifier identity>.jsonl    every promotion there was, oldest first
"""

import logging
import os
from datetime import datetime
from pathlib import Path

from filelock import FileLock
from pydantic import AwareDatetime, BaseModel, ConfigDict

from dflash.manifests import home, write_atomically

log = logging.getLogger(__name__)


class Champion(BaseModel):
    """The drafter to beat, by the key of its artifact, and the key of the report that made it so."""

    model_config = ConfigDict(frozen=True)
    drafter: str
    report: str
    reason: str
    promoted: AwareDatetime


class Overtaken(ValueError):
    """Another was promoted after the champion was read that a drafter was compared with."""


def _champions() -> Path:
    return home() / "champions"


def champion_of(verifier: str) -> Champion | None:
    """The champion of the verifier of that identity, or None. Raises ValueError where its file is damaged."""
    path = _champions() / f"{verifier}.json"
    try:
        return Champion.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{path}: unreadable ({str(error).splitlines()[0]}); write the last line of {path}l into it, or remove it "
            "and promote again"
        ) from None


def promote(
    verifier: str, *, drafter: str, report: str, reason: str, promoted: datetime, instead_of: Champion | None
) -> Champion:
    """Make a drafter the champion of a verifier (its identity), and log it; the same one again changes nothing.

    `instead_of` is the champion it was compared with, None where there was none. Raises Overtaken where another was
    promoted in the meantime: the verdict does not speak of that one.
    """
    new = Champion(drafter=drafter, report=report, reason=reason, promoted=promoted)
    folder = _champions()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{verifier}.lock"):
        current = champion_of(verifier)
        if current and (current.drafter, current.report) == (drafter, report):
            return current
        if current != instead_of:
            raise Overtaken(
                f"{folder / verifier}.json: the champion is {current.drafter if current else 'nobody'}, not "
                f"{instead_of.drafter if instead_of else 'nobody'} any more; compare {drafter} with it"
            )
        # the log first: where the alias is not written any more, its last line says what was meant
        with (folder / f"{verifier}.jsonl").open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            torn = file.read(1) not in (b"", b"\n")  # by a crash within a line
            file.write(b"\n" * torn + new.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        write_atomically(folder / f"{verifier}.json", new.model_dump_json(indent=1) + "\n")
    return new


def promotions(verifier: str) -> list[Champion]:
    """Every promotion, oldest first. Raises ValueError naming the line of the log that is damaged.

    A line without its end is of a promotion that a crash has prevented: it is left out, and logged.
    """
    path = _champions() / f"{verifier}.jsonl"
    found = []
    # not splitlines: JSON leaves some of its line ends in a reason as they are; and a crash may leave half a letter
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(Champion.model_validate_json(line))
        except ValueError as error:
            if not line.endswith(b"}"):
                log.warning("%s:%d: left out, as it has no end: nothing was promoted by it", path, number)
                continue
            raise ValueError(f"{path}:{number}: unreadable ({str(error).splitlines()[0]}); remove the line") from None
    return found
