"""`maxlm ladder`: what is done is not done again, what failed is named, and the largest size is predicted from the others."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import yaml
from ladder_folder import LADDER, dump_once, end_all, end_run, rungs_of, write_ladder

from maxlm.base.errors import UserError
from maxlm.config.loader import dump
from maxlm.ladder import analysis, ladder_command, runs
from maxlm.ladder.fits import Fit
from maxlm.ladder.ladder_command import Options
from maxlm.ladder.page import page
from maxlm.ladder.runs import Found


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty working folder; plots take long, so only a test that reads a page writes one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "dump", dump_once)
    monkeypatch.setattr(ladder_command, "page", lambda *_: "")
    return tmp_path


@pytest.fixture
def trained(monkeypatch, here):
    """Names of the runs that were started; each ends well, or with the code that `codes` has for it."""
    names, codes = [], {}

    class Supervisor:
        signalled = False

        def __init__(self, command, **_):
            self.name = command[-1].split("/")[-1].removesuffix(".yml")

        def run(self):
            names.append(self.name)
            code = codes.get(self.name, 0)
            rung = next(rung for rung in rungs_of(here / "ladder.yml") if rung.name == self.name)
            if code in (0, 4):
                end_run(here / "out", rung, reason="done" if code == 0 else "unhealthy")
            return code

    monkeypatch.setattr(runs, "Supervisor", Supervisor)
    return names, codes


def call(file, **options):
    said = []
    ladder_command.run(str(file), [], Options(**options), said.append)
    return said


def test_the_largest_size_is_predicted_and_the_page_written(here, trained, monkeypatch, capsys):
    file = write_ladder(here)
    with monkeypatch.context() as patched:
        patched.setattr(ladder_command, "page", page)
        call(file)
    assert trained[0] == [rung.name for rung in rungs_of(file)]
    result = json.loads((here / "out/ladder.json").read_text())
    assert result["form"] == "chinchilla" and len(result["predictions"]) == 3
    assert all(abs(one["error"]) < 0.005 for one in result["predictions"])
    assert abs(result["values"]["alpha"] - 0.3) < 0.01 and abs(result["values"]["beta"] - 0.35) < 0.01
    text = (here / "out/ladder.html").read_text()
    assert text.count("<svg") == 3 and "d-tokens5M" in text
    assert "<script" not in text and "<?xml" not in text
    assert "predicted from the smaller sizes" in capsys.readouterr().out
    call(file)
    assert len(trained[0]) == 12, "nothing was left to train"


def test_a_run_that_was_stopped_is_gone_on_with(here, trained):
    file = write_ladder(here)
    third = rungs_of(file)[2].name
    trained[1][third] = 3
    with pytest.raises(SystemExit) as stopped:
        call(file)
    assert stopped.value.code == 3 and len(trained[0]) == 3
    trained[1].clear()
    call(file)
    assert trained[0][3] == third and len(trained[0]) == 13


def test_a_signal_that_comes_when_a_run_is_done_stops_the_ladder_too(here, trained, monkeypatch):
    file = write_ladder(here)
    monkeypatch.setattr(runs.Supervisor, "signalled", True)
    with pytest.raises(SystemExit) as stopped:
        call(file)
    assert stopped.value.code == 3 and len(trained[0]) == 1
    monkeypatch.setattr(runs.Supervisor, "signalled", False)
    call(file)
    assert len(trained[0]) == 12, "that run had its loss"


@pytest.mark.parametrize(
    ("later", "state", "loss"),
    [
        ([("start", 9, {}), ("stop", 9, {"reason": "nothing_left", "eval_loss": None})], "done", 2.0),
        ([("start", 9, {}), ("eval", 9, {"eval_loss": 2.5}), ("stop", 9, {"reason": "done", "eval_loss": 2.5})], "done", 2.5),
        ([("start", 9, {}), ("eval", 9, {"eval_loss": 2.5}), ("stop", 9, {"reason": "preempted", "eval_loss": 2.5})], "not finished", None),
        ([("start", 4, {}), ("stop", 9, {"reason": "done", "eval_loss": None})], "done, but not evaluated", None),
        ([("start", 4, {})], "not finished", None),
    ],
    ids=["started again", "evaluated again", "tasks cut", "trained again", "killed"],
)
def test_the_loss_of_a_run_is_that_of_its_last_step_whichever_start_has_made_it(here, later, state, loss):
    rung = rungs_of(write_ladder(here))[0]
    rung = replace(rung, config=rung.config.model_copy(update={"train": rung.config.train.model_copy(update={"steps": 9})}))
    end_run(here / "out", rung, loss=2.0)
    with (here / "out/runs" / rung.name / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"kind": kind, "step": step, "time": 200.0, **data}) + "\n" for kind, step, data in later)
    found = runs.find(here / "out", rung)
    assert (found.state, found.loss, found.failed) == (state, loss, False), "none of them is a result of its settings"


def test_what_a_run_was_begun_with_counts_and_not_what_the_ladder_wrote_since(here):
    """Runs of a cluster, copied back after the ladder has changed; where and on what they were trained changes no loss."""
    file, folder = write_ladder(here), here / "out"
    rung = rungs_of(file)[0]
    end_run(folder, rung)
    path, begun = folder / "runs" / rung.name / "config.yml", yaml.safe_load(dump(rung.config))
    elsewhere = {
        "mesh": {**begun["mesh"], "tensor": 2},
        "run": {**begun["run"], "dir": "/scratch/runs"},
        "cost": {"watts": 500.0},
    }
    elsewhere["data"] = {**begun["data"], "store": "/scratch/web"}
    path.write_text(yaml.safe_dump({**begun, **elsewhere, "train": {**begun["train"], "loss_chunks": 4}}))
    runs.write_configs(folder, [rung])
    assert runs.config_file(folder, rung).read_text() == dump(rung.config)
    path.write_text(yaml.safe_dump({**begun, "optimizer": {**begun["optimizer"], "peak_lr": 0.5}}))
    with pytest.raises(UserError, match=r"was begun with optimizer.peak_lr = "):
        runs.write_configs(folder, [rung])


def test_failed_runs_are_named_and_left_out_only_when_told_to(here, trained):
    file = write_ladder(here)
    trained[1].update({"b-tokens1M": 4, "c-tokens5M": 1})
    with pytest.raises(UserError, match=r"2 of 12 runs failed: .*b-tokens1M \(unhealthy, exit code 4\).*--without-failed"):
        call(file)
    assert len(trained[0]) == 12, "the others were trained"
    assert not (here / "out/ladder.json").exists()
    call(file, train=False, without_failed=True)
    assert len(json.loads((here / "out/ladder.json").read_text())["runs"]) == 10
    with pytest.raises(UserError, match="runs failed: b-tokens1M"):
        call(file, train=False)


def test_of_runs_that_all_failed_nothing_is_fitted(here, trained):
    file = write_ladder(here)
    trained[1].update({rung.name: 4 for rung in rungs_of(file)})
    with pytest.raises(UserError, match="none of 12 runs has a loss"):
        call(file, without_failed=True)


def test_wrong_input_stops_the_ladder_at_the_first_run(here, trained):
    file = write_ladder(here)
    trained[1][rungs_of(file)[0].name] = 2
    with pytest.raises(UserError, match="1 of 12 runs failed"):
        call(file)
    assert len(trained[0]) == 1


def test_a_changed_ladder_is_refused_where_runs_have_begun_and_grows_otherwise(here, trained):
    file = write_ladder(here)
    call(file)
    (here / "base.yml").write_text((here / "base.yml").read_text().replace("warmup_steps: 4", "warmup_steps: 5"))
    with pytest.raises(UserError, match=r"was begun with optimizer.warmup_steps = 4, and the ladder says 5 now: undo the change"):
        call(file)
    (here / "base.yml").write_text((here / "base.yml").read_text().replace("warmup_steps: 5", "warmup_steps: 4"))
    file.write_text(file.read_text().replace("5e6]", "5e6, 1e7]"))
    call(file)
    assert len(trained[0]) == 16


@pytest.mark.parametrize("place", ["configs/{}.yml", "runs/{}/config.yml"])
def test_runs_go_on_whose_config_another_version_wrote(here, place):
    """Without a setting that is new, and has its default: of the ladder's own copy, and of the run where there is none."""
    (rung, *_), folder = rungs_of(write_ladder(here)), here / "out"
    end_run(folder, rung)
    if place.startswith("configs"):
        runs.write_configs(folder, [rung])
    file = folder / place.format(rung.name)
    (line,) = (line for line in file.read_text().splitlines() if line.startswith("  loss_chunks: "))
    file.write_text(file.read_text().replace(f"{line}\n", ""))
    runs.write_configs(folder, [rung])
    assert line in runs.config_file(folder, rung).read_text()


def test_runs_of_another_config_are_refused_without_the_ladders_own_configs_too(here):
    """As where runs were copied without them."""
    file, folder = write_ladder(here), here / "out"
    end_all(folder, rungs_of(file))
    runs.write_configs(folder, rungs_of(file))
    shutil.rmtree(folder / "configs")
    (here / "base.yml").write_text((here / "base.yml").read_text().replace("warmup_steps: 4", "warmup_steps: 5"))
    with pytest.raises(UserError, match=r"was begun with optimizer.warmup_steps = 4, and the ladder says 5 now"):
        runs.write_configs(folder, rungs_of(file))


def test_a_name_is_no_markup_and_what_is_no_number_is_null(here, monkeypatch, capsys):
    """Constants of a bootstrap sample may be infinite."""
    file = write_ladder(here, LADDER.replace("folder: out", "folder: 'out[/b]'"))
    end_all(here / "out[/b]", rungs_of(file))
    monkeypatch.setattr(Fit, "ranges", lambda self: dict.fromkeys(self.values(), (0.0, float("inf"))))
    call(file, train=False)
    assert "out[/b]/ladder.html shows it" in capsys.readouterr().out
    assert json.loads((here / "out[/b]/ladder.json").read_text(), parse_constant=pytest.fail)["ranges"]["E"] == [0.0, None]


def test_a_dry_run_writes_nothing_and_without_training_configs_are_written(here, trained, capsys):
    file = write_ladder(here)
    call(file, dry_run=True)
    assert "a-tokens200k" in capsys.readouterr().out and not (here / "out").exists()
    assert "no run is done yet" in call(file, train=False)[0]
    assert len(list((here / "out/configs").glob("*.yml"))) == 12 and not trained[0]
    end_run(here / "out", rungs_of(file)[0])
    with pytest.raises(UserError, match="11 of 12 runs are not done"):
        call(file, train=False)


@pytest.mark.parametrize(("reason", "failed"), [("unhealthy", True), ("hung", False), ("corrupted", False), ("preempted", False)])
def test_only_unhealthy_training_is_a_result(here, reason, failed):
    """A comparison does not train that again; what the machine spoiled it does."""
    rung = rungs_of(write_ladder(here))[0]
    end_run(here / "out", rung, reason=reason)
    found = runs.find(here / "out", rung)
    assert (found.loss, found.failed) == (None, failed)


def test_runs_whose_loss_is_no_loss_have_failed(here, trained):
    file = write_ladder(here)
    rungs = rungs_of(file)
    end_all(here / "out", rungs)
    end_run(here / "out", rungs[0], loss=float("nan"))
    (here / "out/runs" / rungs[1].name / "events.jsonl").write_text(
        '{"kind": "stop", "step": 7, "time": 1, "reason": "done", "eval_loss": 2.0}\n'
    )
    with pytest.raises(UserError, match=r"2 of 12 runs failed: .*done at step 7 of"):
        call(file, train=False)


def test_minima_of_parabolas_have_the_exponents_of_the_losses(here, trained):
    """L = E + A / N^a + B / D^a is least at N and D that are both proportional to C^0.5 at a fixed cost of a token and parameter."""
    text = LADDER.replace("tokens: [2e5, 1e6, 5e6]", "budgets: [1e12, 1e13, 1e14]")
    file = write_ladder(here, text)
    end_all(here / "out", rungs_of(file), loss=lambda rung: 1.5 + 100 / rung.parameters**0.4 + 100 / (rung.tokens / 20) ** 0.4)
    call(file, train=False)
    exponents = json.loads((here / "out/ladder.json").read_text())["exponents"]
    assert exponents["a"] == pytest.approx(0.5, abs=0.1) and exponents["b"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("slope", [0.01, -0.01])
def test_losses_on_a_straight_line_have_no_minimum(here, slope):
    """Its parabola is at exp(-5000) or exp(5000) parameters, which no plot has room for."""
    rungs = rungs_of(write_ladder(here, LADDER.replace("tokens: [2e5, 1e6, 5e6]", "budgets: [1e12]")))
    sizes = {rung.name: np.log(rung.parameters) for rung in rungs}
    line = [Found(rung, 3 + slope * sizes[rung.name] + 1e-6 * sizes[rung.name] ** 2, "done") for rung in rungs]
    assert analysis.parabolas_of(line) == []
    curve = [replace(one, loss=3 + (sizes[one.rung.name] - 10) ** 2) for one in line]
    assert [one.parameters for one in analysis.parabolas_of(curve)] == [pytest.approx(np.exp(10))]


def test_two_ladders_in_one_folder_are_refused(here, trained, monkeypatch):
    file = write_ladder(here)
    monkeypatch.setattr(ladder_command, "_LOCK_SECONDS", 0.0)
    monkeypatch.setattr(ladder_command, "train", lambda *_: call(file))
    with pytest.raises(UserError, match="wait for the other ladder, or give this one another folder"):
        call(file)


def test_the_time_between_attempts_is_not_that_of_a_run(here):
    """What is left to train is predicted by it, and an interruption may last for days."""
    rung = rungs_of(write_ladder(here))[0]
    end_run(here / "out", rung)
    file = here / "out" / "runs" / rung.name / "events.jsonl"
    first = [{"kind": "start", "step": 0, "time": 100.0}, {"kind": "stop", "step": 3, "time": 110.0, "reason": "preempted"}]
    again = file.read_text().replace("100.0", "90110.0").replace("160.0", "90150.0")
    file.write_text("".join(json.dumps(event) + "\n" for event in first) + again)
    assert runs.find(here / "out", rung).seconds == pytest.approx(50)
