"""Clean training raises no alarm: 10,000 steps of three kinds of runs, with every watch on and the limits as they are by default."""

import jax
import numpy as np
import pytest
from tiny import tiny_program

from maxlm.config.sections.prepare import PrepareConfig
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.prepare import prepare
from maxlm.training.health import Health
from maxlm.training.layer_figures import figures_of, layer_names

MOE = {"n_experts": 4, "top_k": 2, "d_ff": 32}
KINDS = {
    "warm-up": ({"global_batch": 16}, {"peak_lr": 1e-2, "warmup_steps": 1500}, {}),
    "small batches": ({"global_batch": 1}, {"peak_lr": 3e-3, "warmup_steps": 50}, {}),
    "experts": ({"global_batch": 4}, {"peak_lr": 3e-3, "warmup_steps": 100}, {"moe": MOE}),
}
STEPS = {"warm-up": 3400, "small batches": 3300, "experts": 3300}
WATCHED = {"spike": "skip", "layers": "warn"}


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_no_alarm_in_clean_training(kind, tmp_path):
    train, optimizer, model = KINDS[kind]
    sizes = {"vocab_size": 512, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 64}
    source = PrepareConfig(sources=("python-stdlib",), workers=1, tokenizer={"vocab_size": 512, "train_bytes": 1_000_000})
    data = {"store": str(tmp_path / "store"), "seq_len": 32, "prepare": source.model_dump()}
    train = {"steps": STEPS[kind], "loss_chunks": 1, "z_loss": 0.0, **train}
    program = tiny_program(1, model={**sizes, **model}, data=data, train=train, optimizer=optimizer, health=WATCHED)
    prepare(program.config.data)
    batches = Pipeline(program.config.data, global_batch=train["global_batch"], seed=0, vocab_size=512)
    health, names, found = Health(program.objective.untrained_loss, settings=program.config.health), layer_names(program.config.model), []
    state, first, last = program.init(), [], []
    with jax.set_mesh(program.mesh):
        for n in range(STEPS[kind]):
            state, metrics = program.step(state, batches.device_batch(n, program.batch_sharding))
            seen = jax.device_get(metrics)
            layers = figures_of(seen.values, names)
            found += health.update(n + 1, float(seen.loss), float(seen.grad_norm), layers=layers)
            (first if n < 20 else last).append(float(seen.loss))
    assert [(event.step, event.data["reason"]) for event in found] == []
    assert (int(state.skipped), health.problem) == (0, "")
    assert np.mean(last[-100:]) < np.mean(first) - 1.0, "it did learn"
