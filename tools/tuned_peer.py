"""MaxText's step as an expert tunes it, for docs/benchmarks.md: what to give its compiler, and its time by our cost model.

    python tools/tuned_peer.py FOLDER --maxtext-python ENV/bin/python

ENV is a virtual environment of its own, of Python 3.12, with MaxText in it: `pip install 'maxtext[tpu]==0.2.5'`. FOLDER/ROW.hlo, the
scheduled program of a row, is made where it is missing. Both steps are priced by our cost model, and a line of JSON tells of each row.

Tuned is what anybody can copy from us: collectives on the SparseCore and scoped VMEM (`maxlm.hardware.xla_flags`), splash attention with a
fused backward pass in blocks of 1,024 queries, a list of the activations to keep, two accumulation steps.
"""

import argparse
import json
import sys
from pathlib import Path

from maxtext_schedule import schedule_missing
from truth import REPOSITORY, Row, predict

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
RECIPES = REPOSITORY / "docs" / "recipes.json"
PARTS = ("total_s", "matmul_s", "attention_s", "kernel_s", "memory_s", "exposed_s")
DENSE, EXPERTS = "model_name=llama3.1-8b", "model_name=mixtral-8x7b"
ROWS = {
    row.name: (row, recipe)
    for recipe, row in (
        ("llama3-8b-v5p-128", Row("8b-v5p", "v5p:4x4x4", {"fsdp": 64}, (DENSE, *tuned("dense", 4, 8192)), FLAGS, SOURCE)),
        ("mixtral-8x7b-v5p-256", Row("8x7b-v5p", "v5p:4x4x8", {"fsdp": 128}, (EXPERTS, *tuned("experts", 4, 4096)), FLAGS, SOURCE)),
        ("llama3-8b-v6e-256", Row("8b-v6e", "v6e:16x16", {"fsdp": 256}, (DENSE, *tuned("dense", 2, 8192)), FLAGS, SOURCE)),
        (
            "llama3-8b-v6e-256",
            Row("8b-v6e-default", "v6e:16x16", {"fsdp": 256}, (DENSE, "per_device_batch_size=2", "max_target_length=8192"), (), SOURCE),
        ),
    )
}  # and our recipe, which trains as many tokens in a step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--maxtext-python", type=Path)
    given = parser.parse_args()
    schedule_missing(given.maxtext_python, {name: row.to_compile for name, (row, _) in ROWS.items()}, given.folder)
    ours = json.loads(RECIPES.read_text(encoding="utf-8"))
    for name, (row, recipe) in ROWS.items():
        if (path := given.folder / f"{name}.hlo").exists():
            peer, our_s = predict(row, path), ours[recipe]["step_s"]
            parts = {part: getattr(peer, part) for part in PARTS}
            sys.stdout.write(json.dumps({"row": name, "recipe": recipe, "maxlm_s": our_s, "ratio": our_s / peer.total_s, **parts}) + "\n")


if __name__ == "__main__":
    main()
