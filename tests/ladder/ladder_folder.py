"""A ladder file, and runs that have ended with the losses of a known form, without training."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from maxlm.config.loader import dump, load_as
from maxlm.ladder.grid import Rung, make_grid
from maxlm.ladder.settings import LadderSettings

BASE = """
model: {vocab_size: 320, d_model: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, d_ff: 64}
data: {store: store, seq_len: 32}
train: {global_batch: 8, steps: 10, eval_batches: 1}
optimizer: {warmup_steps: 4}
"""
LADDER = """
base: BASE
folder: out
sizes:
  a: {d_model: 16, n_layers: 1}
  b: {d_model: 32, n_layers: 2}
  c: {d_model: 64, n_layers: 2}
  d: {d_model: 128, n_layers: 4}
tokens: [2e5, 1e6, 5e6]
fit: {samples: 20}
"""


dump_once = lru_cache(maxsize=256)(dump)  # a config takes 10 ms, and tests write a dozen, some of them again and again


def write_ladder(folder: Path, text: str = LADDER) -> Path:
    """A ladder file and its base in `folder`, which is to be the working folder."""
    (folder / "base.yml").write_text(BASE)
    file = folder / "ladder.yml"
    file.write_text(text.replace("BASE", str(folder / "base.yml")))
    return file


def rungs_of(file: Path) -> list[Rung]:
    return _rungs(str(file), file.read_text(), (file.parent / "base.yml").read_text())


@lru_cache(maxsize=4)
def _rungs(file: str, *_: str) -> list[Rung]:
    return make_grid(load_as(LadderSettings, file))


def loss_of(rung: Rung) -> float:
    return float(1.5 + 12 / rung.parameters**0.3 + 60 / rung.tokens**0.35)


def end_run(folder: Path, rung: Rung, loss: float | None = None, reason: str = "done") -> None:
    """Write the files that a run leaves behind."""
    path = folder / "runs" / rung.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yml").write_text(dump_once(rung.config))
    events = [{"kind": "start", "step": 0, "time": 100.0}]
    stop = {
        "kind": "stop",
        "step": rung.config.total_steps,
        "time": 160.0,
        "reason": reason,
        "eval_loss": loss_of(rung) if loss is None else loss,
    }
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*events, stop]))


def end_all(folder: Path, rungs: list[Rung], noise: float = 0.0, loss: Callable[[Rung], float] = loss_of) -> None:
    dice = np.random.default_rng(0)
    for rung in rungs:
        end_run(folder, rung, loss(rung) * float(np.exp(noise * dice.standard_normal())))
