"""One call that judges kernels: whether they are right, whether their bits equal the reference's, how fast they are,
and whether to trust the time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np

from npusim.cache import package_stamp
from npusim.errors import NpusimError, OutputError, SpecError, one_line
from npusim.kernels.triton import is_launch, is_recorded, launch_parts
from npusim.kernels.triton.calls import call_of
from npusim.program.timing.timing_result import Limit
from npusim.simulation.ranking import Prediction, ranked
from npusim.simulation.request import DEFAULT_HW, LAUNCH, CallOptions, Request, schedule_name, takes_options
from npusim.simulation.tensor_files import read_tensors
from npusim.studies.evaluate.child import WARMED, Question, computed, described, is_wrapper, other_file, timed
from npusim.studies.evaluate.limits import Limits
from npusim.studies.evaluate.looks import WrongElement, of_refusal
from npusim.studies.evaluate.process import CandidateProcess, nursery
from npusim.studies.evaluate.referee import CaseVerdict, Referee, RefereeChoice, UnjudgedCaseError
from npusim.studies.tune.prediction import lettered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.studies.evaluate.judged_inputs import JudgedCase

Verdict = Literal["right", "wrong", "unproved"]
#: Share of the time by which the next kernel of a ranking must be predicted slower for their order to be trusted.  On
#: an H100 the order is right in 90 % of such pairs of the products and norms on which the share was fitted, and in 87 %
#: of the attention and the softmax that were left out of the fit (``tests/evaluate/test_trust.py``).
CLOSE = 0.1
#: Size in bytes of an element in float64.
_WIDEST = 8
#: Why an output is not judged.
UNJUDGED = "is stored too but not judged: the reference has only one result"
#: File and line in the text of a refusal.
_LINE = re.compile(r"([^\s:]+\.py):(\d+)")


@dataclass(frozen=True)
class Microseconds:
    """The predicted time on a device: nine in ten such times are between ``low`` and ``high``; None if none were
    measured.

    ``mid`` is None if the kernel has no time on the device; ``reason`` states why.  ``limit``: what limits the time;
    ``limit_share``: the share of the time in which this unit is busy.  ``key``: the class of equal bits.  ``tile``: the
    chosen fields; on the first device those of the judged calls. ``is_ranked``: the time has no band, but the predicted
    order of such kernels was compared with the measured order. ``warps``: resident warps of a core; ``is_link``:
    whether memory limits the time; ``block_warps``: warps of a block without products.
    """

    low: float | None
    mid: float | None
    high: float | None
    limit: str = ""
    limit_share: float = 0.0
    registers: int | None = None
    spilled: int = 0
    errors: str = ""
    key: str = ""
    reason: str = ""
    tile: str = ""
    is_ranked: bool = False
    warps: int = 0
    is_link: bool = False
    block_warps: int = 0


@dataclass(frozen=True)
class NotRead:
    """A construct that npusim does not read, or a call that the kernel refuses: the message, the file and the line."""

    case: str
    text: str
    file: str = ""
    line: int | None = None


@dataclass(frozen=True, repr=False)
class Evaluation:
    """One candidate of `npusim.evaluate`: right or wrong, its class of bits, its times, and whether to trust them.

    Attributes
    ----------
    kernel : str
        Name of the candidate.
    verdict, reason : str
        ``right``, ``wrong`` or ``unproved``, and the reason in words.
    looks_like : str
        The mistake that a wrong output looks like; empty if it looks like no known mistake.
    worst : CaseVerdict or None
        The worst judged call: its error relative to the limit, and the first wrong element.
    judged : int
        Number of judged calls.
    bits : str
        ``equal`` (the bits of the reference), ``class X`` (right, with another order of sums: class X of the batch), or
        ``different`` (wrong, or the class is not known).
    us : mapping of str to Microseconds
        Times by device in microseconds: ``mid``, and ``low`` to ``high``, the range of nine in ten such times.
    rank : mapping of str to int
        Rank by device, 1 for the fastest candidate that is not wrong.
    trust, doubts : True or "measure", tuple of str
        Whether the times can be used without a measurement; otherwise the doubts, about a time or about the order of
        this and the next candidate.
    not_read : tuple of NotRead
        Constructs that npusim does not read, with file and line.
    other_tiles : tuple of str
        Judged calls that do not support the tile of the given call, and the tile with which they were judged.

    Examples
    --------
    >>> import npusim
    >>> (candidate,) = npusim.evaluate("flash", seq=64, hw="ascend_910b2")
    >>> candidate.verdict, candidate.bits
    ('right', 'equal')
    """

    kernel: str
    verdict: Verdict
    reason: str
    looks_like: str
    worst: CaseVerdict | None
    judged: int
    bits: str
    us: Mapping[str, Microseconds]
    rank: Mapping[str, int]
    trust: bool | Literal["measure"]
    doubts: tuple[str, ...]
    not_read: tuple[NotRead, ...]
    other_tiles: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the candidate, its verdict and its times, on one line."""
        times = "".join(f", {each.mid:,.2f} us on {hw}" for hw, each in self.us.items() if each.mid is not None)
        return f"<Evaluation of {self.kernel}: {self.verdict}, bits {self.bits}{times}>"


@dataclass(frozen=True)
class Findings:
    """Findings of one candidate's process and of the referee, before candidates are compared."""

    kernel: str
    cases: tuple[CaseVerdict, ...] = ()
    not_read: tuple[NotRead, ...] = ()
    fault: str = ""
    given_refused: str = ""
    repeated: bool = False
    assumed: tuple[str, ...] = ()
    us: Mapping[str, Microseconds] | None = None
    tile: Mapping[str, Any] = field(default_factory=dict)
    other_tiles: tuple[str, ...] = ()
    #: Judged calls of other sizes that the kernel refuses.
    refused_sizes: tuple[str, ...] = ()


@takes_options(CallOptions)
def evaluate(
    kernels: str | Sequence[str],
    *,
    reference: str | None = None,
    shapes: Sequence[Mapping[str, int]] = (),
    seed: int = 0,
    jobs: int = 1,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    store: str | Path | None = None,
    on_done: Callable[[Evaluation], object] | None = None,
    **options: Unpack[CallOptions],
) -> tuple[Evaluation, ...]:
    """Judge kernels: whether they are right, whether their bits equal the reference's, their times with bands, and
    whether to trust them.

    Parameters
    ----------
    kernels
        A kernel or several, in the names that `npusim.run` accepts: packaged ones, ``FILE.py:NAME`` in paper form, a
        Triton launch, a recorded call; or a function that launches Triton kernels, ``FILE.py::function(tensor(R, N))``,
        which is recorded at each judged size.  Each is read and executed in a separate process within ``limits``.
    reference
        ``FILE.py:function``: a function on float64 arrays.  Its arguments are the inputs by name, each (batch, heads,
        rows, columns), and sizes by name; it returns the result, or a mapping of results by the kernel's names of these
        tensors. Alternatively a kernel, whose float64 result is the reference.  None: packaged attention; a kernel of
        plain tensors is then ``unproved``.  The reference is the caller's code, and runs without limits.
    shapes
        Further calls, as changed sizes of the problem; each candidate is also judged on calls of npusim's choice.
    seed, jobs, store
        The seed of the drawn inputs; the number of processes; a file (JSON lines) in which finished candidates are
        stored and from which they are read again.
    on_done
        Called with each candidate when the candidate is finished and ranked among the finished ones.
    options
        The call, as for `npusim.run`; ``hw``: devices of the times, ``"h200,a100"`` or a list; bits are computed for
        the first device.

    Returns
    -------
    tuple of Evaluation
        The evaluations, in the order of ``kernels``.  A kernel that cannot be read, crashes or exceeds a limit gives a
        verdict, not an error.

    Raises
    ------
    NpusimError
        A wrong option, device or reference: a mistake of the caller.
    """
    names = [kernels] if isinstance(kernels, str) else [str(schedule_name(kernel)) for kernel in kernels]
    named = options.pop("hw", None) or DEFAULT_HW
    devices = named.split(",") if isinstance(named, str) else list(cast("Sequence[str]", named))
    if not names or not devices:
        raise SpecError("evaluate: name a kernel and a device")
    requests = [replace(Request(name, **options), seed=seed) for name in names]
    return Batch(requests, reference, devices, tuple(shapes), limits, store).run(jobs, on_done)


class Batch:
    """Candidates of one call: they share inputs, float64 results and correct kernels."""

    def __init__(
        self,
        requests: Sequence[Request],
        reference: str | None,
        devices: Sequence[str],
        shapes: Sequence[Mapping[str, int]],
        limits: Limits,
        store: str | Path | None = None,
    ) -> None:
        self.requests = [r.placed() for r in requests]
        self.names = [r.schedule for r in requests]
        self.devices, self.limits = devices, limits
        self.places = {device: replace(self.requests[0], hw=device).placed().hw for device in devices}
        self.store = None if store is None else Path(store)
        own = replace(self.requests[0], hw=self.places[devices[0]])
        for device in devices:
            replace(own, hw=device).machine()
        files = (str(file) for file in (reference or "", devices[0], own.workload or ""))
        named = [(file, _content(file)) for file in files], shapes
        self.referee = _referee(RefereeChoice(own, reference, shapes), named)
        self._said = repr((named, list(devices), limits))
        self._lock = Lock()

    def run(self, jobs: int, on_done: Callable[[Evaluation], object] | None = None) -> tuple[Evaluation, ...]:
        """Return the evaluations in order; candidates run in ``jobs`` processes, and are judged one after another."""
        known = self._stored()
        nursery().warm(map(str, self.places.values()), WARMED)
        findings: dict[int, Findings] = {}
        with ThreadPoolExecutor(max(1, min(jobs, len(self.requests), os.cpu_count() or 1))) as workers:
            keys = [self._key(i) for i in range(len(self.requests))]
            tasks = {workers.submit(self._examined, i, known.get(keys[i])): i for i in range(len(keys))}
            for task in as_completed(tasks):
                number = tasks[task]
                findings[number] = task.result()
                if keys[number] not in known:
                    self._append(keys[number], findings[number])
                if on_done:
                    try:
                        on_done(dict(zip(sorted(findings), compared(findings, self.devices), strict=True))[number])
                    except BaseException:  # the caller has stopped: candidates that have not begun are not run
                        workers.shutdown(wait=False, cancel_futures=True)
                        raise
        return tuple(compared(findings, self.devices))

    def _examined(self, number: int, known: Findings | None) -> Findings:
        return known or replace(self.examined(number), kernel=self.names[number])

    def examined(self, number: int) -> Findings:
        """Return the findings on the candidate with this number: those of its process, and those of the referee."""
        request = self.requests[number]
        may_start = is_launch(request.schedule)
        with CandidateProcess(self.limits, may_start=may_start) as process:
            findings = Findings(request.schedule)
            if self.referee is not None:
                findings = self._judged(process, number)
            if process.has_ended:
                return replace(findings, us={d: _no_time(findings.fault) for d in self.devices})
            times = dict[str, Microseconds]()
            for device in self.devices:
                call = replace(request, hw=self.places[device], seed=None, numerics=False)
                tile = {"tile": dict(findings.tile)} if device == self.devices[0] else {}
                times[device] = time_of(process.ask(Question(timed, call, tile)))
            return replace(findings, us=times)

    def _judged(self, process: CandidateProcess, candidate: int) -> Findings:
        """Return the verdicts on all calls."""
        request, referee = self.requests[candidate], self.referee
        assert referee is not None
        verdicts, refused, outputs, assumed = list[CaseVerdict](), list[NotRead](), list[Any](), dict[str, None]()
        other_tiles, refused_sizes = list[str](), list[str]()
        given_refused = fault = ""
        tile: Mapping[str, Any] = {}
        for number, case in enumerate(referee.cases()):
            answer = self._computed(process, candidate, case, f"out{number}.npz", tile)
            if "error" in answer:
                # A recorded view may be a part of a tensor, and a kernel may then read the memory around it.
                is_view = is_recorded(request.schedule) or is_wrapper(request.schedule)
                known = of_refusal(str(answer["error"])) if case.is_given and not is_view else ""
                if known or answer["kind"] not in ("refused", "inputs"):
                    fault = f"{known or 'a ' + answer['kind']}: {answer['error']}"
                    verdicts.append(CaseVerdict(case.name, False, fault, None, 0, 0, is_resized=bool(case.sizes)))
                    break
                refused.append(_not_read(case.name, str(answer["error"])))
                given_refused = given_refused or (str(answer["error"]) if case.is_given else "")
                is_of_sizes = case.sizes and not case.is_given and answer["kind"] == "refused"
                refused_sizes += [case.name] if is_of_sizes else []
                if number == 0:
                    break
                continue
            description = answer["description"]
            tile = tile or description["tile"]
            if description["refused"]:
                other_tiles.append(f"{case.name}: {_in_words(description['tile'])} ({description['refused']})")
            assumed |= dict.fromkeys(n for n, e in answer["arithmetic"].items() if e == "assumed")
            file = process.folder / f"out{number}.npz"
            try:
                if case.has_given_values:
                    outputs.append(read_tensors(file)["o"].tobytes())
                for verdict in self._verdicts(case, description, file):
                    verdicts.append(verdict)
            except UnjudgedCaseError:
                continue
            except NpusimError as error:
                refused.append(_not_read(case.name, one_line(error)))
                given_refused = given_refused or (one_line(error) if case.is_given else "")
            if number == 0 and not referee.judges_others:
                refused += [NotRead(name, f"{name} {UNJUDGED}") for name in description["others"]]
        repeated = len(outputs) > 1 and outputs[0] == outputs[1]
        said = tuple(verdicts), tuple(refused), fault, given_refused, repeated, tuple(assumed)
        findings = Findings(request.schedule, *said, tile=tile, refused_sizes=tuple(refused_sizes))
        return replace(findings, other_tiles=tuple(other_tiles))

    def _verdicts(self, case: JudgedCase, description: Mapping[str, Any], file: Path) -> Iterator[CaseVerdict]:
        """Yield the verdicts on a call: of the result, and of each other output that the referee judges."""
        assert self.referee is not None
        others = description["others"] if self.referee.judges_others else {}
        names = [description["result"], *others]
        files = [file, *(Path(other_file(str(file), number)) for number in range(len(others)))]
        try:
            with self.referee.lock:
                for name, sizes, own in zip(names, (description["output"], *others.values()), files, strict=True):
                    verdict = self.referee.judge(case, {**description, "output": sizes, "name": name}, own)
                    yield replace(verdict, case=f"{case.name}, {name}") if others else verdict
        finally:
            for own in files:
                own.unlink(missing_ok=True)

    def _computed(
        self, process: CandidateProcess, candidate: int, case: JudgedCase, file: str, tile: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return a candidate's answer for a case, with the description of its inputs.

        ``tile``: fields that were chosen for the given call; a kernel has this tile for all sizes that the tile fits.
        """
        assert self.referee is not None
        call = self._call(candidate, case)
        more = {"tile": dict(tile), "by_parameter": self.referee.judges_others}
        description = process.ask(Question(described, call, more))
        if "error" in description:
            return description
        sizes = *description["inputs"].values(), description["output"], *description["others"].values()
        elements = sum(prod(each[:4]) for each in sizes)
        if elements * _WIDEST > self.limits.memory_bytes:
            return {"error": f"{elements:,} elements of inputs and output exceed its memory", "kind": "refused"}
        try:
            with self.referee.lock:
                arrays = self.referee.drawn(case, description)
        except NpusimError as error:
            return {"error": one_line(error), "kind": "refused"}
        more |= {"file": file, "tile": description["tile"]}
        answer = process.ask(Question(computed, replace(call, tensors=arrays), more))
        return {**answer, "description": {**description, "integers": _integers(call.schedule)}}

    def _call(self, candidate: int, case: JudgedCase) -> Request:
        """Return the candidate's request for a case: the referee's call with the candidate's fields."""
        request = self.requests[candidate]
        assert self.referee is not None
        call = self.referee.call(request.schedule, case, None)
        own = ("tiling", "precision", "arithmetic", "args", "grid", "constexpr", "num_warps", "num_stages")
        return replace(call, **{name: getattr(request, name) for name in own})

    # -------------------------------------------------------------- storage

    def _key(self, candidate: int) -> str:
        request = self.requests[candidate]
        about = {n: v for n, v in vars(request).items() if n != "progress"}
        text = repr((about, _content(request.schedule), self._said, package_stamp()))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _stored(self) -> dict[str, Findings]:
        if self.store is None or not self.store.is_file():
            return {}
        known = {}
        for line in self.store.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
                known[record["key"]] = _findings(record["findings"])
            except (ValueError, KeyError, TypeError):
                continue  # a line that a killed process wrote in part
        return known

    def _append(self, key: str, findings: Findings) -> None:
        if self.store is None:
            return
        try:
            with self._lock, self.store.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "findings": asdict(findings)}) + "\n")
        except OSError as error:
            raise OutputError(f"{self.store}: {error.strerror}") from None


#: Fields of a request that only the candidate has: a referee does not read them.
_OWN = frozenset(("schedule", "tiling", *LAUNCH, "progress"))


def _referee(choice: RefereeChoice, named: object) -> Referee | None:
    """Return the referee for a choice; all batches of one call share it.  ``named``: the content of the reference."""
    call = {name: value for name, value in vars(choice.request).items() if name not in _OWN}
    shared = _shared(repr((call, named)))
    if not shared:
        shared.append(choice.referee())
    return shared[0]


@lru_cache(maxsize=4)
def _shared(_call: str) -> list[Referee | None]:
    return []


def _findings(record: Mapping[str, Any]) -> Findings:
    cases = tuple(
        CaseVerdict(**{**c, "first": c["first"] and WrongElement(**{**c["first"], "at": tuple(c["first"]["at"])})})
        for c in record["cases"]
    )
    not_read = tuple(NotRead(**n) for n in record["not_read"])
    us = {d: Microseconds(**t) for d, t in (record["us"] or {}).items()}
    texts = {name: tuple(record[name]) for name in ("assumed", "other_tiles", "refused_sizes")}
    return Findings(**{**record, "cases": cases, "not_read": not_read, "us": us, **texts})


def _integers(schedule: str) -> Mapping[str, NDArray[Any]]:
    """Return a recorded call's integer arguments, with at least four axes each; they are a part of the call."""
    tensors = call_of(schedule).tensors.items() if is_recorded(schedule) else ()
    known = {name: x.data for name, x in tensors if x.is_integer and x.data is not None}
    return {name: x.reshape((1,) * (4 - x.ndim) + x.shape) for name, x in known.items()}


def _content(schedule: str) -> str:
    """Return a digest of the file in a name; empty if the name contains no file."""
    path = Path(launch_parts(schedule)[0] if is_launch(schedule) else schedule.rpartition(":")[0] or schedule)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def time_of(answer: Mapping[str, Any]) -> Microseconds:
    """Return a time from the answer of `npusim.studies.evaluate.child.timed`."""
    if "error" in answer:
        return _no_time(str(answer["error"]))
    us, band = float(answer["us"]), answer["band"]
    ends = (None, None) if band is None else (us * max(0.0, 1 - band), us * (1 + band))
    limit = answer["limit"]
    return Microseconds(
        low=ends[0],
        mid=us,
        high=ends[1],
        limit=limit["name"],
        limit_share=float(limit["share"]),
        registers=answer["registers"],
        spilled=answer["spilled"],
        errors=answer["errors"],
        key=answer["key"],
        tile=_in_words(answer["tile"]),
        is_ranked=band is None and bool(answer["is_ranked"]),
        warps=answer["warps"],
        is_link=limit["is_link"],
        block_warps=answer["block_warps"],
    )


def _in_words(tile: Mapping[str, Any]) -> str:
    """Return the fields of a tile as text."""
    return " ".join(f"{name}={value}" for name, value in tile.items())


def _no_time(reason: str) -> Microseconds:
    return Microseconds(None, None, None, reason=reason)


def _not_read(case: str, text: str) -> NotRead:
    at = _LINE.search(text)
    return NotRead(case, text, *((at[1], int(at[2])) if at else ()))


# ---------------------------------------------------------------- candidates compared with one another


def compared(found: Mapping[int, Findings], devices: Sequence[str]) -> Iterator[Evaluation]:
    """Yield the evaluations of candidates in order: verdicts, classes of bits, ranks and trust."""
    listed = [found[i] for i in sorted(found)]
    verdicts = [verdict_of(f) for f in listed]
    ranks, predictions = dict[str, dict[int, int]](), list[Prediction]()
    for device in devices:
        predictions = [_prediction(f, device) for f in listed]
        right = [i for i in ranked(predictions) if verdicts[i] != "wrong"]
        ranks[device] = {i: place + 1 for place, i in enumerate(right)}
    first = [_prediction(f, devices[0]) for f in listed]
    letters = lettered(first, ranked(first))
    for i, f in enumerate(listed):
        rank = {device: ranks[device][i] for device in devices if i in ranks[device]}
        doubts = tuple(_doubts(i, listed, ranks, devices))
        wrong = [c for c in f.cases if not c.is_right]
        worst = max(wrong or f.cases, key=lambda c: np.inf if c.excess is None else c.excess, default=None)
        yield Evaluation(
            f.kernel,
            verdicts[i],
            _reason(f, verdicts[i], worst),
            _looks(f, wrong, worst) if verdicts[i] == "wrong" else "",
            worst,
            len(f.cases),
            _bits(f, verdicts[i], letters.get(i, "?")),
            f.us or {},
            rank,
            "measure" if doubts else True,
            doubts,
            f.not_read,
            f.other_tiles,
        )


def verdict_of(findings: Findings) -> Verdict:
    """Return the verdict: wrong if any call is wrong, right if all are right, unproved if a call is refused or no call
    has other sizes.
    """
    if any(not c.is_right for c in findings.cases):
        return "wrong"
    is_proved = bool(findings.cases) and not findings.given_refused and not findings.refused_sizes
    return "right" if is_proved and any(c.is_resized for c in findings.cases) else "unproved"


def _reason(findings: Findings, verdict: Verdict, worst: CaseVerdict | None) -> str:
    if verdict == "unproved":
        if findings.given_refused:
            return findings.given_refused
        if any(c.is_resized for c in findings.cases):
            first = findings.refused_sizes[0]
            text = next(n.text for n in findings.not_read if n.case == first)
            return f"right on {len(findings.cases)} calls, but it refuses {', '.join(findings.refused_sizes)}: {text}"
        if findings.cases:
            return "right on the given sizes, but it refuses all others: it may be a table of sizes"
        refused = next((t.reason for t in (findings.us or {}).values() if t.reason), "")
        return refused or "no independent reference: name one with --reference"
    return f"{worst.case}: {worst.text}" if worst is not None else ""


def _looks(findings: Findings, wrong: Sequence[CaseVerdict], worst: CaseVerdict | None) -> str:
    """Return the fault that a wrong candidate looks like."""
    if findings.fault:
        return findings.fault
    looks = worst.first.looks_like if worst is not None and worst.first is not None else ""
    if findings.repeated and not looks.startswith(("zeros", "a constant")):
        return "a cached output: the same bits for other inputs"
    if all(c.is_extreme for c in wrong):
        return f"inaccurate only on extreme inputs: {', '.join(c.case for c in wrong)}"
    if all(c.is_resized or c.is_extreme for c in wrong):
        names = ", ".join(c.case for c in wrong)
        return f"{looks}; right on the given sizes, wrong on: {names}"
    return looks


def _bits(findings: Findings, verdict: Verdict, letter: str) -> str:
    if findings.cases and all(c.matched == c.total for c in findings.cases) and verdict != "wrong":
        return "equal"
    return f"class {letter}" if verdict != "wrong" and letter != "?" else "different"


def _prediction(findings: Findings, device: str) -> Prediction:
    time = (findings.us or {}).get(device)
    if time is None or time.mid is None:
        return Prediction(reason="" if time is None else time.reason)
    limit = Limit(time.limit, time.limit_share, time.is_link)
    known = time.mid, time.key, time.registers, time.spilled, time.warps, limit
    return Prediction(*known, block_warps=time.block_warps)


def _doubts(
    i: int, listed: Sequence[Findings], ranks: Mapping[str, Mapping[int, int]], devices: Sequence[str]
) -> Iterator[str]:
    """Yield the reasons to measure a candidate."""
    for device in devices:
        time = (listed[i].us or {}).get(device)
        if time is None or time.mid is None:
            yield f"{device}: no time{f': {time.reason}' if time is not None and time.reason else ''}"
            continue
        if time.low is None and not (time.is_ranked and len(ranks[device]) > 1):
            yield f"{device}: {time.errors or 'not measured'}"
            continue
        place = ranks[device].get(i)
        following = next((j for j, p in ranks[device].items() if place is not None and p == place + 1), None)
        other = None if following is None else _prediction(listed[following], device).us
        if other is not None and other <= time.mid * (1 + CLOSE):
            yield f"{device}: the prediction of the next candidate is within {CLOSE:.0%}: the true order may differ"
    if listed[i].assumed:
        yield f"arithmetic {', '.join(listed[i].assumed)} is assumed"
