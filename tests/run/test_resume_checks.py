"""Settings that differ from those of the checkpoint: none is missed and none is said in vain, whatever attempts were in between."""

from types import SimpleNamespace

import pytest
from tiny import tiny_config

from maxlm.config.loader import dump
from maxlm.run.resume_checks import RATE, STORE, changed_settings, lost_checkpoints
from maxlm.telemetry.observer import Event
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.rollback import Journal

A = tiny_config()
B = tiny_config(optimizer={"peak_lr": 1e-3})
C = tiny_config(train={"z_loss": 0.5})


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path, "r")


def attempt(directory, config, step, store="a" * 64, recorded="a" * 64, skipped=0):
    """Return the changed settings as a run continues from `step`, with the config written afterwards."""
    position = {"next_step": step, "store": recorded}
    start = SimpleNamespace(step=step, state=SimpleNamespace(skipped=skipped), position=position, branched=False)
    said = changed_settings(directory, config, start, store)
    directory.write_config(dump(config))
    return said


def test_nothing_is_said_of_the_same_settings(directory):
    directory.write_config(dump(A))
    assert attempt(directory, A, 5) == {}
    assert directory.replaced_configs() == []


def test_where_a_run_writes_is_no_change_of_what_it_trains(directory):
    directory.write_config(dump(tiny_config(run={"dir": "elsewhere", "log_every": 7})))
    assert attempt(directory, A, 5) == {}


def test_each_setting_is_said_with_both_values_and_the_learning_rate_at_that_step(directory):
    directory.write_config(dump(A))
    said = attempt(directory, B, 5)
    rate = said.pop(RATE)
    assert said == {"optimizer.peak_lr": [0.01, 0.001]}
    assert rate[0] == pytest.approx(10 * rate[1])
    assert directory.config_until(5).read_text() == dump(A)
    assert attempt(directory, B, 7) == {}


def test_a_longer_run_says_that_its_learning_rate_rises(directory):
    directory.write_config(dump(A))
    said = attempt(directory, tiny_config(train={"steps": 40}), 10)
    assert said["train.steps"] == [10, 40]
    assert said[RATE][0] == pytest.approx(1e-3)
    assert said[RATE][1] > 8e-3


def test_skipped_updates_do_not_move_the_schedule(directory):
    directory.write_config(dump(A))
    assert attempt(directory, B, 5, skipped=5)[RATE] == [pytest.approx(5e-3), pytest.approx(5e-4)]


def test_other_data_under_the_same_name_is_said(directory):
    directory.write_config(dump(A))
    assert attempt(directory, A, 5, store="b" * 64) == {STORE: ["a" * 12, "b" * 12]}
    assert directory.replaced_configs() == []


def test_an_attempt_that_saved_nothing_is_not_what_the_checkpoint_was_trained_with(directory):
    """B went on from 5, and died before it saved: what the steps were trained with is A."""
    directory.write_config(dump(A))
    attempt(directory, B, 5)
    assert attempt(directory, A, 5) == {}
    assert list(attempt(directory, C, 5)) == ["train.z_loss"]


def test_of_a_checkpoint_further_back_the_settings_of_that_time_count(directory):
    directory.write_config(dump(A))
    attempt(directory, B, 5)
    attempt(directory, C, 8)
    assert directory.replaced_configs() == [5, 8]
    assert set(attempt(directory, C, 6)) >= {"train.z_loss", "optimizer.peak_lr"}, "6 was trained with B"
    assert directory.replaced_configs() == [5, 6], "the config that was replaced at 8 trains no step any more"
    assert attempt(directory, C, 9) == {}


def test_after_a_roll_back_the_present_settings_train_the_steps_again(directory):
    directory.write_config(dump(A))
    attempt(directory, B, 5)
    attempt(directory, C, 8)
    directory.trained_again(4)
    assert directory.replaced_configs() == [4] and directory.config_until(4).read_text() == dump(A)
    assert attempt(directory, C, 6) == {}, "no longer trained with B"
    directory.trained_again(4)
    assert set(attempt(directory, C, 3)) == {"train.z_loss"}, "3 was trained with A"


def test_a_config_of_another_version_is_kept_and_said(directory):
    directory.write_config("model: {no_such_setting: 1}\n")
    assert "cannot read" in attempt(directory, A, 5)["config"][0]
    assert directory.config_until(5).exists()


def test_a_branch_says_what_differs_from_the_other_run(directory, tmp_path):
    other = RunDirectory.create(tmp_path, "other")
    other.write_config(dump(A))
    branch = {"branch_from": {"path": str(other.path), "step": 5}}
    position = {"next_step": 5, "store": "a" * 64}
    for sections, said in (({"train": branch}, set()), ({"train": branch, "optimizer": {"peak_lr": 1e-3}}, {"optimizer.peak_lr", RATE})):
        start = SimpleNamespace(step=5, state=SimpleNamespace(skipped=0), position=position, branched=True)
        assert set(changed_settings(directory, tiny_config(**sections), start, "a" * 64)) == said
    assert directory.replaced_configs() == other.replaced_configs() == []


def test_a_checkpoint_that_does_not_say_its_data_is_no_change(directory):
    directory.write_config(dump(A))
    start = SimpleNamespace(step=5, state=SimpleNamespace(skipped=0), position={"next_step": 5}, branched=False)
    assert changed_settings(directory, A, start, "b" * 64) == {}


def test_a_run_that_has_saved_does_not_begin_anew_because_its_checkpoints_are_gone(directory):
    """Their metrics would be written over, and the lost state go unnoticed."""
    assert lost_checkpoints(directory, "there", []) == ""
    directory.events.write_text(Event("start", 0).to_json() + "\n")
    assert lost_checkpoints(directory, "there", []) == "", "killed before its first save"
    directory.events.write_text(Event("start", 0).to_json() + "\n" + Event("save", 30).to_json() + "\ntorn")
    said = lost_checkpoints(directory, "there", ["old-30 is not the name of a checkpoint"])
    assert (
        said.startswith("there holds no checkpoint; old-30 is not the name of a checkpoint; but this run has saved step 30 (")
        and "run.name" in said
    )


BACK = Event("rollback", 0, data={"from_step": 34})


@pytest.mark.parametrize(
    ("after", "lost"),
    [
        ([BACK], None),
        ([Event("start", 0)], None),  # killed before it told that it went back
        ([Event("restore", 10)], 10),
        ([BACK, Event("save", 10), Event("start", 10)], 10),
        ([BACK, Event("save", 10), Event("save", 20), Event("start", 10)], 10),
        ([Event("start", 30)], 30),
        ([Event("start", 34)], 30),  # from a copy in memory
        ([Event("start", 0), Event("restore", 20)], 20),  # as older versions told of a restart
    ],
)
def test_saves_that_training_went_back_behind_are_not_lost(directory, after, lost):
    """The first save after it sets their checkpoints aside; a kill before that one is complete leaves none, and nothing is lost by it."""
    before = [Event("start", 0), *(Event("save", step) for step in (10, 20, 30))]
    directory.events.write_text("".join(f"{event.to_json()}\n" for event in [*before, *after]))
    said = lost_checkpoints(directory, "there", [])
    assert (said == "") if lost is None else f"this run has saved step {lost} (" in said


@pytest.mark.parametrize("saved_again", [False, True])
def test_a_roll_back_that_only_its_file_tells_counts_too(directory, saved_again):
    directory.events.write_text(Event("start", 0, 1.0).to_json() + "\n" + Event("save", 30, 2.0).to_json() + "\n")
    assert "this run has saved step 30 (" in lost_checkpoints(directory, "there", [])
    journal = Journal(directory.roll_backs)
    assert journal.add(34, 5, [30], "spike", "the loss jumped") == ""
    if saved_again:
        with directory.events.open("a") as file:
            file.write(Event("save", 10, journal.records[-1].time + 9).to_json() + "\n")
    said = lost_checkpoints(directory, "there", [])
    assert ("this run has saved step 10 (" in said) if saved_again else said == ""
