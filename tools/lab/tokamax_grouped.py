"""Fit grouped matmuls of tokamax to the times that its authors measured, and count their machine code: `tokamax_grouped` in facts.toml.

    python tools/lab/tokamax_grouped.py FOLDER --python ENV/bin/python [--chip tpu7x]

ENV is a virtual environment of its own with tokamax in it, such as MaxText's: `pip install 'maxtext[tpu]==0.2.5'`. tokamax installs
tables of measured times, on each chip, of the first form of its `ragged_dot` (`pallas_tpu_ragged_dot_gmm` in programs) at the best of many
tilings, with group sizes drawn at random. Prints the share of the bf16 peak and the rows of a boundary that fit these times best, then
counts of the kernels in bf16 and e4m3 for the experts of Qwen3 235B, each at the tiles that tokamax chooses for the format.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from maxlm.cost.efficiency import HBM_SHARE, GroupedMatmul
from maxlm.hardware.chips import Chip, GroupedShares, chip_named
from maxlm.kernel_lab import bundles, execute
from maxlm.kernel_lab.counted import TOPOLOGIES

FOLDERS = {"tpu7x": "tpu7x", "v6e": "tpu_v6_lite", "v5p": "tpu_v5", "v5e": "tpu_v5_lite"}  # tokamax' names of chips
TABLE = "tokamax/data/autotuning/{}/pallas_mosaic_tpu_ragged_dot.json"
CONTRACTED = {"[[1], [1]]": "forward", "[[1], [2]]": "by_transpose", "[[0], [0]]": "transposed_dw"}
NARROWEST, FEWEST_GROUPS = 512, 64  # shapes of experts; narrower ones leave the matrix unit idle
SHARES, EDGES = [place / 200 for place in range(80, 200)], range(0, 1200, 10)
ROWS, DEEP, WIDE, GROUPS = 65536, 4096, 1536, 16  # that are counted: as many rows of a group as in the published run
TILES = {  # by part and format: the best of the table, and those of tokamax' heuristic, as MaxText's program has them
    ("forward", "bf16"): (256, 4096, 1536),
    ("forward", "e4m3"): (128, 4096, 768),
    ("by_transpose", "bf16"): (1024, 1536, 1024),
    ("by_transpose", "e4m3"): (128, 768, 4096),
    ("transposed_dw", "bf16"): (256, 2048, 1536),
    ("transposed_dw", "e4m3"): (1024, 1024, 1536),
}
COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np, qwix
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernels

topology, part, format = sys.argv[1:4]
rows, deep, wide, groups, *tiling = map(int, sys.argv[4:])
mesh = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]), ("x",))
left, right = {
    "forward": ((rows, deep), (groups, deep, wide)),
    "by_transpose": ((rows, wide), (groups, deep, wide)),
    "transposed_dw": ((rows, deep), (rows, wide)),
}[part]
low = format != "bf16"
of_left = jnp.bfloat16 if not low else jnp.float8_e5m2 if part == "by_transpose" else jnp.float8_e4m3fn
of_right = jnp.bfloat16 if not low else jnp.float8_e5m2 if part == "transposed_dw" else jnp.float8_e4m3fn
scaled = {"forward": ((rows, 1), (1, 1, wide)), "by_transpose": ((rows, 1), None), "transposed_dw": (None, (1, wide))}[part]
whole = NamedSharding(mesh, PartitionSpec())
arrays = [(groups,), left, right, *(scale for scale in scaled if low and scale)]
dtypes = [jnp.int32, of_left, of_right, *(jnp.float32 for scale in scaled if low and scale)]

def run(sizes, left, right, *scales):
    scales = iter(scales)
    left, right = (qwix.QArray(qvalue=array, scale=next(scales)) if low and of else array for array, of in zip((left, right), scaled))
    options = dict(group_sizes=sizes, precision=jax.lax.Precision.DEFAULT, out_dtype=jnp.bfloat16, tiling=tuple(tiling))
    if part == "transposed_dw":
        return kernels.tgmm(left.mT, right, **options)
    return kernels.gmm(left, right, transpose_rhs=part == "by_transpose", **options)

with jax.set_mesh(mesh):
    given = [jax.ShapeDtypeStruct(*one, sharding=whole) for one in zip(arrays, dtypes)]
    jax.jit(run).lower(*given).compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": "61440"})
"""


@dataclass(frozen=True)
class Measured:
    """A row of tokamax' table: a grouped matmul in bf16 and the median of its times."""

    matmul: GroupedMatmul
    seconds: float

    def error(self, chip: Chip, share: float, edge: int) -> float:
        """Relative error of the price with these figures."""
        figures = dict.fromkeys(("forward", "by_transpose", "transposed_dw"), (share, edge, 1.0))
        one = self.matmul
        moved = 2 * (one.rows * (one.deep + one.wide) + one.groups * one.deep * one.wide)
        return one.seconds(with_figures(chip, figures), moved, HBM_SHARE * chip.hbm_bytes_per_s_per_device, share) / self.seconds - 1


def with_figures(chip: Chip, figures: Mapping[str, tuple[float, int, float]]) -> Chip:
    """`chip` with these figures of tokamax' grouped matmuls."""
    return replace(chip, reached=replace(chip.reached, tokamax_grouped=GroupedShares(**figures)))


def measured(table: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> Iterator[Measured]:
    """Grouped matmuls of experts in the table of a chip."""
    for text, found in table.items():
        key, times = json.loads(text), [statistics.median(one["evaluation_times_ms"]) for one in found.values()]
        if not times or key["return_residuals"] or not isinstance(key["lhs"], str) or not isinstance(key["group_sizes"], dict):
            continue
        part = CONTRACTED[str(key["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0])]
        left, right = ([int(size) for size in re.findall(r"\d+", key[side].split("[")[1])] for side in ("lhs", "rhs"))
        deep, wide = (left[1], right[1]) if part == "transposed_dw" else right[1:]
        groups = key["group_sizes"]["num_groups"]
        if groups >= FEWEST_GROUPS and min(deep, wide) >= NARROWEST and deep % 256 == wide % 256 == 0:
            yield Measured(GroupedMatmul(left[0], deep, wide, groups, part, ours=False, tokamax=True), min(times) / 1e3)


def fit(chip: Chip, rows: list[Measured]) -> tuple[float, int]:
    """The share of peak and the rows of a boundary with the least sum of squared logarithms of errors."""
    return min(itertools.product(SHARES, EDGES), key=lambda pair: sum(math.log1p(row.error(chip, *pair)) ** 2 for row in rows))


def scalars(tall: int, *, empty: bool) -> list[np.ndarray]:
    """Scalars that a kernel branches on, for groups of drawn sizes in tiles of `tall` rows."""
    sizes = np.bincount(np.random.default_rng(0).choice(GROUPS, ROWS), minlength=GROUPS)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    visits = [(group, tile) for group in range(GROUPS) for tile in range(offsets[group] // tall, -(-offsets[group + 1] // tall))]
    assert all(sizes) or not empty
    visits_of = [*visits, *[visits[-1]] * (ROWS // tall + GROUPS - 1 - len(visits))]
    groups, tiles = zip(*visits_of, strict=True)
    return [np.asarray(array, np.int32) for array in ([len(visits)], offsets, groups, tiles, [0])]


def count(chip: Chip, part: str, format: str, python: Path, folder: Path) -> execute.Run:
    """Cycles of one kernel, compiled in the other environment."""
    folder.mkdir(parents=True)
    dump = f"--xla_jf_dump_to={folder.absolute()} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex={'|'.join(bundles.DUMPS)}"
    theirs = {name: value for name, value in os.environ.items() if name not in ("TPU_LIBRARY_PATH", "PYTHONPATH")}
    alone = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": dump}
    tiles = TILES[part, format]
    sizes = map(str, (ROWS, DEEP, WIDE, GROUPS, *tiles))
    subprocess.run([python, "-c", COMPILE, TOPOLOGIES[chip.name], part, format, *sizes], check=True, env={**theirs, **alone})
    (paths,) = (paths for name, paths in bundles.written(folder.iterdir()).items() if "ragged_dot" in name)
    assert chip.clock_hz is not None, "every TPU has a clock"
    own = scalars(tiles[0], empty=part == "transposed_dw")
    return execute.execute(bundles.load(paths), own, chip.hbm_bytes_per_s_per_device / chip.clock_hz, chip.device_kinds[0])


def main() -> int:
    """Print the fit of each part, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--chip", choices=TOPOLOGIES, default="tpu7x")
    given = parser.parse_args()
    chip = chip_named(given.chip)
    (packages,) = given.python.absolute().parents[1].glob("lib/python3.*/site-packages")
    of_part: dict[str, list[Measured]] = defaultdict(list)
    for row in measured(json.loads((packages / TABLE.format(FOLDERS[given.chip])).read_text(encoding="utf-8"))):
        of_part[row.matmul.part].append(row)
    for part, rows in of_part.items():
        share, edge = fit(chip, rows)
        errors = [row.error(chip, share, edge) for row in rows]
        spread = f"errors {min(errors):+.0%} to {max(errors):+.0%}, mean {statistics.mean(map(abs, errors)):.0%}"
        sys.stdout.write(f"{part}: {len(rows)} shapes, {share:.3f} of peak, {edge} rows a boundary, {spread}\n")
    for (part, format), tiles in TILES.items():
        run = count(chip, part, format, given.python, given.folder / f"{part}-{format}")
        bound = "matrix unit" if run.matrix >= run.bundles else "bundles"
        sys.stdout.write(f"{part} {format} {tiles}: {run.cycles:,} cycles ({bound}) + {run.waited:,} for HBM\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
