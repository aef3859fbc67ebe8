"""An objective is one class: what its batch holds, its loss and its metrics reach the step, the records and the report on every layout."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import GLOBAL_BATCH, first_state, gradients_of, run_steps, tiny_batch, tiny_program

from maxlm.base.metric import Metric, charts_of
from maxlm.config.choices import implementation, names, part
from maxlm.config.schema import ObjectiveConfig
from maxlm.objectives import ArraySpec, FurtherTokens, NextToken, Sums
from maxlm.telemetry.console import describe
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.report import write_report
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import meter

ROW_WEIGHT_B = np.linspace(-3.0, -1.0, GLOBAL_BATCH, dtype=np.float32)


class WeightedBatch(NamedTuple):
    tokens_BS: Any
    targets_BS: Any
    weights_BS: Any
    segment_ids_BS: Any
    positions_BS: Any
    random_BS: Any
    row_weight_B: Any


class Weighted(NextToken):
    """Next-token prediction with one more array in the batch, and a metric of every kind."""

    metrics = (
        *FurtherTokens.metrics,
        Metric("rows", "Rows of a batch", reduce="sum"),
        Metric("heaviest", "Weight of the heaviest row", "times <1>", reduce="max", console="heavy {:.1f}"),
    )

    def batch_spec(self):
        return WeightedBatch(*super().batch_spec(), ArraySpec((GLOBAL_BATCH,), jnp.float32, ("batch",)))

    def head(self, model, output, batch, summed):
        total, sums = super().head(model, output, batch, summed)
        weight_B = batch.row_weight_B
        values = {**sums.added, "rows": jnp.float32(len(weight_B)), "heaviest": jnp.max(weight_B)}
        return total, self.sums(batch, values, sums.routing)


def weighted_batch(n):
    return WeightedBatch(*tiny_batch(n), ROW_WEIGHT_B)


LAYOUTS = {
    "reduced once": ({"data": 2, "fsdp": 1}, {"train": {"microbatches": 2}}),
    "stages": ({"stage": 2, "fsdp": 1}, {"train": {"microbatches": 2}}),
    "workers": ({}, {"diloco": {"workers": 2, "every": 2}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_reduced_as_they_are_declared(layout):
    """A maximum of negative numbers, too: nothing starts at 0."""
    mesh, sections = LAYOUTS[layout]
    program = tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, **sections)
    program = replace(program, objective=Weighted(program.config))
    if layout == "workers":  # the whole step, which also hands the metrics on
        _, (metrics,) = run_steps(program, 1, weighted_batch)
        values = metrics.values
    else:
        state = first_state(program)
        figures = jax.jit(lambda *given: gradients_of(program)(*given)[0])  # the gradient is left out of the program
        with jax.set_mesh(program.mesh):
            sums = figures(state.params, state.model_state, jax.device_put(weighted_batch(0), program.batch_sharding))
        values = {**sums.values(Weighted.metrics), "tokens": sums.denominator}
    assert float(values["heaviest"]) == -1.0
    assert float(values["tokens"]) == tiny_batch(0).weights_BS.sum()
    assert float(values["rows"]) == GLOBAL_BATCH
    assert float(values["loss"]) == pytest.approx(math.log(128), rel=0.1)


def test_every_objective_can_be_named_in_a_config():
    kinds = [section.model_fields["kind"].annotation.__args__[0] for section in get_args(get_args(ObjectiveConfig)[0])]
    assert kinds == list(names("objective"))
    ours = [implementation(part("objective", kind)) for kind in kinds]
    assert all({metric.name for metric in objective.metrics} >= {"loss"} for objective in ours)


def test_a_declaration_is_all_that_records_console_and_report_need(tmp_path, monkeypatch):
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)
    program = tiny_program(1)
    stand_in = SimpleNamespace(config=program.config, mesh=SimpleNamespace(size=1), metrics=Weighted.metrics, objective=program.objective)
    run, seen = RunDirectory.create(tmp_path, "r"), []
    console = SimpleNamespace(on_step=seen.append, on_event=lambda event: None, close=lambda: None)
    observers = Observers([FileObserver(run), console])
    observers.on_event(Event("start", 0, data={"metrics": charts_of(Weighted.metrics)}))
    measured = meter.Meter(stand_in, observers, 0)
    for step in range(1, 4):
        ahead = {"loss_ahead": jnp.array([12.0, 16.0]), "tokens_ahead": jnp.array([4.0, 2.0])}
        sums = Sums(jnp.float32(4), {"loss": jnp.float32(8), **ahead}, {"heaviest": jnp.float32(-step)})
        values = sums.values(Weighted.metrics) | {
            "grad_norm": jnp.float32(1),
            "lr": jnp.float32(1),
            "tokens": sums.denominator,
            "skipped": jnp.int32(0),
        }
        measured.stepped(step, meter.Metrics(values), 0.0)
    measured.flush()
    observers.close()
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert {key: last[key] for key in ("loss", "loss_ahead_1", "loss_ahead_2", "heaviest")} == {
        "loss": 2.0, "loss_ahead_1": 3.0, "loss_ahead_2": 8.0, "heaviest": -3.0,
    }  # fmt: skip
    assert "heavy -3.0" in describe(seen[-1], 10, 1.0)
    page = write_report([run.path], tmp_path / "report.html").read_text()
    for title in ("Weight of the heaviest row", "Loss of a token further ahead"):
        assert page.count(f"<figcaption>{title} ") == 1
    assert "times &lt;1&gt;" in page and "times <1>" not in page
    assert "Rows of a batch" not in page, "it was never recorded"


def test_the_batch_is_split_as_its_spec_says():
    program = tiny_program(4, mesh={"data": 2, "context": 2, "fsdp": 1})
    program = replace(program, objective=Weighted(program.config))
    batch = jax.device_put(weighted_batch(0), program.batch_sharding)
    assert batch.tokens_BS.addressable_shards[0].data.shape == (GLOBAL_BATCH // 2, tiny_batch().tokens_BS.shape[1] // 2)
    assert batch.row_weight_B.addressable_shards[0].data.shape == (GLOBAL_BATCH // 2,)
