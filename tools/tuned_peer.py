"""MaxText's step as an expert tunes it, for docs/benchmarks.md: what to give its compiler, and its time by our cost model.

    python tools/tuned_peer.py --arguments ROW    prints what to give MaxText's train_compile, a line each
    python tools/tuned_peer.py FOLDER             reads FOLDER/ROW.hlo, the scheduled program, of each row; prints its time and ours as JSON

Tuned is what anybody can copy from us: collectives on the SparseCore and scoped VMEM (`maxlm.hardware.xla_flags`), splash attention with a
fused backward pass in blocks of 1,024 queries, a list of the activations to keep, two accumulation steps.
"""

import argparse
import json
import sys
from pathlib import Path

from truth import Row, predict

from maxlm.hardware.xla_flags import SPARSE_CORE, VMEM, Flag

SPLASH = (
    *("sa_use_fused_bwd_kernel=True", "sa_block_q=1024", "sa_block_kv=1024", "sa_block_kv_compute=1024"),
    *("sa_block_q_dkv=1024", "sa_block_kv_dkv=2048", "sa_block_kv_dkv_compute=512"),
)
KEPT = ("decoder_layer_input", "context", "query_proj", "key_proj", "value_proj", "out_proj")
MLP_KEPT = {"dense": ("mlpwi_0", "mlpwi_1"), "experts": ("moe_mlpwi_0", "moe_mlpwi_1")}


def tuned(mlp: str, batch: int, sequence: int) -> tuple[str, ...]:
    """Settings for `batch` sequences a chip, in two accumulation steps; `mlp`: a key of MLP_KEPT."""
    kept = (f"{name}=device" for name in (*KEPT, *MLP_KEPT[mlp]))
    sizes = (f"per_device_batch_size={batch // 2}", "gradient_accumulation_steps=2", f"max_target_length={sequence}")
    return (*sizes, "remat_policy=custom", *kept, *SPLASH, "use_iota_embed=True", "num_vocab_tiling=8")


def flag_text(flag: Flag) -> str:
    """A compiler option as XLA's command line takes it."""
    return f"--{flag.name}={str(flag.value).lower() if isinstance(flag.value, bool) else flag.value}"


FLAGS = tuple(flag_text(flag) for flag in (*VMEM, *SPARSE_CORE))
SOURCE = "docs/benchmarks.md"
ROWS = {
    row.name: (row, ours_s)
    for row, ours_s in (
        (Row("llama3-8b-v5p-128", "v5p:4x4x4", {"fsdp": 64}, ("model_name=llama3.1-8b", *tuned("dense", 4, 8192)), FLAGS, SOURCE), 5.11),
        (
            Row("mixtral-8x7b-v5p-256", "v5p:4x4x8", {"fsdp": 128}, ("model_name=mixtral-8x7b", *tuned("experts", 4, 4096)), FLAGS, SOURCE),
            4.87,
        ),
    )
}  # and the seconds of our step, of the day of the comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--arguments", metavar="ROW", choices=ROWS)
    given = parser.parse_args()
    if given.arguments:
        row, _ = ROWS[given.arguments]
        flags = f'compile_xla_flags="{" ".join(row.flags)}"'
        sys.stdout.write("\n".join((f"compile_topology={row.compile_topology}", *row.settings, flags)) + "\n")
        return
    if given.folder is None:
        parser.error("give a FOLDER of programs, or --arguments ROW")
    found = {name: given.folder / f"{name}.hlo" for name in ROWS}
    if not any(path.exists() for path in found.values()):
        parser.error(f"{given.folder} has none of {', '.join(path.name for path in found.values())}; compile one with --arguments")
    for name, path in found.items():
        if path.exists():
            row, ours_s = ROWS[name]
            peer_s = predict(row, path).total_s
            sys.stdout.write(json.dumps({"row": name, "peer_s": peer_s, "maxlm_s": ours_s, "ratio": ours_s / peer_s}) + "\n")


if __name__ == "__main__":
    main()
