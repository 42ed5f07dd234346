"""The entry points `run` and `run_calls`, and a result that shows and saves itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from npusim.errors import SpecError
from npusim.frames import frame
from npusim.report.advice import Trial
from npusim.report.output import save_run, save_trace
from npusim.report.pipes import pipe_columns
from npusim.report.result_json import record_of
from npusim.report.tables import run_table
from npusim.report.text import Block, plain, pre_html
from npusim.simulation import run_result
from npusim.simulation.request import Request, RunOptions, schedule_name, takes_options
from npusim.simulation.sensitivity import Sensitivity, sensitivity
from npusim.simulation.sequence import in_sequence
from npusim.simulation.simulate import run_request


class RunResult(run_result.RunData):
    """The result of `npusim.run`: bits and cycles of one schedule on one device, with methods that show and save them.

    Attributes
    ----------
    cycles : int
        Time of the cores in cycles of the device clock, without the launch.
    latency_us : float
        Time of the call in microseconds, launch included.
    tflops : float
        Useful operations per second of the call, in 1e12; masked pairs are not counted.
    output : numpy.ndarray or None
        Output (batch, heads, seq_q, value_head_dim) in the output's format; rows that were not computed are NaN.  None
        without numerics.
    numerics : NumericResult or None
        Errors against float64 (``numerics.error.rmse``, relative), ULP, overflows and their origin; None without
        numerics.
    timing : TimingResult or None
        Cycles and waits of every queue, bytes of every link, and the errors of earlier predictions of this kind; None
        on a device without a timing model.
    name, schedule, precision, workload, inputs : str
        The run's name; names of its schedule, preset, workload, and the origin of Q, K and V.
    device, problem, tiling, program : DeviceSpec, Problem, Tiling, TileProgram
        The device, the sizes, the chosen tile, and the tile program that both values and cycles come from.
    formats : dict of str to str
        Number formats by role: ``{"scores": "float32", ...}``.
    notes : tuple of str
        Notes for the reader: choices that npusim made, and parts that are not modelled.
    spread, orders, finite, presets
        Outputs under other arithmetics, collectives, finite alternatives and presets (`npusim.run`).

    Examples
    --------
    >>> import npusim
    >>> result = npusim.run("flash", seq=64, heads=[0])
    >>> result.output.shape, result.numerics.error.rmse < 1e-3
    ((1, 5, 64, 128), True)
    >>> result.cycles == result.timing.cycles, str(result).startswith("flash on ascend_910b2")
    (True, True)
    """

    def sensitivity(self) -> tuple[Sensitivity, ...]:
        """Return how the latency changes with each assumed or fitted constant, the strongest first."""
        return sensitivity(self)

    def pipes(self) -> Mapping[str, Sequence[object]]:
        """Return busy cycles and ratios of every core, as columns with a profiler's names, for any data frame."""
        return pipe_columns(record_of(self))

    def to_pandas(self) -> Any:
        """Return `pipes` as a `pandas.DataFrame`, one row per core; raise `NpusimError` if pandas is not installed."""
        columns = self.pipes()
        return frame(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))

    def save(self, folder: str | Path | None = None, *, save_output: bool = False, force: bool = False) -> Path:
        """Write ``result.json``, ``pipes.csv`` and the timeline to a folder; return the folder.

        The default is ``runs/NAME``; NAME has the schedule, inputs, shape, device and a digest of the other options.
        The folder of the same run is overwritten, the folder of another run only with ``force``, any other folder
        never.  ``save_output`` adds the output tensor.  Raises `OutputError` if the folder cannot be written.
        """
        return save_run(self, folder, save_output=save_output, is_forced=force)

    def save_trace(self, path: str | Path, window: tuple[float, float] | None = None) -> Path:
        """Write the timeline, or a window of it (us), as Chrome trace events, which Perfetto reads too."""
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
        call (`npusim.record`); `npusim.run_calls` runs several.
    hw, workload
        Names of packaged files, paths, or the loaded objects; ``hw`` None: the schedule's default device,
        ``workload`` None: ``pangu_38b``, or the workload of the given tensors.
    problem
        The problem (`Problem`, `GemmProblem`, `CopyProblem`) or a mapping of its sizes, in place of a workload.
    seq
        Number of queries and of keys: ``8192``, or text ``"8k"``; every size accepts both.
    tiling
        Fields of the schedule's tiling by name.  Fields of an attention's tile and order that are absent or ``"auto"``
        get the fastest of a few values that the device's cores offer (`npusim.simulation.chosen_tile`); a note names
        the values.  Default sizes that do not fit are halved.  A `Tiling` is used unchanged.
    precision
        Name of one of the schedule's presets, optionally with changed fields:
        ``"fa2_fp32,exp_variant=exp2.exp2p,accumulate=fresh"``.
    tensors
        Q, K and V: a file, the name of packaged data, or a mapping of arrays, with keys ``q k v`` or
        ``<prefix>.q ...``; on a node also the output projection ``w_o`` (heads x head size,
        hidden), which is drawn if absent.  Default: drawn from the workload's recipe with ``seed``.  With
        ``dtype="float8_e4m3fn"`` or ``"float8_e5m2"`` they are quantised, one scale per tensor.
    rows
        Query rows whose bits are computed (with their Q blocks): ``"all"``, ``"sample"`` (the last 128, or fewer
        in the last block) or indices: numbers, or ``"0,128,4000-4095"``.
    numerics
        Whether bits are computed.
    overrides
        ``{dotted key of the device file: value}``; a value is a number, or text as after ``-C``.

    Other Parameters
    ----------------
    scale
        ``{unit or link of the device: factor of its rate}``: ``{"VECTOR": 0.5}`` doubles the cycles of each operation
        of the vector unit.
    clock, power_watts
        The clock in Hz to which the cores are locked, and the power limit of the board in watts; None: the clock is not
        locked, and falls where products reach the limit in the device file.
    seq_q, seq_kv, batch, tensor_parallel, causal, dtype
        Replace the workload's values: only the number of queries or only that of keys, the number of sequences, the
        number of devices that share the heads, the mask, the format of Q, K and V.  With ``tensors`` the tensors set
        the sizes and ``dtype`` rounds them; a ``workload`` named as well must have the same sizes.
    q_heads, kv_heads, head_dim, shape
        Query and KV heads of one device, and the elements of a head, in place of the workload's; ``q_heads`` without
        ``kv_heads`` means the same number of KV heads.  ``shape`` states these sizes, the batch and the length in one
        word, ``"B4,N32/8,S6k,D128"`` (``S1/8k``: queries, keys).
    window, sinks, prefix, chunk, documents
        Which keys a query sees (`Problem`), in place of the workload's mask: the last ``window`` keys, the query's
        included, and the first ``sinks`` keys, the first ``prefix`` keys, the keys of its chunk or document.
    unseen
        Output of a query that sees no key: ``"zero"``, ``"nan"``, or the ``"mean"`` of all V; None: the run refuses it.
    kind
        Kind of layer, if a model has several: ``"global"``, or ``"local"`` with a window or chunk; None: the kind that
        sees the most keys, and a note reports the time of the other kinds.
    softcap, alibi, bias
        Changes to scores: a score s becomes ``softcap tanh(s / softcap)``; ALiBi adds a head's slope times the
        distance; a bias tensor is added, ``"shared"`` by all heads or one per ``"head"``.
    lengths, query_lengths, page
        Keys of each sequence, if they differ; queries of each sequence, its last ones (1: a decoding step in a batch
        with prompts); keys per page of a paged K and V.
    cache, cache_scale
        Storage format of K and V, ``"int8"`` or ``"float8_e4m3fn"``, with one scale per ``"token"`` and head, per
        ``"head"``, per number of tokens, or per ``"channel"`` of a head.
    phase
        ``"decode"``: one query per sequence, over all ``seq`` keys.
    ignore
        Features of the workload's attention to leave out: ``window``, ``softcap``, ... (`Workload.left_out`);
        a run refuses a workload with a feature that npusim does not model, unless it is named here.
    args, grid, constexpr, num_warps, num_stages
        The launch of a Triton kernel, ``schedule="kernel.py::name"``, if its name does not state it: `npusim.triton`.
    arithmetic
        Registry name of the matrix arithmetic, in place of the device's.
    tensor_prefix
        Prefix of the keys of ``tensors``: needed if a file holds several sets.
    layout
        Order of the tensors' axes: ``bnsd`` (batch, heads, tokens, head size), ``bsnd``, ``bsh`` or ``tnd``; in all but
        ``bnsd``, the heads of a token are contiguous in memory too.
    heads
        Heads whose bits are computed: ``"all"``, ``"sample"`` or indices, as ``rows``.
    padding
        ``"nan"``: K and V contain NaN in keys that no query sees; a note names the outputs that the NaN reaches.
    seed
        Seed of the tensors drawn from the workload's recipe.
    l2
        State of L2 when the kernel starts, in place of the device file's: ``"clean"``, no data of the kernel;
        ``"dirty"``, other data's lines that must be written back, as after a benchmark that fills a buffer before each
        call; ``"warm"``, the inputs, which must fit in L2; ``"steady"``, the state after earlier launches of the same
        kernel on other inputs, so that each launch moves the bytes that it reads and writes; ``"repeated"``, the state
        after launches on the same inputs: all inputs, if they and the results fit in L2; only a part if they are up to
        1.5 times as large; else none.
    eager
        For ``standard``: each operator is a separate kernel, as frameworks run it.
    method
        Timing method, a name in ``npusim.program.timing.METHODS``.
    trace_groups
        Core groups whose operations the timeline records: numbers, or ``"last"``, the group that ends last.
    timeline
        Part of the timeline that a trace shows, start and end in us; a run of millions of operations records only
        its beginning, up to this end.
    diagnose
        Whether the bits are diagnosed for ranges, resonance, underflow and saturation (``numerics.diagnosis``).
    presets
        Whether the schedule's other presets run on the same rows too, for their error and time.
    limit_s
        Limit of the estimated computing time in seconds; a longer run is refused (`npusim.simulation.plan.estimate`).
    progress
        Function called at intervals with the finished share of the bits, or of method ``des``: 0 to 1.

    Returns
    -------
    RunResult
        ``cycles``, ``latency_us``, ``output`` (batch, heads, seq_q, value_head_dim; rows that were not
        computed are NaN), ``numerics``, ``timing``.  NaN and Inf in the output raise no error: they are counted, and
        the first origin is named.

    Raises
    ------
    NpusimError
        The subclass names the cause, the message the value, the allowed values and the place: `SpecError` (names,
        files, sizes, an argument that this run does not read), `TilingError` (fields that do not fit),
        `TensorError` (inputs).

    Examples
    --------
    >>> import npusim
    >>> result = npusim.run("flash", seq=256, tiling={"block_kv": 128}, numerics=False)
    >>> result.problem.seq_q, result.tiling.block_kv
    (256, 128)
    """
    if isinstance(schedule, list):
        raise SpecError(
            f"run: {len(schedule)} recorded launches: use npusim.run_calls(calls), which runs them one after another"
        )
    return RunResult(**vars(run_request(Request(schedule, **options))))


@takes_options(RunOptions)
def run_calls(calls: Sequence[object], **options: Unpack[RunOptions]) -> tuple[RunResult, ...]:
    """Predict bits and cycles of recorded launches, one after another; return one result per launch.

    ``calls``: launches of `npusim.record`, or their names, ``calls.npz::k``; ``options`` as for `npusim.run`.  Data
    flow follows the storage of the tensors: a launch reads the values that earlier launches stored there, in any shape,
    and its notes state this; other inputs have recorded values, or normally distributed ones.  Elements that no launch
    stores do not change.  Each launch is timed separately.  Results that the program computes between two launches have
    their recorded values.  Raises as `npusim.run`, and `SpecError` if ``tensors`` is given.
    """
    names = [schedule_name(call) for call in calls]
    done = in_sequence(names, Request(names[0] if names else "", **options))
    return tuple(RunResult(**vars(each.result)) for each in done)
