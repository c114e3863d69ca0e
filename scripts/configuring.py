"""Write docs/configuring.md from dflash/config.py: `python scripts/configuring.py`. A test says when it is stale."""

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dflash.config import Config, NightlyConfig, Recipe

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuring.md"
LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
HEAD = """# Configuring

Written by `python scripts/configuring.py` from `dflash/config.py`, where every setting has its default and its meaning.

A recipe (in `prefect.yaml`) names what differs from the defaults. `--set` changes settings for one
run, or one plan:

```
dflash plan demo --set training.epochs=3 --set 'evaluation.budgets=[16, 64]' --set training.shape.head_dim=64
```

Each changes one value, at any depth; the others of its section stay as in the recipe. In the UI the same settings are
the fields of a deployment's form. A value that is not allowed, and a name that is not here, is refused before anything
runs.

The column *key* says whether a setting decides what comes out, and so is part of the key under which the stage's result
is kept. Where it says "no", another value changes how work is done or watched, never the ids or weights: what was made
before is found again. Where it says "yes", another value is another result: the stage runs, and those after it. (A
verifier is known by a hash of its files, so another name for the same files is the same verifier.)
"""


def type_name(annotation: Any) -> str:
    """As a person writes it: `one of a, b`, `list of int`."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" if value != "" else "empty" for value in arguments)
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"{type_name(arguments[0])} → {type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {str: "text", int: "int", float: "number", bool: "true or false"}
    return names.get(annotation, "any JSON value")


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "*needed*"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its own"
    if value in ("", [], {}):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def limits_of(field: FieldInfo) -> str:
    said = []
    for rule in field.metadata:
        said += [f"{sign} {value}" for name, sign in LIMITS.items() if (value := getattr(rule, name, None)) is not None]
        if least := getattr(rule, "min_length", None):
            said.append("not empty" if least == 1 else f"at least {least}")
        if pattern := getattr(rule, "pattern", None):
            said.append(f"`{pattern}`".replace("|", "\\|"))
    return ", ".join(said)


def in_key(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("identity") is False)


def section(model: type[BaseModel], title: str) -> str:
    rows = [
        f"| `{name}` | {field.title} | {type_name(field.annotation)} | {default_of(field)} | {limits_of(field)} "
        f"| {'yes' if in_key(field) else 'no'} | {field.description} |"
        for name, field in model.model_fields.items()
    ]
    header = "| name | in the form | value | default | limits | key | meaning |\n|---|---|---|---|---|---|---|"
    return "\n".join([title, "", model.__doc__ or "", "", header, *rows, ""])


def document() -> str:
    """The whole text, in the order of the pipeline; models that settings are made of come last."""
    return "\n".join([HEAD, *(section(model, f"## {name}") for name, model in models().items())])


def models() -> dict[str, type[BaseModel]]:
    """Sections of a recipe, and of the nightly evaluation, by their names; then what is nested in them, by classes."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Recipe.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation
    found["nightly"] = NightlyConfig  # of its flow alone
    for model in list(found.values()):
        for field in model.model_fields.values():
            for part in (field.annotation, *get_args(field.annotation)):
                if isinstance(part, type) and issubclass(part, Config):
                    found[part.__name__] = part
    return found


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    print(DOCUMENT)
