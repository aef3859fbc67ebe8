"""Optimizers are tuned with equal trials, and compared over seeds at equal FLOPs and at equal time."""

import json
import math

import pytest
from ladder_folder import LADDER, dump_once, end_run, write_ladder

from maxlm.base.errors import UserError
from maxlm.config.loader import load
from maxlm.ladder import ladder_command, runs
from maxlm.ladder.grid import Rung
from maxlm.ladder.ladder_command import Options

COMPARE = (
    LADDER.replace("tokens: [2e5, 1e6, 5e6]", "tokens: [1e6]").split("  c: {")[0]
    + """
tokens: [1e6]
compare:
  optimizers:
    adamw: {peak_lr: [1e-3, 3e-3, 1e-2]}
    muon: {peak_lr: [3e-3, 1e-2, 3e-2], settings: {optimizer.muon: {momentum: 0.9}}}
  warmup: [0.02, 0.1]
  seeds: [1, 2, 3]
"""
)
SECONDS = {"adamw": 0.1, "muon": 0.2}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder where a run ends at once: least loss at a rate of 3e-3 with AdamW and 1e-2 with Muon, which is better and slower."""
    monkeypatch.chdir(tmp_path)
    names = []

    class Supervisor:
        signalled = False

        def __init__(self, command, **_):
            self.config = load(command[-1]).config

        def run(self):
            names.append(self.config.run.name)
            kind, steps = self.config.optimizer.name, self.config.total_steps
            wrong = math.log(self.config.optimizer.peak_lr / {"adamw": 3e-3, "muon": 1e-2}[kind]) ** 2
            loss = 3 - 0.1 * math.log(steps) - 0.05 * (kind == "muon") + 0.01 * wrong + 0.01 * self.config.train.seed
            rung = Rung(self.config.run.name, "", "", 0, self.config, 1, 1, 1.0)
            end_run(tmp_path / "out", rung, loss + 0.001 * (self.config.optimizer.warmup_steps / steps > 0.05))
            row = {"loss": 1.0, "step_time_s": SECONDS[kind], "data_wait_s": 0.0, "time": 1.0}
            lines = "".join(json.dumps({"step": step, **row}) + "\n" for step in range(1, 5))
            (tmp_path / "out/runs" / self.config.run.name / "metrics.jsonl").write_text(lines)
            return 0

    monkeypatch.setattr(runs, "Supervisor", Supervisor)
    monkeypatch.setattr(runs, "dump", dump_once)
    return tmp_path, names


def call(file, optimizers="adamw,muon", **options):
    ladder_command.run_comparison(str(file), [], optimizers, Options(**options), print)
    return json.loads((file.parent / "out/comparison.json").read_text())["entries"]


def test_each_is_tuned_alike_and_the_slower_gets_fewer_steps_at_equal_time(here, capsys):
    folder, names = here
    file = write_ladder(folder, COMPARE)
    entries = call(file)
    assert [(one["size"], one["optimizer"]) for one in entries] == [("a", "adamw"), ("a", "muon"), ("b", "adamw"), ("b", "muon")]
    assert sum("-seed0" in name for name in names) == 2 * 2 * 3 * 2, "sizes, optimizers, rates, warm-ups"
    steps = load(str(next((folder / "out/configs").glob("a-adamw-*-seed1.yml")))).config.total_steps
    for one in entries:
        assert one["best"]["peak_lr"] == {"adamw": 3e-3, "muon": 1e-2}[one["optimizer"]]
        assert one["best"]["warmup"] == 0.02 and not one["at_edge"]
    adamw, muon = entries[:2]
    assert [b - a for a, b in zip(adamw["losses"], muon["losses"], strict=True)] == pytest.approx([-0.05] * 3)
    assert adamw["losses_at_equal_time"] == adamw["losses"]
    slower = [b - a for a, b in zip(muon["losses"], muon["losses_at_equal_time"], strict=True)]
    assert slower == pytest.approx([0.1 * math.log(2)] * 3, abs=1e-4), "half as many steps"
    (file_of_seed,) = (folder / "out/configs").glob(f"a-muon-peak_lr0.01-warmup0.02-{round(steps / 2)}steps-seed2.yml")
    config = load(str(file_of_seed)).config
    assert config.train.seed == 2 and config.optimizer.muon.momentum == 0.9
    assert config.optimizer.warmup_steps == round(0.02 * config.total_steps)
    said = capsys.readouterr().out
    assert "-0.0500 ± 0.0000" in said and "+0.0193 ± 0.0000" in said
    before = len(names)
    call(file)
    assert len(names) == before, "nothing was left to train"


def test_a_rate_at_which_training_fails_is_a_result_and_not_tried_again(here, monkeypatch):
    file, (folder, names) = write_ladder(here[0], COMPARE), here
    original = runs.Supervisor.run

    def run(self):
        if self.config.optimizer.peak_lr < 3e-2:
            return original(self)
        names.append(self.config.run.name)
        end_run(folder / "out", Rung(self.config.run.name, "", "", 0, self.config, 1, 1, 1.0), reason="unhealthy")
        return 4

    monkeypatch.setattr(runs.Supervisor, "run", run)
    assert call(file)[1]["best"]["peak_lr"] == 1e-2
    failed = [name for name in names if "peak_lr0.03" in name]
    assert len(failed) == 4
    call(file)
    assert [name for name in names if "peak_lr0.03" in name] == failed
    (folder / "other").mkdir()
    file = write_ladder(folder, COMPARE.replace("[3e-3, 1e-2, 3e-2]", "[3e-2, 4e-2, 5e-2]").replace("folder: out", "folder: other"))
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"have no loss|failed at every trial of size a"):
        ladder_command.run_comparison(str(file), [], "adamw,muon", Options(), print)


def test_without_warmups_to_try_it_is_that_of_the_ladder(here):
    """The runs at equal time are shorter, and so is their warm-up."""
    (line,) = (line for line in COMPARE.splitlines() if line.strip().startswith("warmup:"))
    call(write_ladder(here[0], COMPARE.replace(line + "\n", "").replace("folder: out", "folder: out\nwarmup: 0.2")))
    configs = [load(str(file)).config for file in (here[0] / "out/configs").glob("*.yml")]
    assert len({config.total_steps for config in configs}) > 1
    assert all(config.optimizer.warmup_steps == round(0.2 * config.total_steps) for config in configs)


def test_a_best_rate_at_the_edge_is_said(here):
    file = write_ladder(here[0], COMPARE.replace("[1e-3, 3e-3, 1e-2]", "[1e-2, 2e-2, 3e-2]"))
    assert [one["at_edge"] for one in call(file)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("old", "new", "optimizers", "said"),
    [
        ("compare:", "compare:", "adamw", "must name two optimizers or more"),
        ("compare:", "compare:", "adamw,adamw", "each once"),
        ("compare:", "compare:", "adamw,lyon", "has no such optimizer; it has adamw, muon"),
        ("[1e-3, 3e-3, 1e-2]", "[1e-3, 3e-3]", "adamw,muon", "no fair comparison"),
        ("seeds: [1, 2, 3]", "seeds: [1]", "adamw,muon", "seeds"),
        ("{optimizer.muon: {momentum: 0.9}}", "{optimizer: {peak_lr: 1.0}}", "adamw,muon", "is set by the comparison itself"),
        ("{optimizer.muon: {momentum: 0.9}}", "{optimizer.weight_decay: 1.0}", "adamw,muon", "is set by the comparison itself"),
        ("{optimizer.muon: {momentum: 0.9}}", "{model.n_layers: 9}", "adamw,muon", "would give this optimizer another model"),
        ("{optimizer.muon: {momentum: 0.9}}", "{data: {seq_len: 64}}", "adamw,muon", "would give this optimizer another model"),
        ("n_layers: 1}", "n_layers: 1, settings: {optimizer.peak_lr: 1.0}}", "adamw,muon", "is set by --compare itself"),
        ("folder: out", "folder: out\nsettings: {train.decay_steps: 1}", "adamw,muon", "is set by --compare itself"),
        ("    muon:", "    mon:", "adamw,mon", "optimizer.name"),
    ],
)  # fmt: skip
def test_bad_comparisons_are_refused_in_one_line(here, old, new, optimizers, said):
    file = write_ladder(here[0], COMPARE.replace(old, new))
    with pytest.raises(UserError, match=said) as raised:
        call(file, optimizers)
    assert "\n" not in str(raised.value)


def test_runs_that_are_missing_are_named(here):
    with pytest.raises(UserError, match=r"6 of 6 runs of the comparison have no loss: a-adamw-peak_lr0\.001.*not begun"):
        call(write_ladder(here[0], COMPARE), train=False)
