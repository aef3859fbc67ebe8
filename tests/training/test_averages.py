"""The moving average of weights, and the mean of a run's checkpoints: both by hand."""

import shutil

import jax
import numpy as np
import pytest
from tiny import states_of_steps, tiny_batch, tiny_program

from maxlm.checkpoint import Checkpoints
from maxlm.config import UserError, load
from maxlm.config.loader import dump, saved_text
from maxlm.config.schema import EmaConfig
from maxlm.config.sections.branch_from import BranchFromConfig
from maxlm.config.sections.objective import DpoConfig, NextTokenConfig, SftConfig
from maxlm.config.sections.start_from import StartFromConfig
from maxlm.config.table import identity
from maxlm.interop import averaging
from maxlm.interop.averaging import average
from maxlm.training.saved_run import open_run

DECAY, STEPS = 0.27, 3
MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"bias_rate": 0.01}}}


@pytest.fixture(scope="module")
def trained():
    """(program, state after each step as numpy, the last state)."""
    program = tiny_program(2, mesh={"fsdp": 2}, ema={"decay": DECAY})
    return program, *states_of_steps(program, STEPS)


def test_the_average_is_that_of_the_formula(trained):
    """After update n it keeps min(decay, (1 + n) / (10 + n)): 2/11, then 3/12, then the decay."""
    _, states, _ = trained
    average = states[0].params
    for state, kept in zip(states[1:], (2 / 11, 3 / 12, DECAY), strict=True):
        average = jax.tree.map(lambda old, new, kept=kept: kept * old + (1 - kept) * new, average, state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.extra["ema"], average)


def test_it_is_split_as_the_parameters_and_no_skipped_update_moves_it(trained):
    program, states, state = trained
    assert jax.tree.map(lambda leaf: leaf.sharding, state.extra["ema"]) == program.state_shardings.params
    nan = tiny_batch(STEPS)._replace(weights_BS=np.full_like(tiny_batch().weights_BS, np.nan))
    copy = jax.device_put(states[-1], program.state_shardings)
    with jax.set_mesh(program.mesh):
        after, _ = program.step(copy, jax.device_put(nan, program.batch_sharding))
    assert int(after.skipped) == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after.extra["ema"]), states[-1].extra["ema"])


def test_a_checkpoint_says_whether_it_holds_an_average(trained):
    """Of a run without one it does not fit; the decay may change."""
    config = trained[0].config
    other, none = (config.model_copy(update={"ema": ema}) for ema in (EmaConfig(decay=0.5), None))
    assert identity(config, "") == identity(other, "") != identity(none, "")


def test_a_checkpoint_says_its_objective(trained):
    """One that is named and is what there is without the section is the same; settings of an objective may change."""
    config = trained[0].config
    plain, named, sft, dpo, sharper = (
        identity(config.model_copy(update={"objective": objective}), "")
        for objective in (
            None,
            NextTokenConfig(kind="next_token"),
            SftConfig(kind="sft"),
            DpoConfig(kind="dpo"),
            DpoConfig(kind="dpo", beta=1),
        )
    )
    assert plain == named != sft != dpo == sharper
    assert sft["objective.kind"] == "sft"


def test_a_run_resumes_with_its_average_to_the_bit(trained, tmp_path):
    program, states, state = trained
    checkpoints = Checkpoints(tmp_path, program.config.checkpoint, {})
    checkpoints.save(STEPS, state, {})
    checkpoints.close()
    restored = Checkpoints(tmp_path, program.config.checkpoint, {}).restore(program.abstract_state).state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), states[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(states 1 to 3 of a model with experts, drawn at random, as numpy; the folder with a checkpoint of each)."""
    folder = tmp_path_factory.mktemp("run")
    program = tiny_program(1, model=MOE, ema={"decay": DECAY})
    (folder / "config.yml").write_text(dump(program.config))
    checkpoints, states = Checkpoints(folder / "checkpoints", program.config.checkpoint, {}), {}
    abstract, drawn = program.abstract_state, np.random.default_rng(0)
    kept = {"params": abstract.params, "model_state": abstract.model_state, "extra": abstract.extra}
    for step in range(1, STEPS + 1):
        states[step] = jax.tree.map(lambda leaf: drawn.normal(0, 1, leaf.shape).astype(np.float32), kept)
        checkpoints.save(step, jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), states[step], kept), {})
    checkpoints.close()
    return states, folder


@pytest.mark.parametrize(
    ("last", "steps", "kind", "chosen"),
    [(2, [], "raw", [2, 3]), (5, [3, 1], "raw", [1, 3]), (3, [], "ema", [1, 2, 3])],
)
def test_the_mean_of_checkpoints_is_a_model_like_any(run, tmp_path, last, steps, kind, chosen):
    """Parameters, and the biases of the router, are the mean; the new folder opens as any run."""
    states, folder = run
    made = average(folder, tmp_path / "mean", last, steps, kind, lambda done, total: None)
    assert made.steps == chosen
    opened = open_run(tmp_path / "mean")
    found = opened.weights(tiny_program(1, model=MOE).mesh)
    assert (found.step, opened.trained.ema, opened.config.model) == (chosen[-1], None, open_run(folder).config.model)

    def mean(tree_of):
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0, dtype=np.float64), *(tree_of(states[step]) for step in chosen))

    params = mean(lambda state: state["extra"]["ema"] if kind == "ema" else state["params"])
    for mine, wanted in ((found.params, params), (found.model_state, mean(lambda state: state["model_state"]))):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), jax.device_get(mine), wanted)
    assert jax.tree.leaves(found.model_state)


def test_the_mean_of_a_run_with_a_reference_needs_none(run, tmp_path):
    """A folder of a model has no objective: that of DPO would ask for `train.start_from`."""
    shutil.copytree(run[1], tmp_path / "run")
    config = open_run(run[1]).trained
    train = config.train.model_copy(update={"start_from": StartFromConfig(path="source"), "z_loss": 0.0})
    (tmp_path / "run" / "config.yml").write_text(dump(config.model_copy(update={"objective": DpoConfig(kind="dpo"), "train": train})))
    average(tmp_path / "run", tmp_path / "mean", 2, [], "raw", lambda done, total: None)
    assert open_run(tmp_path / "mean").trained.objective is None


@pytest.mark.parametrize("name", ["runs/sft-tiny", "runs/dpo-tiny"])
def test_the_mean_of_a_run_that_prepares_conversations_opens(run, tmp_path, name):
    """The shipped configs of fine-tuning, and the same as a branch: the recipe of their store asks for the objective, which is gone."""
    shutil.copytree(run[1], tmp_path / "run")
    shipped = load(name).config
    assert shipped.data.prepare.conversations is not None
    branch = shipped.train.model_copy(update={"start_from": None, "branch_from": BranchFromConfig(path="source", step=1)})
    for number, train in enumerate([shipped.train, *([branch] if shipped.objective.kind == "sft" else [])]):
        config = shipped.model_copy(update={"model": open_run(run[1]).trained.model, "train": train})
        (tmp_path / "run" / "config.yml").write_text(dump(config))
        average(tmp_path / "run", tmp_path / f"{number}", 2, [], "raw", lambda done, total: None)
        made = open_run(tmp_path / f"{number}").trained
        assert (made.train.start_from, made.train.branch_from, made.data.prepare) == (None, None, None)


def test_a_config_that_would_not_open_is_refused_before_anything_is_read(run, tmp_path, monkeypatch):
    dpo = {"objective": DpoConfig(kind="dpo")}
    monkeypatch.setattr(averaging, "saved_text", lambda config: saved_text(config.model_copy(update=dpo)))
    done = []
    with pytest.raises(UserError, match=r"train\.start_from"):
        average(run[1], tmp_path / "mean", 2, [], "raw", lambda *counts: done.append(counts))
    assert done == [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("last", "steps", "said"),
    [
        (5, [], "--last 5 asks for more checkpoints .* 1, 2, 3"),
        (5, [1, 7], "no checkpoint 7"),
        (5, [2], "two or more"),
        (5, [2, 2], "once"),
    ],
)
def test_checkpoints_that_are_not_there_are_refused(run, tmp_path, last, steps, said):
    with pytest.raises(UserError, match=said):
        average(run[1], tmp_path / "mean", last, steps, "raw", lambda done, total: None)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    shutil.copytree(run[1], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2" / "state")
    with pytest.raises(UserError, match="checkpoint 2 is damaged"):
        average(tmp_path / "run", tmp_path / "mean", 3, [], "raw", lambda done, total: None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
