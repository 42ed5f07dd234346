"""The command line's root: verbs, version, and one place where errors become exit codes.

0: success; 1: a check failed; 2: bad input, reported on stderr as ``npusim: error: ...``; 130: Ctrl-C.
"""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast

import typer
from typer.main import get_command_from_info, get_group_from_info
from typer.models import TyperInfo

from npusim import __version__
from npusim.cli import options as o
from npusim.cli.console import say
from npusim.cli.help import Formatter, Group, Verbs, examples, write_examples
from npusim.errors import CheckFailedError, ContradictionError, NpusimError

INTERRUPTED = 130
#: The file of each verb that shares a file, or that belongs to a group or a guide; every other verb has its own file.
FILES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("check", "validate", "diff", "invariant"), "check_commands"),
        **dict.fromkeys(("import", "calibrate", "export"), "measure_commands"),
        **dict.fromkeys(("help", "new"), "guide"),
        "report": "compare_command",
        "workload": "hw_command",
    }
)
#: Examples of the short help.
_SHORT_EXAMPLES = 4


#: The verbs with one line of at most 80 columns each, in the groups and in the order of the help text.
VERBS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "Predict": {
            "run": "bits and cycles of one schedule on one device",
            "stress": "inputs on which a schedule is furthest from float64",
            "warm": "compile all kernels ahead of the first run",
        },
        "Compare and explain": {
            "compare": "the difference of two or more runs, split into causes",
            "report": "runs as one HTML page",
            "diff": "a kernel's output against predicted bits",
            "invariant": "choices that change a call's bits, and the price of fixing them",
            "evaluate": "judge kernels: right or wrong, bits, time, trust",
            "check": "compare cycles and tiles with accepted ones (CI); check flags",
        },
        "Search and tune": {
            "explore": "the fastest tile, precision or schedule, with a proof",
            "tune": "a kernel's configurations, ranked by predicted time",
            "serve": "serve these verbs to programs that write kernels (MCP)",
        },
        "Your own kernel": {
            "new": "a schedule to start from",
            "record": "the Triton launches of an unedited program",
            "program": "the tile program: queues, rings and waits",
            "layout": "lanes and registers of a matrix instruction's operand",
            "format": "a number format: codes, scale rules, an example block",
        },
        "Your own hardware": {
            "hw": "devices: list, show, validate your own file",
            "probe": "probes that determine a chip's arithmetic, and their results",
            "import": "convert a profiler's kernel times to measurements",
            "validate": "predicted times against measured ones, bits against recorded",
            "calibrate": "fit a device's uncertain constants to measured times",
        },
        "Files and guides": {
            "help": "guides: choose a tile, guard CI, your own device, and more",
            "workload": "models: list, show, import a config.json",
            "export": "write predictions in the formats of other tools",
        },
    }
)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Print an error in an option or argument like all other errors, wrapped to the terminal's width, after the usage.

    Printing help because a verb is missing does not count as an error.
    """
    try:
        yield
    except typer.TyperException as error:
        if getattr(type(error), "show", None) is not typer.BadParameter.show:  # an error other than a usage error
            raise
        fault = cast("Any", error)
        if (ctx := fault.ctx) is not None:
            say(f"{ctx.get_usage()}\nTry '{ctx.command_path} -h' for help.\n")
        say(f"npusim: error: {_in_our_words(fault.format_message())}")
        sys.exit(fault.exit_code)


def _in_our_words(text: str) -> str:
    """Return a message of the command-line library without its type of error, and with the nearest allowed word."""
    text = text.replace("Value error, ", "")
    wrong = re.fullmatch(r".*'([^']*)' is not one of ('.*')\.", text, re.DOTALL)
    if wrong is None:
        return text
    from npusim.config.messages import suggest

    hint = suggest(wrong[1], re.findall(r"'([^']*)'", wrong[2]))
    return text.removesuffix(".") + hint if hint.startswith(".") else text


class _LateVerbs(Mapping[str, Any]):
    """The verbs by name, in the order of the help text; each file is imported when a verb of it is looked up.

    Loading the options of all verbs takes a twelfth of the CPU time of a short run.
    """

    def __init__(self) -> None:
        self.names, self.verbs = [name for verbs in VERBS.values() for name in verbs], dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if name not in self.verbs:
            self.verbs[name] = _verb(name)
        return self.verbs[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class _Root(Group):
    """Turns the errors of every verb into a message and an exit code."""

    def make_context(  # type: ignore[override]
        self, info_name: str | None, args: list[str], parent: typer.Context | None = None, **extra: object
    ) -> object:
        """Read the words before a verb."""
        with _usage_errors():
            return super().make_context(info_name, args, parent, **extra)

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.commands = _LateVerbs()  # type: ignore[assignment]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the words before a verb; ``-h`` among them prints the verbs by group, on one screen."""
        if args[:1] == ["-h"] and not ctx.resilient_parsing:
            formatter = ctx.make_formatter()
            self.format_usage(ctx, formatter)
            self.format_help_text(ctx, formatter)
            with formatter.section("Verbs"):
                formatter.write_dl([(title, ", ".join(verbs)) for title, verbs in VERBS.items()])
            write_examples(self.epilog, formatter, _SHORT_EXAMPLES)
            formatter.write("\nWhat each verb does: npusim --help; its options: npusim VERB -h\n")
            typer.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: typer.Context, formatter: Formatter) -> None:  # type: ignore[override]
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<9}", line) for name, line in verbs.items()])

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            with _usage_errors():
                return super().invoke(ctx)
        except CheckFailedError as error:
            say(f"npusim: {error}")
            code = 1
        except ContradictionError as error:
            say(f"npusim: error: a contradiction in npusim itself, or in a schedule or machine of your own: {error}")
            if (archive := ctx.params.get("save_report")) is not None:
                _save_report(archive, error)
            else:
                again = shlex.join(("npusim", "--save-report", "fault.zip", *sys.argv[1:]))
                say(f"npusim shows no result; this command saves the data for a bug report: {again}")
            code = 2
        except NpusimError as error:
            say(f"npusim: error: {error}")
            code = 2
        except ModuleNotFoundError as error:
            if error.name not in ("numba", "llvmlite"):
                raise
            say(f"npusim: error: {error.name} is not installed: install it, or use --no-numerics --method des")
            code = 2
        except MemoryError:
            say("npusim: error: not enough memory; use fewer --rows or --heads, --no-numerics, or fewer --jobs")
            code = 2
        except BrokenPipeError:
            raise
        except OSError as error:
            # Errors in files that a user names are `NpusimError`; others come from the computer: a full disk.
            file = f" ({error.filename})" if error.filename else ""
            say(f"npusim: error: {error.strerror or error}{file}")
            code = 2
        except KeyboardInterrupt:
            say("npusim: interrupted")
            code = INTERRUPTED
        sys.exit(code)


app = Verbs(
    name="npusim",
    cls=_Root,
    no_args_is_help=True,
    help="Predict, without the hardware, every bit and every cycle of attention on an NPU or GPU.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        ("npusim run flash", "FlashAttention on an Ascend 910B2, PanGu-38B, 4096 tokens"),
        ("npusim run flash --seq 8192 -t block_kv=256", "another length, another tile"),
        ("npusim compare @2 @1", "the changes between the last two runs"),
        ("npusim explore flash --field block_kv=128,256,512", "the fastest tile that fits"),
        ("npusim hw list", "the packaged devices"),
        ("npusim help", "guides: choose a tile, guard cycles in CI, read a trace"),
    ),
)


def _verb(name: str) -> Any:
    """Return the command of a verb, or the group of its verbs."""
    module = import_module(f"npusim.cli.{FILES.get(name, f'{name}_command')}")
    style: dict[str, Any] = {
        "pretty_exceptions_short": app.pretty_exceptions_short,
        "rich_markup_mode": app.rich_markup_mode,
    }
    for verbs in (value for value in vars(module).values() if isinstance(value, Verbs)):
        if verbs.info.name == name:
            return get_group_from_info(TyperInfo(verbs), suggest_commands=app.suggest_commands, **style)
        for verb in () if isinstance(verbs.info.name, str) else verbs.registered_commands:
            if verb.name == name:
                return get_command_from_info(verb, **style)
    raise AssertionError(f"{module.__name__} has no verb {name}")


def _save_report(archive: Path, error: ContradictionError) -> None:
    """Save the command, where it failed, the versions and every file that the command names, as a ZIP archive."""
    import platform
    from importlib.metadata import distributions
    from io import BytesIO
    from traceback import format_exception
    from zipfile import ZipFile

    from npusim.report.output import write_whole

    installed = sorted({f"{d.name}=={d.version}" for d in distributions()})
    named = {Path(part) for word in sys.argv[1:] for part in (word, word.partition("=")[2], word.rpartition(":")[0])}
    buffer = BytesIO()
    with ZipFile(buffer, "w") as zipped:
        zipped.writestr("command.txt", shlex.join(("npusim", *sys.argv[1:])))
        zipped.writestr("error.txt", "".join(format_exception(error)))
        zipped.writestr("versions.txt", "\n".join((platform.platform(), f"python {sys.version}", *installed)))
        for number, file in enumerate(sorted(f for f in named if f.is_file() and f != archive)):
            zipped.write(file, f"files/{number}-{file.name}")
    write_whole(archive, buffer.getvalue())
    say(f"wrote {archive}: the command, where it failed, versions, and the files that it names")


def _version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"npusim {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, o.option("--version", "Print the version.", callback=_version, is_eager=True)] = False,
    save_report: Annotated[
        Path | None,
        o.option(
            "--save-report FILE", "File (ZIP) for the data of a bug report, if npusim finds an internal contradiction."
        ),
    ] = None,
) -> None:
    """Read the options before a verb."""
