"""The runs of a ladder: their sizes, lengths and FLOPs, and what is refused."""

import pytest
from ladder_folder import LADDER, rungs_of, write_ladder

from maxlm.base.errors import UserError
from maxlm.ladder.grid import token_costs
from maxlm.models.counts import count_parameters, token_flops


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sizes_keep_the_proportions_of_the_base(here):
    rungs = {rung.name: rung for rung in rungs_of(write_ladder(here))}
    assert len(rungs) == 12
    model = rungs["d-tokens1M"].config.model
    assert (model.d_model, model.n_layers, model.head_dim, model.n_heads, model.n_kv_heads, model.d_ff) == (128, 4, 16, 8, 4, 256)
    one = rungs["d-tokens1M"]
    assert one.parameters == count_parameters(model) and one.flops == token_flops(model, one.config.data.seq_len) * one.config.total_tokens
    assert abs(one.tokens - 1e6) <= one.config.tokens_per_step / 2
    flops = [rung.flops for rung in rungs_of(write_ladder(here))]
    assert flops == sorted(flops), "smallest first"


@pytest.mark.parametrize(("width", "heads"), [(16, (1, 1)), (48, (4, 2)), (80, (4, 2)), (176, (12, 6))])
def test_as_many_heads_share_a_key_as_in_the_base(here, width, heads):
    """With a width that is no multiple of theirs, too: a size whose attention is of another kind would not lie on the others' curve."""
    rungs = rungs_of(write_ladder(here, LADDER.replace("d_model: 16,", f"d_model: {width},")))
    rung = next(rung for rung in rungs if rung.size == "a")
    assert (rung.config.model.n_heads, rung.config.model.n_kv_heads) == heads


def test_settings_of_all_runs_reach_each_and_a_size_may_change_them(here):
    text = LADDER.replace("folder: out", "folder: out\nsettings: {optimizer.peak_lr: 0.5, train.global_batch: 16}")
    text = text.replace("d_model: 16, n_layers: 1", "d_model: 16, n_layers: 1, settings: {optimizer.peak_lr: 0.25}")
    rungs = rungs_of(write_ladder(here, text))
    assert {(rung.size == "a", rung.config.optimizer.peak_lr) for rung in rungs} == {(True, 0.25), (False, 0.5)}
    assert {rung.config.train.global_batch for rung in rungs} == {16}
    assert sorted({rung.tokens for rung in rungs}) == [round(tokens / (16 * 32)) * 16 * 32 for tokens in (2e5, 1e6, 5e6)]


def test_a_budget_is_spent_by_every_size_whose_ratio_is_allowed(here):
    text = LADDER.replace("tokens: [2e5, 1e6, 5e6]", "budgets: [1e12]\nleast_ratio: 2\nwarmup: 0.1\nseeds: [0, 1]")
    rungs = rungs_of(write_ladder(here, text))
    assert {rung.seed for rung in rungs} == {0, 1} and {rung.size for rung in rungs} == {"a", "b", "c"}
    for rung in rungs:
        assert abs(rung.flops / 1e12 - 1) < 0.01
        assert rung.config.optimizer.warmup_steps == round(0.1 * rung.config.total_steps)
        assert rung.name == f"{rung.size}-budget1e12" + ("-seed1" if rung.seed else ""), "also when it was the only seed"


@pytest.mark.parametrize(("kind", "small"), [("all", 3.8), ("without_embeddings", 18.9)])
def test_a_token_costs_a_large_model_six_flops_a_parameter_and_a_small_one_what_its_tables_say(here, kind, small):
    rungs = rungs_of(write_ladder(here, LADDER.replace("fit: {", f"fit: {{parameters: {kind}, ")))
    sizes, costs = token_costs(rungs, kind)
    assert list(sizes) == sorted(set(sizes)) and {rung.parameters for rung in rungs} <= set(sizes)
    for rung in rungs:
        assert costs[list(sizes).index(rung.parameters)] == pytest.approx(rung.flops / rung.tokens / rung.parameters)
    assert costs[0] == pytest.approx(small, abs=0.1) and costs[-1] == pytest.approx(6, abs=0.01) and sizes[-1] > 1000 * sizes[-6]


def test_a_ratio_counts_parameters_as_the_fit_does(here):
    text = LADDER.replace("tokens: [2e5, 1e6, 5e6]", "tokens_per_parameter: [20]")
    whole = {rung.size: rung for rung in rungs_of(write_ladder(here, text))}
    without = {rung.size: rung for rung in rungs_of(write_ladder(here, text.replace("fit: {", "fit: {parameters: without_embeddings, ")))}
    for size, rung in whole.items():
        assert rung.parameters - without[size].parameters == 2 * 320 * rung.config.model.d_model
        assert without[size].tokens == pytest.approx(20 * without[size].parameters, abs=256)
        assert rung.flops / rung.tokens == token_flops(rung.config.model, 32)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tokens: [2e5, 1e6, 5e6]", "seeds: [0]", "budgets = null: says no length"),
        ("tokens: [2e5, 1e6, 5e6]", "tokens: [5, 5]", "names a value twice"),
        ("tokens: [2e5, 1e6, 5e6]", "budgets: [-1]", "budgets"),
        ("tokens: [2e5, 1e6, 5e6]", "budgets: [1e3]\nleast_ratio: 1", "no run of the ladder has between least_ratio and most_ratio"),
        ("tokens: [2e5, 1e6, 5e6]", "tokens: [1]", "warm-up must end before the run does"),
        ("tokens: [2e5, 1e6, 5e6]", "tokens: [100, 130]\nwarmup: 0", "size a: tokens 100 and tokens 130 are the same 256 tokens"),
        ("d_model: 16, n_layers: 1", "d_model: 16, n_layers: 0", "n_layers"),
        ("d_model: 16, n_layers: 1", "d_model: 16, n_layers: 1, n_heads: 3", "size a of the ladder: "),
        ("d_model: 16, n_layers: 1", "d_model: 16, n_layers: 1, settings: {train.steps: 3}", "is set by the ladder itself"),
        ("d_model: 16, n_layers: 1", "d_model: 16, n_layers: 1, settings: {optimizer.pek_lr: 3}", "pek_lr"),
        ("folder: out", "folder: out\nsettings: {run.name: x}", "settings = run.name: is set by the ladder itself"),
        ("folder: out", "folder: out\nsettings: {model: {d_model: 8}}", "settings = model.d_model: is set by the ladder itself"),
        ("folder: out", "folder: out\nsettings: {train: {steps: 8}}", "settings = train.steps: is set by the ladder itself"),
        ("folder: out", "folder: out\nsettings: {model.d_model: 8}", "settings = model.d_model: is set by the ladder itself"),
        ("folder: out", "folder: out\nsettings: {model.d_modle: 8}", "d_modle"),
        ("  a: {", "  a/b: {", r"sizes.a/b = .*: must match \^\[A-Za-z0-9\]"),
        ("BASE", "nothing.yml", "does not exist"),
        ("fit: {samples: 20}", "fit: {samples: 20, form: cubic}", "fit.form"),
        ("folder: out", "folder: gs://bucket/out", "folder"),
        ("folder: out", "", "folder"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(here, old, new, said):
    assert old in LADDER
    with pytest.raises(UserError, match=said) as raised:
        rungs_of(write_ladder(here, LADDER.replace(old, new)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("eval_batches: 0", r"train.eval_batches = 0: a ladder fits the loss on held-out text"),
        ("eval_batches: 1, batch_ramp: [{global_batch: 4, until_tokens: 640}]", r"train.batch_ramp goes by tokens"),
    ],
)
def test_a_base_without_evaluation_or_with_growing_batches_is_refused(here, new, said):
    file = write_ladder(here)
    (here / "base.yml").write_text((here / "base.yml").read_text().replace("eval_batches: 1", new))
    with pytest.raises(UserError, match=said):
        rungs_of(file)
