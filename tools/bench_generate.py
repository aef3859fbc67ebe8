"""Tokens per second of generation against the `generate` of transformers, one after the other on this machine.

    python tools/bench_generate.py --torch-python /path/to/an/environment/with/torch/and/transformers/bin/python

A GPT-2 with random weights (124M by default) is made here, exported by `maxlm export`, and loaded by transformers. Both continue the same
prompts greedily by the same number of tokens, in turns: ours, theirs, ours ... Printed are all rates, the median of each, their ratio, the
machine's load before each run, and how many of the continuations are the same. Programs of both are warm: a first run is not counted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

THEIRS = """
import json, sys, time
import torch
from transformers import AutoModelForCausalLM
import transformers
folder, new = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads"
print(json.dumps({"versions": versions}), flush=True)
for line in sys.stdin:
    prompts = json.loads(line)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    began, used = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    seconds, used = time.perf_counter() - began, time.process_time() - used
    print(json.dumps({"seconds": seconds, "cpu": used, "ids": out[:, longest:].tolist()}), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", help="python with torch and transformers; without it only ours is measured")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new", type=int, default=128, help="tokens that continue each prompt")
    parser.add_argument("--shortest", type=int, default=16, help="tokens of the shortest prompt")
    parser.add_argument("--longest", type=int, default=32, help="tokens of the longest prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cpus", type=int, help="use only so many: threads that wait for each other lose most where others compute, too")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50257)
    options = parser.parse_args()
    if options.cpus is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cpus])
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


def measure(options: argparse.Namespace, folder: Path) -> None:
    import jax

    from maxlm.inference.generate import Sampler, generate

    config, params = make_model(options, folder / "run")
    rng = np.random.default_rng(0)
    lengths = np.linspace(options.shortest, options.longest, options.prompts).astype(int)
    prompts = [rng.integers(0, options.vocab, length).tolist() for length in lengths]
    sampler = Sampler(max_new_tokens=options.new, temperature=0)
    tokens = options.prompts * options.new

    def ours() -> tuple[float, float, list[list[int]]]:
        began, used = time.perf_counter(), time.process_time()
        ids = generate(config, params, {}, prompts, sampler, options.vocab)  # an end that never comes
        return time.perf_counter() - began, time.process_time() - used, ids

    began = time.perf_counter()
    _, _, mine = ours()
    print(
        f"jax {jax.__version__}; {len(os.sched_getaffinity(0))} CPUs; first run, compiling: {time.perf_counter() - began:.1f} s", flush=True
    )
    theirs: Any = start_theirs(options, folder) if options.torch_python else None
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(options.turns):
        load = os.getloadavg()[0]
        seconds, used, again = ours()
        assert again == mine, "the same prompts and settings gave other ids"
        rates["ours"].append(tokens / seconds)
        print(f"ours     {tokens / seconds:8.1f} tokens/s, {used:6.1f} s of CPU time, load {load:.1f}", flush=True)
        if theirs is None:
            continue
        load = os.getloadavg()[0]
        answer = ask(theirs, prompts)
        rates["theirs"].append(tokens / answer["seconds"])
        print(f"theirs   {tokens / answer['seconds']:8.1f} tokens/s, {answer['cpu']:6.1f} s of CPU time, load {load:.1f}", flush=True)
    if theirs is not None:
        theirs.terminate()
        same = sum(a == b for a, b in zip(mine, answer["ids"], strict=True))
        medians = {name: statistics.median(values) for name, values in rates.items()}
        print(f"same continuations: {same} of {len(mine)}")
        print(
            f"median: ours {medians['ours']:.1f}, theirs {medians['theirs']:.1f} tokens/s; ratio {medians['ours'] / medians['theirs']:.2f}"
        )


def make_model(options: argparse.Namespace, run: Path) -> tuple[Any, Any]:
    """(config, parameters) of a GPT-2 with random weights, which is also saved as the run that `maxlm export` takes."""
    import jax

    from maxlm.checkpoint import Checkpoints
    from maxlm.config.loader import dump
    from maxlm.config.schema import Config
    from maxlm.models import init_parameters

    width = options.width
    settings: dict[str, Any] = {
        "model": {
            "vocab_size": options.vocab,
            "d_model": width,
            "n_layers": options.layers,
            "n_heads": width // 64,
            "n_kv_heads": width // 64,
            "d_ff": 4 * width,
            "activation": "gelu",
            "norm": "layernorm",
            "bias": "all",
            "learned_positions": {"max_seq_len": 1024},
            "tie_embeddings": True,
            "init_std": 0.1,  # logits that differ by more than rounding
        },
        "data": {"store": "unused", "seq_len": 1024},
        "train": {"steps": 1, "global_batch": 1},
    }
    config = Config(**settings)
    params = jax.jit(lambda: init_parameters(config.model, 0))()
    run.mkdir(parents=True)
    (run / "config.yml").write_text(dump(config), encoding="utf-8")
    checkpoints = Checkpoints(run / "checkpoints", config.checkpoint, {})
    checkpoints.save(0, {"params": params, "model_state": {}}, {})
    checkpoints.close()
    return config.model, params


def start_theirs(options: argparse.Namespace, folder: Path) -> Any:
    """The other program, with the exported model loaded and warm."""
    subprocess.run([sys.executable, "-m", "maxlm", "export", folder / "run", "--out", folder / "hf"], check=True, stdout=subprocess.DEVNULL)
    command = [options.torch_python, "-c", THEIRS, str(folder / "hf"), str(options.new)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it has packages of its own
    pipe = subprocess.PIPE
    theirs: Any = subprocess.Popen(command, cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    print(json.loads(theirs.stdout.readline())["versions"], flush=True)
    ask(theirs, [[1, 2, 3]])
    return theirs


def ask(theirs: Any, prompts: list[list[int]]) -> dict[str, Any]:
    theirs.stdin.write(json.dumps(prompts) + "\n")
    theirs.stdin.flush()
    return json.loads(theirs.stdout.readline())


if __name__ == "__main__":
    main()
