"""Help texts: options under headings, and examples as commands to type."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from npusim.errors import SpecError

#: Heading of options that name no heading.
_OTHERS = "Options"
#: A number of characters that no summary reaches.
_WHOLE = 1000
#: Of a short help: number of lines of a screen, number of examples, and width of the options' names.
_SCREEN, _SHORT_EXAMPLES, _SHORT_NAMES = 25, 2, 33
#: Heading of the options that `npusim help problem` describes.
PROBLEM = "Problem"
Function = TypeVar("Function", bound="Callable[..., Any]")


class Formatter(Protocol):
    """The methods of a help formatter that verbs use: they write text, lists of names with texts, and sections."""

    width: int

    def write(self, string: str) -> None:
        """Write text unchanged."""

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names with their texts, in two columns."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Return a context that indents the lines below a heading."""


def examples(*commands: tuple[str, str]) -> str:
    """Return the closing lines of a help text: commands with their purposes."""
    width = max(len(command) for command, _ in commands)
    return "\n".join(["Examples:", *(f"  {c:<{width}}   # {what}" for c, what in commands)])


def _brief(text: str, most: int) -> str:
    """Return the first sentence of an option's help; for a long one, the clauses that fit into ``most`` characters."""
    sentence = re.split(r"(?<=[^.]{3})\.(?=\s|$)|;|  \[", text, maxsplit=1)[0].rstrip(".")
    ends = [m.start() for m in re.finditer(r"[,:](?=\s)| \(|$", sentence)]
    fitting = [
        sentence[:end] for end in ends if end <= most and sentence.count("(", 0, end) == sentence.count(")", 0, end)
    ]
    return fitting[-1] if fitting else sentence


def text_of(function: Callable[..., Any]) -> str | None:
    """Return a verb's docstring, from its source if Python runs without docstrings (``-OO``)."""
    if function.__doc__ is not None:
        return function.__doc__
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return ast.get_docstring(tree)  # type: ignore[arg-type]


def _indented(text: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def write_examples(epilog: str | None, formatter: Formatter, most: int | None = None) -> None:
    """Write the first ``most`` examples of an epilog, or all of them; a command that is too wide continues on the next
    line.
    """
    if not epilog:
        return
    formatter.write("\n")
    for line in epilog.split("\n")[: None if most is None else most + 1]:
        typed, mark, what = line.partition("   # ")
        if mark and len(line) > formatter.width:
            typed = typed.rstrip()
            if len(typed) > formatter.width:
                at = typed.rindex(" ", 0, formatter.width - 1)
                typed = f"{typed[:at]} \\\n     {typed[at:]}"
            formatter.write(f"{typed}\n      # {what}\n")
        else:
            formatter.write(f"{line}\n")


def _where_given(process: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Return the function that processes an option's value if this is not None; no adapter of its type is built."""
    return lambda ctx, value: None if value is None else process(ctx, value)


class Command(TyperCommand):
    """A verb whose options are listed under the headings that they name (``rich_help_panel``); their values must not be
    empty.

    ``first``: names of the options in the short help, if it does not show all.  ``describes_problem``: whether the long
    help describes the options of a problem; one verb describes them for all verbs, and the others name them.
    """

    first: tuple[str, ...] = ()
    describes_problem = False

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        for param in self.params:
            if not param.required and not param.multiple and param.nargs == 1 and param.callback is None:
                param.process_value = _where_given(param.process_value)  # type: ignore[method-assign, assignment]

    def short_help_text(self, ctx: typer.Context) -> str:
        """Return the first sentence, the most used options, two examples, and where the other options are shown."""
        formatter = ctx.make_formatter()
        self.format_usage(ctx, formatter)
        formatter.write(f"\n{_indented(self.get_short_help_str(_WHOLE).rstrip('.'), formatter.width)}.\n")
        params = self.get_params(ctx)
        named = {name: param for param in params for name in param.opts}
        arguments = [param for param in params if param.param_type_name == "argument"]
        options = [named[name] for name in self.first] or [p for p in params if p not in arguments]
        records = [param.get_help_record(ctx) for param in (*arguments, *options)]
        with formatter.section("Most used" if self.first else _OTHERS):
            shown = [record for record in records if record]
            rest = formatter.width - min(_SHORT_NAMES, max(len(name) for name, _ in shown)) - 4
            formatter.write_dl([(name, _brief(text, rest)) for name, text in shown], _SHORT_NAMES)
        write_examples(self.epilog, formatter, _SHORT_EXAMPLES)
        all_options = f"All {len(params) - len(arguments)} options" if self.first else "In full"
        formatter.write(f"\n{all_options}: {ctx.command_path} --help\n")
        return formatter.getvalue().rstrip("\n")

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the words; raise `SpecError` if a word, or the value after its ``=``, is empty.

        ``-h`` among them prints a help of at most a screen.
        """
        if "-h" in args and not ctx.resilient_parsing and len(self.get_help(ctx).splitlines()) > _SCREEN:
            typer.echo(self.short_help_text(ctx))
            ctx.exit()
        for before, word in pairwise(["", *args]):
            name, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
            if equals and not value.strip():
                what = name if name.startswith("-") else "an argument"
                raise SpecError(f"{what}: the value is empty; write one, or remove the option")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: typer.Context, formatter: Formatter) -> None:  # type: ignore[override]
        """Write arguments first, then the options of each heading; options without a heading are last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            heading = getattr(param, "rich_help_panel", None) or _OTHERS
            if (record := param.get_help_record(ctx)) is not None:
                is_argument = param.param_type_name == "argument"
                sections.setdefault("Arguments" if is_argument else heading, []).append(record)
        for title, rows in sorted(sections.items(), key=lambda section: section[0] == _OTHERS):
            if title == PROBLEM and not self.describes_problem:
                names = ", ".join(re.findall(r"--[a-z-]+", name.partition(" / ")[0])[-1] for name, _ in rows)
                with formatter.section(f"{PROBLEM} (npusim help problem)"):
                    formatter.write(_indented(names, formatter.width) + "\n")
            elif rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def problem_text(self, ctx: typer.Context) -> str:
        """Return the description of the options of a problem, as a table."""
        formatter = ctx.make_formatter()
        params = [p for p in self.get_params(ctx) if getattr(p, "rich_help_panel", None) == PROBLEM]
        with formatter.section("Each verb with a schedule has them"):
            formatter.write_dl([record for p in params if (record := p.get_help_record(ctx)) is not None])
        return formatter.getvalue().rstrip("\n")

    def format_epilog(self, ctx: typer.Context, formatter: Formatter) -> None:  # type: ignore[override]
        """Write commands to type; a comment follows its command, on the next line if both are too wide for one."""
        write_examples(self.epilog, formatter)


class Verbs(typer.Typer):
    """Verbs of the command line: the verbs of one file, or of a named group."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, **options})

    def verb(
        self, name: str, *commands: tuple[str, str], after: str = "", first: str = "", describes_problem: bool = False
    ) -> Callable[[Function], Function]:
        """Make a function a verb; its help ends with examples (`examples`) and ``after``.

        ``first``: the options, with spaces between them, that ``-h`` shows; without it, ``-h`` shows all.
        ``describes_problem``: as in `Command`.
        """
        epilog = examples(*commands) + after
        # Each verb has its own class, because `typer` passes no further arguments to a command's class.
        kind = type("Command", (Command,), {"first": tuple(first.split()), "describes_problem": describes_problem})
        return lambda verb: self.command(name, cls=kind, help=text_of(verb), epilog=epilog)(verb)


class Group(TyperGroup):
    """A verb with verbs below it, each with its complete summary; examples are not wrapped."""

    def format_commands(self, ctx: typer.Context, formatter: Formatter) -> None:  # type: ignore[override]
        """Write each verb's first sentence; a long one is wrapped, never cut."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(_WHOLE)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    format_epilog = Command.format_epilog  # type: ignore[assignment]
