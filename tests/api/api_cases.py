"""Settings of a tiny run, and an observer that keeps the records it gets."""

import maxlm

MODEL = {"vocab_size": 320, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}


def settings(folder, name):
    """Settings of a run in `folder`, on one of the tests' virtual devices' worth of rows each."""
    prepare = {"sources": [str(folder / "texts")], "eval_fraction": 0.1, "workers": 1, "tokenizer": {"vocab_size": 300}}
    return {
        "model": MODEL,
        "data": {"store": str(folder / "store"), "seq_len": 32, "prepare": prepare},
        "train": {"steps": 4, "global_batch": 8, "loss_chunks": 2, "eval_batches": 2, "z_loss": 1e-3},
        "optimizer": {"warmup_steps": 2, "peak_lr": 1e-2},
        "mesh": {"fsdp": 8},
        "memory": {"remat": "none"},
        "precision": {"compute": "float32"},
        "checkpoint": {"every_steps": 2, "keep": 10},
        "run": {"name": name, "dir": str(folder / "runs"), "tensorboard": False, "log_every": 1},
    }


class Recorder(maxlm.Observer):
    """Keeps what an observer is told."""

    def __init__(self):
        self.steps, self.events = [], []

    def on_step(self, record):
        self.steps.append(record)

    def on_event(self, event):
        self.events.append(event)
