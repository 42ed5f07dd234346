"""Bits and cycles of one run, together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npusim.errors import SpecError

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.ir.program import TileProgram
    from npusim.numerics.result import NumericResult
    from npusim.simulation.request import Asked
    from npusim.simulation.robustness import FiniteChoice, Spread
    from npusim.timing.result import TimingResult


@dataclass(frozen=True)
class PresetOutcome:
    """What another preset of the schedule gives on the same rows.

    ``relative_rmse`` is None where its output is not finite, ``latency_us`` on a device without a time.
    """

    precision: str
    relative_rmse: float | None
    latency_us: float | None


@dataclass(frozen=True, repr=False)
class RunData:
    """Bits and cycles of one schedule on one device for one problem.

    ``timing`` is there on every device whose file has the numbers for it, ``numerics`` unless it was
    switched off.  ``inputs`` says where Q, K and V come from, ``spread`` how far the bits depend on
    assumed arithmetic, ``orders`` what other collectives and row blocks of a node make of the same
    partial sums, ``finite`` what is finite on the same sample where the output is not,
    ``presets`` what other presets give; ``notes`` are what the run wants its reader to know, ``ignored``
    what of the workload's attention it was told to leave out.  ``asked`` are the options that ask for
    this run on a command line (None: none can).
    """

    name: str
    schedule: str
    precision: str
    formats: dict[str, str]
    device: DeviceSpec
    workload: str
    inputs: str
    problem: AnyProblem
    tiling: Tiling
    program: TileProgram
    timing: TimingResult | None
    numerics: NumericResult | None
    spread: tuple[Spread, ...] = ()
    orders: tuple[Spread, ...] = ()
    finite: tuple[FiniteChoice, ...] = ()
    notes: tuple[str, ...] = field(default=())
    ignored: tuple[str, ...] = ()
    presets: tuple[PresetOutcome, ...] = ()
    asked: Asked | None = None

    @property
    def cycles(self) -> int:
        """Cycles of the device clock that the cores take, without the launch."""
        return self._timed().cycles

    @property
    def latency_us(self) -> float:
        """Whole call in microseconds, launch included."""
        return self._timed().latency_s * 1e6

    def _timed(self) -> TimingResult:
        if self.timing is None:
            raise SpecError(f"{self.device.name} has no timing model yet: this run has values only")
        return self.timing

    @property
    def output(self) -> Any:
        """Output tensor (batch, heads, seq_q, value_head_dim), or None without numerics."""
        return None if self.numerics is None else self.numerics.output

    def __repr__(self) -> str:
        """Return what was run and what came out, on one line."""
        time = "" if self.timing is None else f", {self.cycles:,} cycles, {self.latency_us:,.2f} us"
        rmse = None if self.numerics is None else self.numerics.error.rmse
        is_lost = self.numerics is not None and rmse is None
        error = ", output not finite" if is_lost else "" if rmse is None else f", relative RMSE {rmse:.2e}"
        return f"<RunData {self.name} on {self.device.name}, {self.precision}{time}{error}>"

    @property
    def tflops(self) -> float:
        """Useful operations (masked pairs not counted) per second of the whole call, in 1e12."""
        return self.program.flops / self._timed().latency_s / 1e12
