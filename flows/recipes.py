"""Recipes: the deployments of prefect.yaml, read, changed by `--set`, and validated with errors a person can act on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from dflash.config import Recipe, Step

PREFECT_YAML = "prefect.yaml"
FLOW_PARAMETERS = ("recipe", "refresh")  # parameters of the flow beside the recipe's sections


def prefect_yaml() -> Path:
    """The project file: in the current folder, else beside the installed packages."""
    for folder in (Path.cwd(), Path(__file__).parent.parent):
        if (folder / PREFECT_YAML).is_file():
            return folder / PREFECT_YAML
    raise ValueError(f"no {PREFECT_YAML} here; run dflash in the project's folder")


def deployments(path: Path) -> dict[str, dict[str, Any]]:
    """Parameters of each pipeline deployment by recipe name."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    found = {}
    for deployment in content["deployments"]:
        if deployment["entrypoint"].endswith(":pipeline"):
            found[deployment["name"]] = deployment.get("parameters", {})
    return found


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe of prefect.yaml with `section.key=value` changes; raises ValueError with place and allowed values."""
    path = prefect_yaml()
    recipes = deployments(path)
    parameters = recipes.get(name.removeprefix("pipeline/"))
    if parameters is None:
        raise ValueError(f"{path.name}: no recipe {name!r}; choose from {', '.join(recipes)}")
    sections: dict[str, Any] = {key: value for key, value in parameters.items() if key not in FLOW_PARAMETERS}
    for change in changes:
        _apply(sections, change)
    try:
        return Recipe.model_validate(sections)
    except ValidationError as error:
        raise ValueError(f"recipe {name}: {explain(error)}") from None


def _apply(sections: dict[str, Any], change: str) -> None:
    place, equals, text = change.partition("=")
    section, dot, key = place.strip().partition(".")
    if not equals or not dot or not key:
        raise ValueError(f"--set {change}: write it as section.key=value, for example training.gamma=7")
    if section not in Recipe.model_fields:
        raise ValueError(f"--set {change}: no section {section!r}; choose from {', '.join(Recipe.model_fields)}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"--set {change}: {text!r} is not a value; quote texts with special characters") from None
    sections[section] = {**sections.get(section, {}), key: value}


def explain(error: ValidationError) -> str:
    """The first validation error in one line: where, what, and what is allowed."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        model: Any = Recipe
        for part in first["loc"][:-1]:  # fields, and numbers in lists
            model = model.model_fields[part].annotation if isinstance(part, str) else get_args(model)[0]
        assert issubclass(model, BaseModel)
        return f"{place}: unknown key; choose from {', '.join(model.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r}"
    return f"{place}: {message}{given}" if place else message


def check_steps(steps: Sequence[str]) -> list[Step]:
    """Step names as given to `--refresh`; raises ValueError naming the known ones."""
    for step in steps:
        if step not in get_args(Step):
            raise ValueError(f"--refresh {step}: no such stage; choose from {', '.join(get_args(Step))}")
    return list(steps)  # type: ignore[arg-type]
