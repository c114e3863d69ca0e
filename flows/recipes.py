"""Recipes: the deployments of prefect.yaml, read, changed by `--set`, and validated with errors a person can act on."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from dflash.config import NightlyConfig, Recipe, Step

PREFECT_YAML = "prefect.yaml"
PIPELINE = "pipeline"
TRAINING = (PIPELINE, "train-drafter")  # the flows that make a drafter
FLOW_PARAMETERS = ("recipe", "refresh")  # of every flow, beside the recipe's sections
OWN_PARAMETERS: dict[str, dict[str, Any]] = {
    "evaluate": {"drafter": str},
    "nightly-evaluation": {"nightly": NightlyConfig},
}
"""Of a flow, beside those of every flow, with their types: known here so that nothing waits for Prefect."""


class Start(NamedTuple):
    """What is to be run: a flow (`FILE:FUNCTION`), with a recipe, parameters of its own and the tags of its run."""

    flow: str
    name: str
    recipe: Recipe
    own: Mapping[str, Any]
    tags: Sequence[str] = ()

    @property
    def trains(self) -> bool:
        return _flow_name(self.flow) in TRAINING


def prefect_yaml() -> Path:
    """The project file: in the current folder, else beside the installed packages."""
    for folder in (Path.cwd(), Path(__file__).parent.parent):
        if (folder / PREFECT_YAML).is_file():
            return folder / PREFECT_YAML
    raise ValueError(f"no {PREFECT_YAML} here; run dflash in the project's folder")


def registered(path: Path) -> dict[str, dict[str, Any]]:
    """Every deployment as it is written, by FLOW/NAME."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    return {f"{_flow_name(one['entrypoint'])}/{one['name']}": one for one in content["deployments"]}


def _flow_name(entrypoint: str) -> str:
    return str(entrypoint.rpartition(":")[2].replace("_", "-"))


def deployments(path: Path) -> dict[str, dict[str, Any]]:
    """The recipes: parameters of each pipeline deployment by name."""
    found = registered(path).items()
    return {key.partition("/")[2]: one.get("parameters", {}) for key, one in found if key.startswith(f"{PIPELINE}/")}


def load_recipe(name: str, changes: Sequence[str] = ()) -> Recipe:
    """A recipe of prefect.yaml with `section.key=value` changes; raises ValueError with place and allowed values."""
    return load(name, changes).recipe


def load(name: str, changes: Sequence[str] = ()) -> Start:
    """The pipeline of recipe NAME, or FLOW/NAME, with changes as for `load_recipe`, and `parameter=value` of a flow's
    own ones.
    """
    path = prefect_yaml()
    known = registered(path)
    deployment = known.get(name if "/" in name else f"{PIPELINE}/{name}") or _only_one(name, known)
    if deployment is None:
        flow = name.rpartition("/")[0]
        if others := [key for key in known if flow and key.startswith(f"{flow}/")]:
            raise ValueError(f"{path.name}: no deployment {name!r}; choose from {', '.join(others)}")
        flows = dict.fromkeys(f"{key.partition('/')[0]}/NAME" for key in known if not key.startswith(f"{PIPELINE}/"))
        raise ValueError(
            f"{path.name}: no recipe {name!r}; choose from {', '.join(deployments(path))}, or run a part of one as "
            f"{', '.join(flows)}"
        )
    own = OWN_PARAMETERS.get(_flow_name(deployment["entrypoint"]), {})
    given: dict[str, Any] = {k: v for k, v in deployment["parameters"].items() if k not in FLOW_PARAMETERS}
    for change in changes:
        _apply(given, change, own=own)
    try:
        recipe = Recipe.model_validate({section: value for section, value in given.items() if section not in own})
    except ValidationError as error:
        raise ValueError(f"recipe {name}: {explain(error)}") from None
    values = {}
    for key in own.keys() & given.keys():
        try:
            values[key] = TypeAdapter(own[key]).validate_python(given[key])
        except ValidationError as error:
            raise ValueError(f"{name}: {key}: {explain(error, own[key])}") from None
    return Start(deployment["entrypoint"], deployment["name"], recipe, values, deployment.get("tags", ()))


def _only_one(name: str, known: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The deployment of that name where no recipe, and only one flow, has it."""
    found = [deployment for key, deployment in known.items() if key.endswith(f"/{name}")]
    return found[0] if len(found) == 1 and "/" not in name else None


def load_flow(entrypoint: str) -> Any:
    """The flow of FILE:FUNCTION, imported."""
    file, _, function = entrypoint.partition(":")
    return getattr(import_module(file.removesuffix(".py").replace("/", ".")), function)


def _apply(sections: dict[str, Any], change: str, *, own: Mapping[str, Any]) -> None:
    """Change one value, however deep; what lies beside it stays. Sections are copied: recipes of a file share them."""
    place, equals, text = change.partition("=")
    section, *keys = place.strip().split(".")
    if equals and not keys and own.get(section) is str:
        sections[section] = text
        return
    if not equals or not keys or not all(keys):
        raise ValueError(f"--set {change}: write it as section.key=value, for example training.gamma=7")
    names = [*Recipe.model_fields, *(name for name, kind in own.items() if kind is not str)]
    if section not in names:
        raise ValueError(f"--set {change}: no section {section!r}; choose from {', '.join(names)}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ValueError(f"--set {change}: {text!r} is not a value; quote texts with special characters") from None
    held, path = sections, [section, *keys]
    for depth, name in enumerate(path[:-1], start=1):
        inner = {} if held.get(name) is None else held[name]
        if not isinstance(inner, dict):
            whole = ".".join(path[:depth])
            raise ValueError(f"--set {change}: {whole} is no section; set it as a whole, {whole}=VALUE")
        held[name] = dict(inner)
        held = held[name]
    held[path[-1]] = value


def explain(error: ValidationError, of: Any = Recipe) -> str:
    """The first validation error in one line: where, what, and what is allowed. `of`: what was to be made."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        model = of
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
