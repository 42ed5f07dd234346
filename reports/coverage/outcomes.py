"""Runs the launches of recordings on two devices and writes ``outcomes.csv``: read, or the message that refuses one.

``python -m reports.coverage.outcomes calls.npz ... [--repository NAME]``, from the repository's folder; the rows of
launches that the file has already are replaced.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import npusim
from npusim.errors import NpusimError, one_line
from npusim.kernels.triton.calls import read_calls
from reports.coverage.page import DEVICES, RECORDED, rows

FIELDS = ("launch", "repository", "device", "outcome", "relative_rmse", "message")


def outcomes(path: Path, repository: str) -> list[dict[str, str]]:
    """Return the outcomes of every launch of a recording on each device."""
    made = list[dict[str, str]]()
    for call in read_calls(path):
        for device in DEVICES:
            row = {"launch": f"{path.stem} {call.name}", "repository": repository, "device": device}
            try:
                done = npusim.run(call.schedule, hw=device)
            except NpusimError as error:
                made.append({**row, "outcome": "refused", "relative_rmse": "", "message": one_line(error)})
                continue
            rmse = done.numerics.error.rmse if done.numerics else None
            made.append(
                {**row, "outcome": "read", "relative_rmse": "" if rmse is None else f"{rmse:.1e}", "message": ""}
            )
    return made


def main() -> None:
    """Write the outcomes of the recordings that are named."""
    parser = argparse.ArgumentParser(description="Run recorded launches and write outcomes.csv")
    parser.add_argument("files", nargs="+", type=Path, metavar="calls.npz")
    parser.add_argument("--repository", default="", help="where the kernels are from")
    given = parser.parse_args()
    made = [row for path in given.files for row in outcomes(path, given.repository)]
    new = {(row["launch"], row["device"]) for row in made}
    kept = [row for row in rows() if (row["launch"], row["device"]) not in new] if RECORDED.exists() else []
    with RECORDED.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *made], key=lambda row: (row["launch"], row["device"])))


if __name__ == "__main__":
    main()
