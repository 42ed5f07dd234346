"""Results of `tests/ttir/silicon_cases` on a GPU, as digests: ``tests/ttir/silicon_h200.json``.

``PYTHONPATH=tests python reports/silicon/triton_bits.py OUT.json`` needs Triton, torch, numpy and ml_dtypes.  The
stored digests are those of an H200 (Triton 3.6.0, torch 2.11).
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from ttir import silicon_cases, silicon_kernels

#: Formats that torch has and numpy has not: a format of the same bits, and torch's.
BITS = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}


def on_gpu(array):
    """Return an array as a tensor of the GPU."""
    same, of_torch = BITS.get(array.dtype.name, (array.dtype, None))
    tensor = torch.from_numpy(array.view(same).copy())
    return (tensor if of_torch is None else tensor.view(of_torch)).cuda()


def main(path):
    """Launch, compare with what was there before, and write."""
    inputs, results = {}, {}
    for case in (*silicon_cases.first(), *silicon_cases.second(), *silicon_cases.third()):
        arrays = {name: x for name, x in case.words.items() if isinstance(x, np.ndarray)}
        inputs[case.name] = silicon_cases.digest_of_inputs(case)
        words = {name: on_gpu(x) if name in arrays else x for name, x in case.words.items()}
        getattr(silicon_kernels, case.kernel)[case.grid](**words, **case.options)
        for name, before in arrays.items():
            size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[before.itemsize]
            after = words[name].view(size).cpu().numpy().view(before.dtype)
            if after.tobytes() != before.tobytes():
                results[f"{case.name}/{name}"] = silicon_cases.digest(after)
    Path(path).write_text(json.dumps({"inputs": inputs, "results": results}, indent=0) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
