"""What users call: `run`, and a result that shows and saves itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from npusim.errors import SpecError
from npusim.frames import frame
from npusim.report.advice import Trial
from npusim.report.output import save_run, save_trace
from npusim.report.pipes import pipe_columns
from npusim.report.record import record_of
from npusim.report.tables import run_table
from npusim.report.text import Block, plain, pre_html
from npusim.simulation import result as run_result
from npusim.simulation.request import Request, RunOptions, schedule_name, takes_options
from npusim.simulation.sensitivity import Sensitivity, sensitivity
from npusim.simulation.sequence import in_sequence
from npusim.simulation.simulate import run_request


class RunResult(run_result.RunData):
    """The result of a run (fields: `npusim.simulation.result.RunData`) with what shows, keeps and questions it."""

    def sensitivity(self) -> tuple[Sensitivity, ...]:
        """Return how the latency moves with each assumed or fitted constant, the strongest first."""
        return sensitivity(self)

    def pipes(self) -> Mapping[str, Sequence[object]]:
        """Return busy cycles and ratios of every core, as columns with a profiler's names, for any frame."""
        return pipe_columns(record_of(self))

    def to_pandas(self) -> Any:
        """Return `pipes` as a `pandas.DataFrame`, a row a core; raise `NpusimError` where pandas is not installed."""
        columns = self.pipes()
        return frame(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def save(self, folder: str | Path | None = None, *, save_output: bool = False, force: bool = False) -> Path:
        """Write ``result.json``, ``pipes.csv`` and the timeline to a folder; return where.

        By default ``runs/<folder>``: schedule, inputs, shape, device, a digest of what else was asked.  The same run
        is replaced there, another one only by ``force``, anything else never.  ``save_output`` adds the output tensor.
        Raises `OutputError` if it cannot be written.
        """
        return save_run(self, folder, save_output=save_output, is_forced=force)

    def save_trace(self, path: str | Path, window: tuple[float, float] | None = None) -> Path:
        """Write the timeline, or a window of it (us), as Chrome's trace events, for Perfetto too."""
        return save_trace(self, Path(path), window)

    def _repr_html_(self) -> str:
        return pre_html(self._table())

    def __str__(self) -> str:
        """Return the table that ``npusim run`` prints."""
        return plain(self._table())

    def details(self) -> str:
        """Return the table that ``npusim run --full`` prints."""
        return plain(self._table(is_full=True))

    def _table(self, *, is_full: bool = False) -> tuple[Block, ...]:
        return run_table(record_of(self), Trial(self), is_full=is_full)


@takes_options(RunOptions)
def run(schedule: str, **options: Unpack[RunOptions]) -> RunResult:
    """Predict bits and cycles of one schedule on one device.

    Ten options are enough for most runs: ``hw``, ``workload``, ``problem``, ``seq``, ``tiling``, ``precision``,
    ``tensors``, ``rows``, ``numerics``, ``overrides``.  The others follow under Other Parameters.

    Parameters
    ----------
    schedule
        Name: ``flash``, ``pasa``, ``two_level``, ``standard``, ``gemm``, ...; ``npusim run`` lists them.  Or a recorded
        call (`npusim.record`); several are run by `npusim.run_calls`.
    hw, workload
        Names of packaged files, paths, or the loaded objects; ``hw`` None: the device the schedule is for,
        ``workload`` None: ``pangu_38b``, or what the tensors given are.
    problem
        The problem (`Problem`, `GemmProblem`, `CopyProblem`) or a mapping of its sizes, in place of a workload.
    seq
        Queries and keys: ``8192``, or text ``"8k"``, as every size.
    tiling
        Fields of the schedule's tiling by name.  Those of an attention's tile and order that are not named, or
        ``"auto"``, are chosen by the times of a few that the device's cores offer (`npusim.simulation.tile`); a note
        says which.  Sizes that do not fit are halved.  A `Tiling` is taken as it is.
    precision
        Name of one of the schedule's presets, its fields changed if wanted:
        ``"fa2_fp32,exp_variant=exp2.exp2p,accumulate=fresh"``.
    tensors
        Q, K and V: a file, the name of packaged data, or a mapping of arrays, with keys ``q k v`` or
        ``<prefix>.q ...``, on a node with the output projection ``w_o`` (heads x head size, hidden) if
        it is not to be drawn; by default they are drawn from the workload's recipe with ``seed``.  With
        ``dtype="float8_e4m3fn"`` or ``"float8_e5m2"`` they are quantised, one scale a tensor.
    rows
        Query rows whose bits are computed (their whole Q blocks): ``"all"``, ``"sample"`` (the last 128, or fewer in
        the last block) or indices: numbers, or ``"0,128,4000-4095"``.
    numerics
        Whether bits are computed.
    overrides
        ``{dotted key of the device file: value}``, a number, or text as ``-C`` gives it.

    Other Parameters
    ----------------
    seq_q, seq_kv, batch, tensor_parallel, causal, dtype
        Replace what the workload says: queries or keys alone, sequences, devices
        that share the heads, the mask, the format of Q, K and V.  With ``tensors`` the sizes come from
        them, and ``dtype`` rounds them; a ``workload`` named beside them has to be theirs.
    window, sinks, prefix, chunk, documents
        Which keys a query sees (`Problem`): the last ``window``, itself included, and the first ``sinks`` beside it,
        the first ``prefix``, those of its own chunk or document; in place of what the workload says.
    unseen
        What a query that sees no key gives: ``"zero"``, ``"nan"``, or the ``"mean"`` of all V; None: it is refused.
    kind
        Which layers, where a model has several kinds: ``"global"``, or ``"local"`` with a window or chunk; None: those
        with most to see, and a note says what the others take.
    softcap, alibi, bias
        What is done to scores: a score s becomes ``softcap tanh(s / softcap)``; a head's slope times the distance is
        added; a tensor is, ``"shared"`` by heads or one of each ``"head"``.
    lengths, query_lengths, page
        Keys of each sequence, where they differ; queries of each, the last of it (1: a decoding step beside prompts);
        of how many keys the pages are in which K and V lie.
    cache, cache_scale
        The format that K and V are stored in, ``"int8"`` or ``"float8_e4m3fn"``, with a scale a ``"token"`` and head, a
        ``"head"``, or so many tokens; or one a ``"channel"`` of a head.
    phase
        ``"decode"``: one query a sequence, over all ``seq`` keys.
    ignore
        What of the workload's attention may be left out: ``window``, ``softcap``, ... (`Workload.left_out`);
        a run refuses a workload that needs what is not modelled, unless it is named here.
    args, grid, constexpr, num_warps, num_stages
        The launch of a Triton kernel, ``schedule="kernel.py::name"``, where its name does not say it: `npusim.triton`.
    arithmetic
        Registry name of the matrix arithmetic, in place of the device's own.
    tensor_prefix
        What stands before the keys of ``tensors``: needed where a file holds several.
    layout
        Order of the tensors' axes: ``bnsd`` (batch, heads, tokens, head size), ``bsnd``, ``bsh`` or
        ``tnd``; all but the first have heads within a token in memory too.
    heads
        Heads whose bits are computed: ``"all"``, ``"sample"`` or indices, as ``rows``.
    padding
        ``"nan"``: what K and V hold of keys that no query sees; a note says which outputs it reaches.
    seed
        Of the tensors that the workload's recipe draws.
    l2
        What L2 holds when the kernel starts, if not what the file of the device says: ``"clean"``, nothing of use;
        ``"dirty"``, lines of something else still to be written back, as benchmarks leave them that fill a buffer
        before each call; ``"warm"``, the inputs, which have to fit it; ``"steady"``,
        what launches like it left, so that each moves what it reads and writes.
    eager
        Of ``standard``: every operator a kernel, as frameworks run it.
    method
        How time is computed; names are those of ``npusim.timing.METHODS``.
    trace_groups
        Core groups whose operations are kept for the timeline: numbers, or ``"last"``, the one that ends last.
    timeline
        Part of the timeline that a trace shows, from and to in us; a run of millions of operations has its
        beginning only, up to there.
    diagnose
        Whether bits come with ranges, resonance, underflow and saturation (``numerics.diagnosis``).
    presets
        Whether the schedule's other presets are run on the same rows, for their error and time.
    limit_s
        Seconds of computing beyond which the run is refused, by an estimate (`npusim.simulation.plan.estimate`).
    progress
        Called now and then with the share of the bits, or of method ``des``, that is done: 0 to 1.

    Returns
    -------
    RunResult
        ``cycles``, ``latency_us``, ``output`` (batch, heads, seq_q, value_head_dim; rows that were not
        computed are NaN), ``numerics``, ``timing``.  A NaN or Inf of the output is counted and its first
        origin named, not raised.

    Raises
    ------
    NpusimError
        Of the kind that is wrong, with the value, what is allowed and where: `SpecError` (names, files,
        sizes, an argument that nothing of this run reads), `TilingError` (fields that do not fit),
        `TensorError` (inputs).

    Examples
    --------
    >>> import npusim
    >>> result = npusim.run("flash", seq=256, tiling={"block_kv": 128}, numerics=False)
    >>> result.problem.seq_q, result.tiling.block_kv
    (256, 128)
    """
    if isinstance(schedule, list):
        raise SpecError(f"run of {len(schedule)} recorded launches: npusim.run_calls(calls) runs one after another")
    return RunResult(**vars(run_request(Request(schedule, **options))))


@takes_options(RunOptions)
def run_calls(calls: Sequence[object], **options: Unpack[RunOptions]) -> tuple[RunResult, ...]:
    """Predict bits and cycles of recorded launches, one after another; return a result of each.

    ``calls``: those of `npusim.record`, or their names, ``calls.npz::k``; ``options`` as of `npusim.run`.  Who writes
    what is derived of the storages of tensors: a launch reads what those before it have stored there, in whatever
    shape, and its notes say so; else values that were recorded, or normal ones.  Elements that no launch stores stay as
    they were.  Each launch is timed by itself.  What the program itself makes of a result between two launches is as it
    was while recording.  Raises as `npusim.run`, and `SpecError` where ``tensors`` are given.
    """
    names = [schedule_name(call) for call in calls]
    done = in_sequence(names, Request(names[0] if names else "", **options))
    return tuple(RunResult(**vars(each.result)) for each in done)
