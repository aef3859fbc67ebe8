"""Parts of a run's assembly: predictions fail alone, and processes with different configs make the same calls."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from rich.console import Console
from tiny import tiny_config

from maxlm.cluster import agree
from maxlm.config import UserError
from maxlm.run import run
from maxlm.run.open_run import RunContext
from maxlm.telemetry.goodput import Goodput
from maxlm.telemetry.observer import Observers
from maxlm.telemetry.phases import Phases
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.session import BRANCH, Start


class Step:
    """A compiled step whose memory its backend cannot tell."""

    def memory_analysis(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: no statistics")


HOSTS = SimpleNamespace(asked=None, cluster=SimpleNamespace(hosts=("a", "b")))


def test_a_prediction_that_fails_does_not_end_the_run():
    opened = SimpleNamespace(trains=True, program=SimpleNamespace(step=Step()), directory=SimpleNamespace(primary=True))
    assert run._predicted(opened, lambda program: 1.0) == {"predicted": {}}


@pytest.mark.parametrize("predictor", [None, lambda config, hosts: lambda program: 1.0])
def test_processes_talk_whether_they_have_a_calibration_or_not(monkeypatch, predictor):
    """Configs are compared only afterwards: with one call less, a process would compare other facts than the rest."""
    calls = []
    monkeypatch.setattr(agree, "require_equal", lambda facts, problem=None: calls.append((facts, problem)))
    predict = run._on_all_hosts(predictor, HOSTS)
    assert (predict is None) == (predictor is None)
    assert calls == [({}, None)]


def test_a_calibration_that_is_refused_is_refused_everywhere(monkeypatch):
    def refuse(config, hosts):
        raise UserError("of another machine")

    told = []
    monkeypatch.setattr(agree, "require_equal", lambda facts, problem=None: told.append(str(problem)))
    with pytest.raises(UserError):
        run._on_all_hosts(refuse, HOSTS)
    assert told == ["of another machine"]


@pytest.mark.parametrize(
    ("train", "restored", "source", "goes_on"),
    [
        ({}, None, None, False),
        ({}, {"source": "store"}, None, True),
        ({"start_from": {"path": "a"}}, None, "a", False),
        ({"branch_from": {"path": "b", "step": 1}}, {"source": BRANCH}, "b", False),
        ({"branch_from": {"path": "b", "step": 1}, "start_from": {"path": "a"}}, {"source": "store"}, "b", True),
    ],
)
def test_the_tokenizer_is_recorded_with_the_frame_of_where_the_run_began(train, restored, source, goes_on, monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(run, "copy_tokenizer", lambda *places, **said: told.append((*places[1:], said["goes_on"])))
    monkeypatch.setattr(run, "changed_settings", lambda *_: {})
    monkeypatch.setattr(run, "turn_ends", lambda stores: ())
    data = SimpleNamespace(train=SimpleNamespace(fingerprint=""))
    opened = SimpleNamespace(
        context=SimpleNamespace(asked=tiny_config(train=train)),
        directory=RunDirectory(tmp_path, primary=True),
        start=Start(None, 3, restored),
        trains=True,
        data=data,
    )
    run._record_start(opened)
    assert told == [(tmp_path / "tokenizer", None if source is None else Path(source) / "tokenizer", goes_on)]


def context(config, cluster, goodput, watchdog, console=None):
    """A run's context, for one process that writes nothing."""
    phases = Phases(console)
    phases.primary = False
    return RunContext(config, config, cluster, phases, goodput, watchdog, None, Observers([]))


EVALUATED, TASKS = ("eval", 9, {"eval_loss": 3.0}), ("tasks", 9, {"tasks": {}})
TRAINED, AGAIN, EARLIER = ("start", 4, {}), ("start", 9, {}), ("eval", 6, {"eval_loss": 3.0})
BACK = ("rollback", 6, {"from_step": 9})


@pytest.mark.parametrize(
    ("events", "held_out", "tasks", "concluded"),
    [
        ([TRAINED, EVALUATED], True, False, True),
        ([TRAINED, EARLIER], True, False, False),
        ([TRAINED, EVALUATED], True, True, False),
        ([TRAINED, EVALUATED, AGAIN, TASKS], True, True, True),
        ([TRAINED, EVALUATED, AGAIN], True, False, True),
        ([TRAINED, EVALUATED, TRAINED], True, False, False),
        ([TRAINED, EVALUATED, BACK, AGAIN], True, False, False),
        ([TRAINED, EVALUATED, BACK, EVALUATED, AGAIN], True, False, True),
        ([TRAINED, EVALUATED, ("start", 0, {}), ("restore", 9, {})], True, False, True),
        ([TRAINED], False, False, True),
        ([], False, False, True),
        (None, True, False, False),
    ],
)
def test_the_last_step_is_evaluated_by_the_next_start_if_no_event_says_that_it_was(events, held_out, tasks, concluded, tmp_path):
    if events is not None:
        lines = (json.dumps({"kind": kind, "step": step, "time": 1.0, **data}) + "\n" for kind, step, data in events)
        (tmp_path / "events.jsonl").write_text("".join(lines))
    opened = SimpleNamespace(
        data=SimpleNamespace(held_out=object() if held_out else None),
        tasks=object() if tasks else None,
        directory=RunDirectory(tmp_path, primary=True),
        trains=False,
        config=SimpleNamespace(total_steps=9),
    )
    assert run._concluded(opened) == concluded


@pytest.mark.parametrize(("trains", "concluded", "attached"), [(True, False, True), (False, False, True), (False, True, False)])
def test_preferences_are_evaluated_with_their_reference_by_a_start_with_no_steps_left_too(
    trains, concluded, attached, monkeypatch, tmp_path
):
    """Without it zeros would stand for its log-probabilities, and the loss be recorded as if it were right."""
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(dir=None),
        run=SimpleNamespace(dir=str(tmp_path), name="r"),
        objective_facts=SimpleNamespace(reference=True),
    )
    checkpoints = SimpleNamespace(memory=None, directory=tmp_path)
    data = SimpleNamespace(pipelines={})
    directory = SimpleNamespace(path=tmp_path, primary=False)
    opened = SimpleNamespace(
        config=config, directory=directory, checkpoints=checkpoints, trains=trains, program=None, start=None, data=data
    )
    calls = []

    def last(*_):
        calls.append("trains")
        raise InterruptedError

    monkeypatch.setattr(run, "_on_all_hosts", lambda *_: None)
    monkeypatch.setattr(run, "open_run", lambda *_: opened)
    monkeypatch.setattr(run, "_concluded", lambda _: concluded)
    monkeypatch.setattr(run, "attach_reference", lambda *_: calls.append("reference"))
    monkeypatch.setattr(run.deadline, "stacks_to", last)
    watchdog = SimpleNamespace(progress=SimpleNamespace(touch=None))
    with pytest.raises(InterruptedError):
        run._run(context(config, SimpleNamespace(hosts=()), None, watchdog), None, None, None, SimpleNamespace(write_to=lambda _: None))
    assert calls == (["reference"] if attached else []) + ["trains"]


@pytest.mark.parametrize(("status", "undone", "concluded"), [("done", 0, True), ("done", 1, False), ("preempted", 0, False)])
def test_the_last_save_is_watched_and_then_what_is_done_everywhere_is_on_record(status, undone, concluded, monkeypatch, tmp_path):
    """`undone`: in another process."""
    goodput, seen = Goodput(), []
    watchdog = SimpleNamespace(progress=None, fired=False, stop=lambda: seen.append("unwatched"))
    checkpoints = SimpleNamespace(memory=None, close=lambda remove_copies: seen.append(goodput.current[0]))
    config = SimpleNamespace(checkpoint=SimpleNamespace(dir=None), run=SimpleNamespace(dir=str(tmp_path), name="r"))
    config.objective_facts = SimpleNamespace(reference=False)
    directory = SimpleNamespace(path=tmp_path, primary=False)
    opened = SimpleNamespace(config=config, directory=directory, checkpoints=checkpoints, trains=False)
    for name, value in {
        "_on_all_hosts": lambda *_: None,
        "open_run": lambda *_: opened,
        "_concluded": lambda _: True,
        "_train": lambda *_, **__: SimpleNamespace(status=status),
        "StopSignal": lambda _: SimpleNamespace(close=lambda: None),
    }.items():
        monkeypatch.setattr(run, name, value)
    monkeypatch.setattr(run.deadline, "stacks_to", lambda _: None)
    monkeypatch.setattr(run.progress_file, "record", lambda **changes: seen.append(changes))
    monkeypatch.setattr(run.agree, "max_over_processes", lambda code: seen.append(f"agreed in {goodput.current[0]}") or max(code, undone))
    here = SimpleNamespace(hosts=(), regrouping=lambda: "")
    log = SimpleNamespace(write_to=lambda _: None)
    run._run(context(config, here, goodput, watchdog), None, None, None, log)
    assert seen == ["save", "agreed in save", "unwatched", {"regroup": False, "concluded": concluded}]


@pytest.mark.parametrize("failure", [None, OSError(28, "No space left on device")], ids=["kept", "full disk"])
def test_what_the_model_writes_at_the_end_is_printed_and_kept_and_the_report_shows_it(failure, monkeypatch, tmp_path):
    """The report is there before the samples are made, and stays if they cannot be kept."""
    directory, said, seen = RunDirectory.create(tmp_path, "r"), io.StringIO(), []
    directory.metrics.write_text('{"step": 7, "loss": 3.0}\n')
    state = SimpleNamespace(params={}, model_state={})
    opened = SimpleNamespace(
        config=SimpleNamespace(samples=SimpleNamespace(prompts=["def "])),
        directory=directory,
        program=SimpleNamespace(evaluated=lambda _: state),
        context=context(None, None, None, None, Console(file=said)),
    )

    def sample(*_):
        seen.append(directory.report.exists())
        if failure:
            raise failure
        return {"def ": "main():<script>", "long": None}

    monkeypatch.setattr(run.deadline, "allow", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(run.progress_file, "record", lambda **_: None)
    run._conclude(opened, SimpleNamespace(status="done", state=object(), step=7), sample, None)
    assert seen == [True]
    assert ("<b>def </b>main():&lt;script&gt;" in directory.report.read_text()) == (failure is None)
    assert directory.samples.exists() == (failure is None)
    assert ("no samples of the model: OSError: [Errno 28]" in said.getvalue()) == (failure is not None)
    assert str(directory.report) in said.getvalue().replace("\n", "")
