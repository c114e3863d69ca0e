"""What there is to know about a chat template without rendering it. Jinja text in; knows no tokenizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
"""Names in a template that Transformers gives a value, so that no option may."""


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, around what the assistant says; a `Scope` in the parsed template."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache
def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


@dataclass(frozen=True, slots=True)
class Template:
    """Its Jinja text, the variables it reads that are not always given, and whether it has generation markers.

    `given` are those it reads of the ones that Transformers gives a value.
    """

    text: str
    variables: frozenset[str]
    given: frozenset[str]
    marked: bool


def read_template(text: str) -> Template:
    """Read a template's text. Raises ValueError where it is malformed."""
    try:
        parsed = _environment().parse(text)
        read = meta.find_undeclared_variables(parsed)  # raises for filters that there are not
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is malformed: line {error.lineno}: {error.message}; correct verifier.template, or the "
            "verifier's chat_template.jinja"
        ) from None
    variables = frozenset(read - GIVEN - set(_environment().globals) - _locals(parsed))
    return Template(text, variables, frozenset(read & GIVEN), parsed.find(nodes.Scope) is not None)


def check_templates(texts: Sequence[str], variables: Iterable[str]) -> None:
    """Raises ValueError for what can be told of a verifier's templates before it is loaded: see `read_template` and
    `check_variables`, and templates that are empty.
    """
    templates = [read_template(text) for text in texts]
    for template in templates:
        if "messages" not in template.given:
            raise ValueError(
                "the chat template is empty, or does not read the messages; correct verifier.template, or the "
                "verifier's chat_template.jinja"
            )
    check_variables(variables, templates)


def check_variables(variables: Iterable[str], templates: Sequence[Template]) -> None:
    """Raises ValueError for variables that none of the templates reads."""
    known = frozenset[str]().union(*(template.variables for template in templates))
    unknown = sorted(set(variables) - known)
    if unknown:
        settable = ", ".join(name for name in sorted(known) if not name.endswith("_token")) or "none"
        setting = "thinking" if unknown == ["enable_thinking"] else "template_options"
        raise ValueError(
            f"verifier.{setting}: the chat template does not read {', '.join(unknown)}; it knows: {settable} "
            "(verifier.thinking sets enable_thinking)"
        )


def _locals(parsed: nodes.Template) -> set[str]:
    """Names that the template sets before it reads them: Jinja counts those as read where a branch sets them."""
    first: dict[str, str] = {}
    for node in parsed.find_all((nodes.Assign, nodes.Name)):
        # the value of an assignment is read before its target is set
        inside = nodes.Output([node.node]) if isinstance(node, nodes.Assign) else nodes.Output([node])
        for name in inside.find_all(nodes.Name):
            first.setdefault(name.name, name.ctx)
    return {name for name, use in first.items() if use == "store"}
