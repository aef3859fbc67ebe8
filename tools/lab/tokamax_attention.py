"""Count the machine code of tokamax' splash attention, which MaxText's recipes for tpu7x use: `tokamax_attention` in facts.toml.

    python tools/lab/tokamax_attention.py FOLDER --python ENV/bin/python [--chip tpu7x] [--max-logit 30]

ENV is a virtual environment of its own with tokamax in it, such as MaxText's: `pip install 'maxtext[tpu]==0.2.5'`. 8 heads of 8,192 tokens
and 128 numbers that no mask cuts, so that no scalar decides a branch; blocks are those of MaxText's run of 131,072 tokens. Prints for each
kernel the cycles that it issues, waits for HBM, and the share of the bf16 peak.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from maxlm.hardware.chips import chip_named
from maxlm.kernel_lab import bundles, execute
from maxlm.kernel_lab.counted import TOPOLOGIES

HEADS, TOKENS, HEAD_DIM = 8, 8192, 128
MATMULS = {"fwd": 2, "dkv": 5}  # by a word in the name of a kernel
COMPILE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernels, splash_attention_mask as masks

topology, heads, tokens, head_dim, max_logit = sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5])
rows, columns = kernels.QKVLayout.HEAD_DIM_MINOR, kernels.QKVLayout.SEQ_MINOR
config = kernels.SplashConfig(
    block_q=2048, block_kv=2048, block_kv_compute=512, block_q_dkv=1024, block_kv_dkv=4096, block_kv_dkv_compute=256, dq_reduction_steps=3,
    q_layout=columns, k_layout=rows, v_layout=columns, max_logit_const=max_logit or None,
)
attend = kernels.make_splash_mha(mask=masks.FullMask((tokens, tokens)), config=config, q_seq_shards=1)
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:1]
mesh = Mesh(np.array(devices), ("x",))
heads_first = jax.ShapeDtypeStruct((heads, tokens, head_dim), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
gradients = jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
with jax.set_mesh(mesh):
    jax.jit(gradients).lower(heads_first, heads_first, heads_first).compile()
"""


def main() -> int:
    """Compile in the other environment, and print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--chip", choices=TOPOLOGIES, default="tpu7x")
    parser.add_argument("--max-logit", type=float, default=0.0, help="bound of the logits, in place of a running maximum; 0: none")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    bundles.write_to(str(given.folder.absolute()))
    theirs = {name: value for name, value in os.environ.items() if name not in ("TPU_LIBRARY_PATH", "PYTHONPATH")}
    alone = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    sizes = map(str, (HEADS, TOKENS, HEAD_DIM, given.max_logit))
    subprocess.run([given.python, "-c", COMPILE, TOPOLOGIES[given.chip], *sizes], check=True, env={**theirs, **alone})
    chip = chip_named(given.chip)
    assert chip.clock_hz is not None, "every TPU has a clock"
    for name, paths in bundles.written(given.folder.iterdir()).items():
        if matmuls := next((number for word, number in MATMULS.items() if f"_{word}_" in name), 0):
            run = execute.execute(bundles.load(paths), [], chip.hbm_bytes_per_s_per_device / chip.clock_hz, chip.device_kinds[0])
            ideal = matmuls * 2 * HEADS * TOKENS**2 * HEAD_DIM * chip.clock_hz / chip.peak_bf16_flops_per_device
            limit = "matrix unit" if run.matrix >= run.bundles else "bundles"
            line = f"{name}: {run.cycles:,} cycles ({limit}) + {run.waited:,}, {ideal / (run.cycles + run.waited):.3f} of peak"
            sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
