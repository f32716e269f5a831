"""Whether a chat template is Jinja at all, by parsing it alone: nothing in it is compiled or run.

The tags are those that transformers gives to templates beside Jinja's own.
"""

from __future__ import annotations

from typing import Final

MAX_TEMPLATE_CHARACTERS: Final = 1 << 20
"""Public ones have up to 20 thousand."""


def template_mistake(source: str) -> str | None:
    """What is wrong with a template's syntax, in one line, or None."""
    from jinja2 import Environment, TemplateSyntaxError  # lazily: few files that are opened have a template to judge
    from jinja2.ext import loopcontrols

    if len(source) > MAX_TEMPLATE_CHARACTERS:
        return f"{len(source):,} characters, expected at most {MAX_TEMPLATE_CHARACTERS:,}"
    try:
        Environment(extensions=[loopcontrols, _generation_tag()]).parse(source)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {' '.join(str(error.message).split())}"
    except RecursionError:
        return "nested too deep to be read"
    return None


def _generation_tag() -> type:
    """`{% generation %}`, which marks the assistant's words for training."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
