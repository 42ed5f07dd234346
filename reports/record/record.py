"""Record kernels in the forms of Triton's tutorials and predict them; writes ``times.csv``.

The kernels are those of ``tests/ttir``, which runs them from recorded calls; needs Triton, no GPU.
"""

from __future__ import annotations

import csv
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

import npusim
from npusim.kernels.triton.calls import Calls

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "tests"

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Devices of the page.
DEVICES = ("h200", "ascend_910b2")
COLUMNS = ("tutorial", "kernel", "sizes", "programs", "bytes", "flops", *(f"{d}_us" for d in DEVICES))
COLUMNS += (*(f"{d}_rmse" for d in DEVICES), "launch_s", "again_s", "file_bytes", "predict_s")
#: Number of multiprocessors of the H200 that recorded programs read.
SMS = 132


def _empty(*shape: int, fmt: str = "float16") -> Any:
    return np.zeros(shape, fmt)  # takes no memory before it is written


def launches() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yield tutorial, sizes and launch of each form."""
    if str(KERNELS) not in sys.path:
        sys.path.insert(0, str(KERNELS))
    k = import_module("ttir.recorded_kernels")
    n, rows, columns, m = 1 << 22, 4096, 1024, 2048
    x, y = _empty(n, fmt="float32"), _empty(rows, columns, fmt="float32")
    yield "01", f"{n:,} elements", lambda: k.add.fn[(n // 1024,)](x, x.copy(), x.copy(), n, B=1024)
    words = {"sy": columns, "sx": columns, "rows": rows, "columns": columns, "B": 1024, "num_stages": 4}
    yield "02", f"{rows} x {columns}", lambda: k.softmax_rows[(4 * SMS,)](y.copy(), y, **words, num_warps=8)
    a, b, c = (_empty(m, m) for _ in "abc")
    steps = {"am": m, "ak": 1, "bk": m, "bn": 1, "cm": m, "cn": 1}
    tile = {"BM": 128, "BN": 128, "BK": 64}
    of = {"M": m, "N": m, "K": m, **tile}
    more: dict[str, Any] = {"GROUP": 8, "ACT": "", "num_warps": 8, "num_stages": 3}
    yield "03", f"{m} x {m} x {m}", lambda: k.product[((m // 128) ** 2,)](a, b, c, None, **of, **steps, **more)
    z, w, s = _empty(rows, rows), _empty(rows), _empty(rows, fmt="float32")
    norm = {"stride": rows, "N": rows, "eps": 1e-5, "BLOCK": 4096, "num_warps": 8}
    yield "05", f"{rows} x {rows}", lambda: k.layer_norm[(rows,)](z, z.copy(), w, w.copy(), s, s.copy(), **norm)
    heads, length, d = 32, 4096, 64
    q = [_empty(1, heads, length, d) for _ in "qkvo"]
    sums = _empty(heads, length, fmt="float32")
    words = {"scale": d**-0.5, "Z": 1, "H": heads, "S": length, "D": d, "BM": 128, "BN": 64, "num_warps": 4}
    for name, causal in (("06", False), ("06 causal", True)):
        launch = partial(k.attention[(length // 128, heads)], *q, sums, **words, CAUSAL=causal)
        yield name, f"{heads} heads of {d}, {length} tokens", launch
    yield (
        "09",
        f"{m} x {m} x {m}, persistent",
        lambda: k.persistent_product[(SMS,)](a, b, c, **of, SMS=SMS, num_warps=8),
    )
    yield (
        "09 descriptors",
        f"{m} x {m} x {m}, descriptors",
        lambda: k.descriptor_product[(m // 128, m // 128)](a, b, c, **of, num_warps=8),
    )


def recorded(launch: Callable[[], object]) -> tuple[Any, float]:
    """Return the call of a launch, and the processor seconds of recording it."""
    with npusim.record() as calls:
        begin = time.process_time()
        launch()
        seconds = time.process_time() - begin
    (call,) = calls
    return call, seconds


def predicted(tutorial: str, sizes: str, launch: Callable[[], object]) -> dict[str, object]:
    """Return a row of the file."""
    (call, first), (_, again) = recorded(launch), recorded(launch)
    with TemporaryDirectory() as folder:
        file = Calls([call]).save(Path(folder) / "calls.npz").stat().st_size
    floats = [x for x in call.tensors.values() if not x.is_integer]
    moved = sum(int(np.prod(x.shape)) * np.dtype(x.fmt).itemsize for x in floats)
    row: dict[str, object] = {"tutorial": tutorial, "kernel": call.name, "sizes": sizes, "bytes": moved}
    row |= {"programs": int(np.prod(call.grid)), "launch_s": f"{first:.3f}", "again_s": f"{again:.4f}"}
    row["file_bytes"], begin = file, time.process_time()
    for device in DEVICES:
        result = npusim.run(call.schedule, hw=device)
        assert result.numerics is not None
        row[f"{device}_us"], row["flops"] = f"{result.latency_us:.3f}", result.program.flops or 0
        row[f"{device}_rmse"] = f"{result.numerics.error.rmse:.3g}"
    return {**row, "predict_s": f"{time.process_time() - begin:.1f}"}


def main() -> None:
    """Write the file."""
    rows = [predicted(*each) for each in launches()]
    with (HERE / "times.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
