"""Help texts: options under headings, and examples printed as they are to be typed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from npusim.errors import SpecError

#: Heading of options that name none.
_OTHERS = "Options"
#: Longer than any summary.
_WHOLE = 1000
Function = TypeVar("Function", bound="Callable[..., Any]")


def examples(*commands: tuple[str, str]) -> str:
    """Return the closing lines of a help text: commands with their purposes."""
    width = max(len(command) for command, _ in commands)
    return "\n".join(["Examples:", *(f"  {c:<{width}}   # {what}" for c, what in commands)])


def text_of(function: Callable[..., Any]) -> str | None:
    """Return a verb's docstring, from its source where Python runs without docstrings (``-OO``)."""
    if function.__doc__ is not None:
        return function.__doc__
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return ast.get_docstring(tree)  # type: ignore[arg-type]


class Command(TyperCommand):
    """A verb whose options stand under the headings (``rich_help_panel``) they name; no value of theirs is empty."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the words; raise `SpecError` where one of them, or the value behind its ``=``, is empty."""
        for before, word in pairwise(["", *args]):
            name, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
            if equals and not value.strip():
                what = name if name.startswith("-") else "an argument"
                raise SpecError(f"{what}: the value is empty; leave it out, or give one")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write arguments first, then each heading's options, those without a heading last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            heading = getattr(param, "rich_help_panel", None) or _OTHERS
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                sections.setdefault("Arguments" if is_argument else heading, []).append(record)
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == _OTHERS):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write commands as they are typed; a comment goes below its command where both are too wide for a line."""
        if not self.epilog:
            return
        formatter.write("\n")
        for line in self.epilog.split("\n"):
            typed, mark, what = line.partition("   # ")
            if mark and len(line) > formatter.width:
                formatter.write(f"{typed.rstrip()}\n      # {what}\n")
            else:
                formatter.write(f"{line}\n")


class Verbs(typer.Typer):
    """Verbs of the command line: the verbs of one file, or of a group with its own name."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def verb(self, name: str, *commands: tuple[str, str], after: str = "") -> Callable[[Function], Function]:
        """Make a function a verb; below its options stand examples (`examples`), and ``after``."""
        epilog = examples(*commands) + after
        return lambda verb: self.command(name, cls=Command, help=text_of(verb), epilog=epilog)(verb)


class Group(TyperGroup):
    """A verb with verbs of its own, each with its whole summary; examples as they are."""

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Write each verb's first sentence, wrapped where it is long, never cut."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(_WHOLE)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    format_epilog = Command.format_epilog  # type: ignore[assignment]
