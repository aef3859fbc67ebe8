"""Attention's share of peak as a function of the sequence length, from counts of `maxlm kernels sweep --json`.

    maxlm kernels sweep --json --shape llama-2k --shape llama-4k ... > counts.json
    python tools/lab/attention_lengths.py counts.json ...

Takes the best blocks at each length and fits, for each chip, implementation and pass,

    share(length) = limit / (1 + tokens / length)

by least squares of the relative error. Prints the counts as a table, the errors of the fit, and the lines of `maxlm/hardware/facts.toml`.
`--json FILE` writes all of it there.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxlm.kernel_lab.counted import Row
from maxlm.kernel_lab.problems import shape_of

FACTS = {"flash": "our_attention", "splash": "attention"}  # fields of `reached`, by implementation
Key = tuple[str, str, str]  # chip, implementation, pass


def main() -> None:
    """Fit the counts in the given files."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("counts", nargs="+", type=Path)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    best = best_rows(Row(**row) for path in given.counts for row in json.loads(path.read_text(encoding="utf-8")))
    fits = {key: fit({length: row.peak for length, row in of_key.items()}) for key, of_key in best.items() if len(of_key) > 1}
    for line in (*table(best, fits), *facts(fits)):
        sys.stdout.write(f"{line}\n")
    if given.json:
        given.json.write_text(json.dumps(document(best, fits), indent=1), encoding="utf-8")


def best_rows(rows: Iterable[Row]) -> dict[Key, dict[int, Row]]:
    """The fastest row of each chip, implementation, pass and length: of plain causal attention, head dim 128."""
    best: dict[Key, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        shape = shape_of("attention", row.shape)
        if row.problem or shape.head_dim != 128 or shape.window or shape.documents or shape.softcap:
            continue
        of_key = best[row.chip, row.implementation, row.part]
        if shape.seq_len not in of_key or row.total < of_key[shape.seq_len].total:
            of_key[shape.seq_len] = row
    return {key: dict(sorted(of_key.items())) for key, of_key in best.items()}


def fit(shares: Mapping[int, float]) -> tuple[float, float]:
    """(limit, tokens): 1 / share is a line over 1 / length, by least squares of relative errors; the limit is at most 1."""
    lengths, reached = np.array(list(shares), float), np.array(list(shares.values()))
    (constant, slope), *_ = np.linalg.lstsq(np.stack([reached, reached / lengths], axis=1), np.ones(len(reached)), rcond=None)
    if constant < 1:
        constant, by_length = 1.0, reached / lengths
        slope = by_length @ (1 - reached) / (by_length @ by_length)
    return float(1 / constant), float(slope / constant)


def share_at(length: int, limit: float, tokens: float) -> float:
    """The formula."""
    return limit / (1 + tokens / length)


def table(best: Mapping[Key, Mapping[int, Row]], fits: Mapping[Key, tuple[float, float]]) -> Sequence[str]:
    """Rows of a Markdown table: share of peak at each length, blocks, and the error of the fit; > marks lower bounds of cycles."""
    lengths = sorted({length for of_key in best.values() for length in of_key})
    lines = [
        f"| chip, kernel, pass | {' | '.join(f'{length:,}' for length in lengths)} | limit, tokens |",
        "|---" * (len(lengths) + 2) + "|",
    ]
    for key, of_key in best.items():
        cells = []
        for length in lengths:
            row = of_key.get(length)
            error = f", {share_at(length, *fits[key]) / row.peak - 1:+.1%}" if row and key in fits else ""
            cells.append(f"{'<' if row.lower_bound else ''}{row.peak:.1%} ({row.blocks}{error})" if row else "")
        fitted = f"{fits[key][0]:.3f}, {fits[key][1]:,.0f}" if key in fits else ""
        lines.append(f"| {' '.join(key)} | {' | '.join(cells)} | {fitted} |")
    return lines


def facts(fits: Mapping[Key, tuple[float, float]]) -> Sequence[str]:
    """Fields of `reached` for each chip."""
    by_field: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (chip, implementation, part), (limit, tokens) in fits.items():
        by_field[chip, FACTS[implementation]].append(f"{part} = [{limit:.3f}, {tokens:.0f}]")
    return [f"{chip}: {name} = {{{', '.join(sorted(parts, reverse=True))}}}" for (chip, name), parts in sorted(by_field.items())]


def document(best: Mapping[Key, Mapping[int, Row]], fits: Mapping[Key, tuple[float, float]]) -> list[dict[str, Any]]:
    """Everything that was counted and fitted."""
    return [
        {
            **dict(zip(("chip", "implementation", "pass"), key, strict=True)),
            "fit": {"limit": round(fits[key][0], 4), "tokens": round(fits[key][1], 1)} if key in fits else None,
            "lengths": [
                {
                    "length": length,
                    "blocks": row.blocks,
                    "cycles": row.cycles,
                    "waits": row.waited,
                    "sums": row.sums,
                    "share": round(row.peak, 4),
                    "matrix": round(row.matrix, 4),
                    "lower_bound": row.lower_bound,
                    "fit_error": round(share_at(length, *fits[key]) / row.peak - 1, 4) if key in fits else None,
                }
                for length, row in of_key.items()
            ],
        }
        for key, of_key in best.items()
    ]


if __name__ == "__main__":
    main()
