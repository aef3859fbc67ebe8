"""What counts as unhealthy, and what does not: made-up losses, no device."""

import json
import math

import numpy as np
import pytest

from maxlm.config.sections.health import HealthConfig
from maxlm.telemetry.alarms import LEAST_LOSS_SPREAD, JumpAlarm
from maxlm.telemetry.layer_alarms import LayerFigures
from maxlm.training.health import BAD_AT_END, BAD_STEPS, SKIPS_IN_A_ROW, Health

VOCAB = 320
UNTRAINED = math.log(VOCAB)  # 5.77


def watch(losses, norms=None, health=None):
    """(the health after these losses, the steps and causes of its alarms)."""
    health = health or Health(UNTRAINED)
    alarms = []
    for step, loss in enumerate(losses, start=1):
        alarms += health.update(step, loss, 1.0 if norms is None else norms[step - 1])
    return health, [(event.step, event.data["cause"]) for event in alarms]


def learning(steps, end=2.5, noise=0.1, seed=0):
    """A loss that falls from that of an untrained model, with noise."""
    fall = end + (UNTRAINED - end) * np.exp(-np.arange(steps) / (steps / 5))
    return list(fall + noise * np.random.default_rng(seed).standard_normal(steps))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("steps", [30, 120, 1000])
def test_a_run_that_learns_is_healthy_and_without_alarms(steps, noise):
    for seed in range(5):
        norms = np.exp(0.3 * np.random.default_rng(seed).standard_normal(steps))
        health, alarms = watch(learning(steps, noise=noise, seed=seed), norms)
        assert (health.problem, health.at_end(), alarms) == ("", "", [])


def test_a_model_that_begins_far_above_an_untrained_one_is_healthy():
    health, _ = watch([24.0 - 0.01 * n for n in range(200)])
    assert health.at_end() == ""
    again, _ = watch([23.0] * 200, health=Health(UNTRAINED, health.levels))
    assert again.at_end() == "", "nor after a restart"


def test_a_run_that_starts_from_a_trained_model_stops_far_below_an_untrained_one():
    began = [1.2, 0.1, *[1.2] * 10]  # one easy batch is not where it began
    health, _ = watch(began, health=Health(UNTRAINED, trained=True))
    assert health.at_end() == ""
    again, _ = watch([2.5] * BAD_STEPS, health=Health(UNTRAINED, health.levels, trained=True))
    assert "more than 1 nat above that with which the run began, 1.2" in again.unhealthy
    fine, _ = watch([2.5] * BAD_STEPS, health=Health(UNTRAINED, health.levels))
    assert fine.unhealthy == "", "below ln(vocabulary)"


@pytest.mark.parametrize("settings", [None, HealthConfig(spike="roll_back")])
@pytest.mark.parametrize("garbage", [9.0, 4.2, 0.2])
def test_a_batch_of_garbage_is_an_alarm_that_names_its_update_and_no_end(garbage, settings):
    """Random tokens, another language, one token repeated: each of the first two is said, a level below the usual once."""
    losses = learning(300, noise=0.05)
    losses[200] = losses[201] = garbage
    health, alarms = watch(losses, health=Health(UNTRAINED, settings=settings))
    assert (health.unhealthy, health.problem, health.roll_back) == ("", "", None)
    assert alarms == [(201, "odd_batch"), (202, "odd_batch")][: 1 if garbage < 1 else 2]


def test_a_planned_change_of_the_data_is_no_jump():
    """Where a stage of the mixture begins the loss of the data before says nothing; later it is judged as before."""
    losses = [*learning(200, noise=0.02), *(np.array(learning(200, end=4.0, noise=0.02)) * 0 + 4.5)]
    assert [cause for _, cause in watch(losses)[1]] == ["odd_batch"] * 3 + ["loss_jump"]
    health, alarms = Health(UNTRAINED), []
    for step, loss in enumerate([*losses, 8.0], start=1):
        alarms += health.update(step, loss, 1.0, other_data=step == 201)
    assert [(event.step, event.data["cause"]) for event in alarms] == [(401, "odd_batch")]


MIXTURES = {"a fiftieth": (0.02, 1.2), "a tenth": (0.1, 1.2), "every seventh": (1 / 7, 1.0), "easy": (0.1, -1.9)}


@pytest.mark.parametrize("kind", MIXTURES)
def test_batches_of_another_level_are_usual_after_a_few_and_garbage_is_still_told(kind):
    """A source that is harder or easier than the others, at random or in turn; then one batch of garbage; with restarts or without."""
    share, away = MIXTURES[kind]
    dice, losses = np.random.default_rng(0), np.array(learning(2000, noise=0.05))
    losses[(np.arange(2000) % 7 == 0) if kind == "every seventh" else dice.random(2000) < share] += away
    losses[1900] = 8.0
    found = watch(losses)[1]
    assert found[-1] == (1901, "odd_batch") and 5 <= len(found) <= 10, found
    settings = HealthConfig()
    again, alarms = Health(UNTRAINED, settings=settings), []
    for step, loss in enumerate(losses, start=1):
        again = Health(UNTRAINED, json.loads(json.dumps(again.levels)), settings=settings) if step > 1 and step < 400 else again
        alarms += [(event.step, event.data["cause"]) for event in again.update(step, loss, 1.0)]
    assert alarms == found, "a restart forgets nothing"


def test_single_values_far_below_are_told_alike_with_restarts_and_anew_after_a_planned_change():
    losses = np.array(learning(200, noise=0.02))
    losses[[100, 103]] = 0.5

    def told(restart=0, change=0):
        alarm, steps = JumpAlarm("l", "loss", LEAST_LOSS_SPREAD, odd="odd_batch"), []
        for step, loss in enumerate(losses, start=1):
            if step == restart:
                window = json.loads(json.dumps(alarm.window))
                alarm = JumpAlarm("l", "loss", LEAST_LOSS_SPREAD, odd="odd_batch")
                alarm.restore(window)
            if step == change:
                alarm.forget()
                assert alarm.window == [[], [], 0, 0, []]
            steps += [event.step for event in alarm.update(step, loss)]
        return steps

    assert told() == told(101) == told(102) == told(103) == told(104) == told(change=150) == [101]
    earlier = JumpAlarm("l", "loss", LEAST_LOSS_SPREAD, odd="odd_batch")
    earlier.restore([[1.0] * 30, [], 7])
    assert earlier.window == [[1.0] * 30, [], 7, 0, []]


def test_a_loss_that_falls_in_a_few_updates_is_no_odd_batch():
    for fall in (10, 20, 60):
        losses = [*learning(300, noise=0.02)[:200], *np.linspace(2.5, 1.0, fall), *[1.0] * 100]
        assert watch(losses)[1] == []


@pytest.mark.parametrize("where", [0, 50])
def test_updates_that_are_not_finite(where):
    health, _ = watch(learning(50)[:where] + [math.nan] * (SKIPS_IN_A_ROW - 1))
    assert health.unhealthy == ""
    assert "skipped: loss nan" in health.problem
    assert ("not one of 9 updates was finite" in health.at_end()) == (where == 0)
    health.update(99, 3.0, math.inf)
    assert "10 updates in a row were not finite" in health.unhealthy


def test_one_skipped_update_is_forgiven_by_the_next():
    health, _ = watch([5.7, 5.6, math.nan])
    assert health.at_end() != ""
    health.update(4, 5.5, 1.0)
    assert health.at_end() == health.problem == ""


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([UNTRAINED] * 250, "is back at the loss of an untrained model, 5.768,"),
        ([7.5] * 100, "is more than 1 nat above that of an untrained model"),
    ],
    ids=["a flipped bit", "garbage"],
)
def test_a_model_that_has_lost_what_it_learned_stops(after, said):
    health = Health(UNTRAINED)
    watch(learning(300), health=health)
    _, alarms = watch(after[: BAD_STEPS - 1], health=health)
    assert said in health.problem, "from the first step on nothing is saved"
    assert health.unhealthy == ""
    assert [cause for _, cause in alarms] == ["odd_batch"] * 3 + ["loss_jump"]
    watch(after[:1], health=health)
    assert said in health.unhealthy


def test_a_restart_knows_how_low_the_loss_was():
    """The checkpoint may have been damaged just before it was saved; then the first loss of the next attempt is already bad."""
    before, _ = watch(learning(300))
    again = Health(UNTRAINED, before.levels)
    watch([UNTRAINED] * BAD_STEPS, health=again)
    assert "back at the loss of an untrained model" in again.unhealthy
    anew, _ = watch([UNTRAINED] * BAD_STEPS)
    assert anew.unhealthy == "", "without it this is how every run begins"


def test_a_restart_goes_back_for_a_layer_as_a_run_without_one():
    """With the windows of the layers in `levels`, as they are in a checkpoint."""
    settings = HealthConfig.model_validate({"layers": "roll_back"})
    rng = np.random.default_rng(1)
    figures = np.exp(0.1 * rng.standard_normal((2, 120, 3))).astype(np.float32)
    figures[1, 100:, 1] *= 60

    def rolled_back(restart):
        health = Health(UNTRAINED, settings=settings)
        for step in range(1, 121):
            if step == restart:
                health = Health(UNTRAINED, json.loads(json.dumps(health.levels)), settings=settings)
            health.update(step, 5.0, 1.0, layers=LayerFigures("abc", figures[0, step - 1], figures[1, step - 1]))
            if health.roll_back is not None:
                return step, health.roll_back.before
        return None

    assert rolled_back(0) == rolled_back(96) == rolled_back(103) == (105, 99)


def test_a_last_update_that_overflows_is_no_fault():
    """As where an attempt begins one update before the end: the scale of the loss is halved, and the next would be finite."""
    few, many = Health(UNTRAINED), Health(UNTRAINED)
    few.update(100, math.nan, math.nan, overflowed=True)
    assert few.at_end() == ""
    for step in range(1, SKIPS_IN_A_ROW + 1):
        many.update(step, math.nan, math.nan, overflowed=True)
    assert "not one of 10 updates was finite" in many.at_end()


def test_divergence_from_the_start_stops_and_a_short_run_is_not_done():
    rising = [UNTRAINED + 0.5 * n for n in range(60)]
    health, _ = watch(rising)
    assert "above that of an untrained model" in health.unhealthy
    short, _ = watch([UNTRAINED, 6.5, *[20.0] * BAD_AT_END])
    assert short.unhealthy == ""
    assert "above that of an untrained model" in short.at_end()


def test_a_model_without_a_gradient_stops():
    health, _ = watch([UNTRAINED] * BAD_STEPS, [0.0] * BAD_STEPS)
    assert "nothing is learned" in health.unhealthy


def test_jumps_are_told_once_with_both_levels():
    losses = learning(200) + list(4.0 + 0.1 * np.random.default_rng(1).standard_normal(200))
    health, alarms = watch(losses)
    assert [alarm for alarm in alarms if alarm[1] != "odd_batch"] == [(205, "loss_jump")]
    assert health.at_end() == "", "an alarm stops nothing"
    norms = [1.0 + 0.1 * (n % 3) for n in range(100)] + [40.0] * 100
    assert watch([5.0] * 200, norms)[1] == [(105, "gradient_jump")]
