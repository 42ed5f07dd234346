"""The only place that prints: tables and JSON to stdout, progress and errors to stderr.

Colour is used only on a terminal, and not if ``NO_COLOR`` is set; the words are the same.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType

import typer

from npusim.report.text import Block, folded, lines, markdown, to_json
from npusim.sanitize import visible
from npusim.units import format_duration

#: Seconds after which work without news reports progress, if there is no terminal.
QUIET_S = 10.0
#: For output that is not a terminal: seconds until a search's first line, between lines with news, between lines
#: without news, and between checks for news.
FIRST_LINE_S, LINE_S, TICK_S = 2.0, 5.0, 0.5
#: Seconds after which the finished share of the work allows an estimate of the remaining time.
LEFT_S = 5.0
_STYLES = MappingProxyType(
    {"": "", "title": "bold", "label": "cyan", "good": "green", "warn": "yellow", "bad": "bold red", "dim": "dim"}
)


def show(blocks: Iterable[Block]) -> None:
    """Print a table: in colour on a terminal, as plain text elsewhere.

    The message is wrapped to a terminal's width, and to ``COLUMNS`` if that is set; lines in a file are not wrapped.
    """
    show_lines([(text, _STYLES[style]) for text, style in line] for line in lines(blocks, terminal_width()))


def show_lines(rows: Iterable[Iterable[tuple[str, str]]]) -> None:
    """Print lines of pieces of text, each with a style of rich's, which only a terminal shows."""
    if not _is_coloured():
        for row in rows:
            typer.echo("".join(text for text, _ in row).rstrip())
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for row in rows:
        # The terminal wraps lines that are still too long, so that a copied command is one line.
        console.print(Text.assemble(*row), soft_wrap=True)


def show_markdown(blocks: Iterable[Block]) -> None:
    """Print a table as Markdown."""
    typer.echo(markdown(blocks), nl=False)


def show_either(
    as_json: bool, document: Callable[[], Mapping[str, object]], table: Callable[[], Iterable[Block]]
) -> None:
    """Print a verb's result as JSON or as a table; only the printed form is computed."""
    if as_json:
        show_json(document())
    else:
        show(table())


def show_json(document: Mapping[str, object]) -> None:
    """Print a document as JSON."""
    typer.echo(to_json(document), nl=False)


def say(message: str) -> None:
    """Print a message to stderr: wrapped to the width of a terminal, otherwise on one line, for programs."""
    text, width = visible(message), _message_width()
    typer.echo(text if width is None else folded(text, width), err=True)


def write(file: Path, content: str | bytes, note: str = "") -> None:
    """Write a file, completely or not at all, and print its name; raise `OutputError` if the file cannot be written."""
    from npusim.report.output import write_whole

    write_whole(file, content.encode() if isinstance(content, str) else content)
    say(f"wrote {file}{note}")


@contextmanager
def progress(message: str) -> Iterator[Callable[..., None]]:
    """Yield ``advance(done, total, note, left_s)``: a bar on stderr if that is a terminal, otherwise a line from time
    to time.

    Both state the remaining time: ``left_s``, or an estimate from the elapsed time and the finished share. Lines are
    printed at regular intervals; without news they state the elapsed seconds. Work without a note prints nothing before
    `QUIET_S`.  Nothing is printed to stdout.
    """
    start = time.monotonic()

    def left(done: int, total: int, left_s: float | None) -> str:
        return _time_left(done, total, time.monotonic() - start, left_s)

    if not sys.stderr.isatty():
        latest, is_over = list[str](), threading.Event()

        def print_lines() -> None:
            wait, last = FIRST_LINE_S, f"npusim: {message}"
            while not is_over.wait(wait):
                line, seconds, wait = latest.pop() if latest else last, time.monotonic() - start, TICK_S
                if line != last or seconds >= QUIET_S:
                    say(line if line != last else f"{line}{_so_far(seconds)}")
                    wait, last = LINE_S, line

        def line(done: int, total: int, note: str = "", left_s: float | None = None) -> None:
            if note or time.monotonic() - start >= QUIET_S:
                words = (f"{done:,} of {total:,}", left(done, total, left_s), note)
                latest[:] = [f"npusim: {message}: {', '.join(filter(None, words))}"]

        threading.Thread(target=print_lines, daemon=True).start()
        try:
            yield line
        finally:
            is_over.set()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(message, total=None, note="")

        def move(done: int, total: int, note: str = "", left_s: float | None = None) -> None:
            words = ", ".join(filter(None, (left(done, total, left_s), note)))
            bar.update(task, completed=done, total=total, note=words)

        yield move


@contextmanager
def late_progress(message: str) -> Iterator[Callable[..., None]]:
    """Like `progress`, but its thread starts only with the first news, because a process can fork only while it has no
    other thread.
    """
    with ExitStack() as stack:
        begun = cache(lambda: stack.enter_context(progress(message)))

        def advance(*news: object) -> None:
            begun()(*news)

        yield advance


def _time_left(done: int, total: int, seconds: float, left_s: float | None) -> str:
    """Return the time left in words; empty within the first seconds, when an estimate is unreliable, and at the end."""
    if left_s is None:
        if not 0 < done < total or seconds < LEFT_S:
            return ""
        left_s = seconds * (total - done) / done
    return f"about {format_duration(left_s) if left_s >= 300 else f'{left_s:,.0f} s'} left"


def _so_far(seconds: float) -> str:
    return f": {seconds:.0f} s so far"


@contextmanager
def said_late(message: str) -> Iterator[Callable[..., object]]:
    """Print a message after `FIRST_LINE_S`, and then every `LINE_S` with the elapsed seconds.

    Yield a function that ends this message, or replaces it if called with another message. The process waits with a
    timer and not with a thread, because a process with a single thread can fork.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield lambda *_: None
        return
    start, messages = time.monotonic(), [message]

    def print_line(*_: object) -> None:
        seconds = time.monotonic() - start
        with suppress(RuntimeError):  # the timer may interrupt another line
            say(f"npusim: {messages[-1]}{_so_far(seconds) if seconds > FIRST_LINE_S + LINE_S / 2 else ''}")

    def go_on(other: str = "") -> None:
        if other:
            messages.append(other)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, print_line)
    signal.setitimer(signal.ITIMER_REAL, FIRST_LINE_S, LINE_S)
    try:
        yield go_on
    finally:
        go_on()
        signal.signal(signal.SIGALRM, before)


def in_percent(
    advance: Callable[..., None], go_on: Callable[..., object] = bool, then: str = ""
) -> Callable[[float], None]:
    """Return a function that receives the finished share, 0 to 1, and calls the function of `progress`.

    ``go_on``: the function that `said_late` yields; while the share is 0, it is called with ``then``; as soon as the
    share is larger, the message ends.
    """

    def told(share: float) -> None:
        if share:
            go_on()
            advance(round(share * 100), 100)
        else:
            go_on(then)

    return told


def terminal_width() -> int | None:
    """Return the columns of the terminal, or those of ``COLUMNS``; None for a file."""
    if os.environ.get("COLUMNS", "").isdecimal() or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def _message_width() -> int | None:
    """Return the columns of the terminal to which messages go; None for a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def _is_coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
