"""Expert routing in figures, files, TensorBoard, console and alarms."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from maxlm.config.schema import Config
from maxlm.models.feed_forward.router import Routing
from maxlm.objectives import build_objective
from maxlm.telemetry.balance import ROUTING_METRICS, Balance, collapsed, effective_experts, evenness, peak, times_even
from maxlm.telemetry.console import describe
from maxlm.telemetry.files import FileObserver
from maxlm.telemetry.observer import Event, Observers
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.telemetry.tensorboard import TensorBoardObserver
from maxlm.training import meter
from maxlm.training.routing import COLLAPSED_STEPS, IDLE_STEPS, RoutingAlarms
from maxlm.training.step import Metrics

TOKENS = 4096
SHAPES = [(8, 2), (8, 1), (4, 2), (16, 4), (64, 6), (128, 8), (256, 8)]  # experts, choices of a token


def routing(load_LE, **changes):
    """The sums of a step in which each token chose as many experts as the loads say."""
    load_LE = np.asarray(load_LE, np.int32)
    layers = load_LE.shape[0]
    sums = {"dropped": [0] * layers, "tokens": [TOKENS] * layers, "unsound": [0] * layers}
    means = {"confidence": 0.5, "entropy": 1.0, "balance": 1.0, "z": 4.0}
    given = {**sums, **{name: [TOKENS * mean] * layers for name, mean in means.items()}, **changes}
    return Routing(load_E=load_LE, **{name: np.asarray(value) for name, value in given.items()})


def balance(load_LE, first_layer=0, **changes):
    return Balance.from_sums(first_layer, **routing(load_LE, **changes)._asdict())


def even(experts, top_k, layers=1):
    return np.full((layers, experts), TOKENS * top_k // experts)


def total_collapse(experts, top_k):
    return np.where(np.arange(experts) < top_k, TOKENS, 0)[None]


def reject(text):
    raise AssertionError(f"not strict JSON: {text}")


# Figures


def test_figures_of_hand_made_loads():
    """Layer 0 is even; in layer 1 one of four experts takes half and one takes nothing."""
    figures = balance(
        [[1024] * 4, [2048, 1024, 1024, 0]],
        dropped=[0, 512],
        confidence=[TOKENS * 0.25, TOKENS * 0.75],
        entropy=[TOKENS * 1.0, TOKENS * 2.0],
        balance=[TOKENS * 1.0, TOKENS * 1.5],
        z=[TOKENS * 4.0, TOKENS * 8.0],
    ).figures()
    assert figures == pytest.approx(
        {
            "expert_load_max": 2.0,
            "expert_load_mean": 1.5,
            "expert_entropy": (1 + 0.75) / 2,  # 1.5 bits of 2
            "router_confidence": 0.5,
            "router_entropy": 1.5,
            "dropped": 1 / 16,
            "balance_loss": 1.25,
            "router_z": 6.0,
        }
    )


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_the_ends_of_every_scale(experts, top_k):
    assert peak(even(experts, top_k)) == pytest.approx(1)
    assert evenness(even(experts, top_k)) == pytest.approx(1)
    assert peak(total_collapse(experts, top_k)) == pytest.approx(experts / top_k)
    assert effective_experts(total_collapse(experts, top_k)) == pytest.approx(top_k)


def test_no_token_and_a_lone_expert_are_even():
    for load_LE in (np.zeros((2, 8), int), np.full((2, 1), 9)):
        seen = balance(load_LE, tokens=[0, 0]).figures()
        assert (seen["expert_load_max"], seen["expert_entropy"], seen["dropped"]) == pytest.approx((1, 1, 0))
    assert (times_even(np.zeros((3, 4))) == 1).all()


# Which routers count as collapsed


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_total_collapse_counts_and_even_load_does_not(experts, top_k):
    assert collapsed(total_collapse(experts, top_k), np.array([TOKENS])).all()
    assert not collapsed(even(experts, top_k), np.array([TOKENS])).any()


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_no_mild_skew_counts(experts, top_k):
    """Whatever the loads, as long as no expert takes more than sqrt(2) times its share. (E/K = 2 is the least of SHAPES.)"""
    rng = np.random.default_rng(experts)
    share_NE = rng.dirichlet(np.full(experts, 0.3), 4000)
    worst_N = share_NE.max(axis=1) * experts
    mix_N = np.minimum(1, (math.sqrt(2) - 1) / (worst_N - 1))  # towards even, so that the busiest takes sqrt(2) at most
    share_NE = mix_N[:, None] * share_NE + (1 - mix_N[:, None]) / experts
    load_NE = share_NE * TOKENS * top_k
    assert peak(load_NE).max() > 1.3
    assert not collapsed(load_NE, np.full(4000, TOKENS)).any()


@pytest.mark.parametrize(("experts", "top_k"), [pair for pair in SHAPES if pair[0] > 2 * pair[1]])
def test_one_expert_that_every_token_chooses_counts(experts, top_k):
    rest = TOKENS * (top_k - 1) / (experts - 1)
    load_LE = np.full((1, experts), rest)
    load_LE[0, 3] = TOKENS
    assert collapsed(load_LE, np.array([TOKENS])).all()


def test_dropped_experts_and_all_experts_chosen_do_not_count():
    assert not collapsed(np.full((1, 4), TOKENS), np.array([TOKENS])).any()  # top_k = n_experts
    assert not collapsed(np.zeros((1, 4)), np.array([0])).any()


# Alarms


def told(alarms, loads, **changes):
    """(step, cause, layer) of the alarms that these loads raise, one step each."""
    events = [event for step, load_LE in enumerate(loads, 1) for event in alarms.update(step, balance(load_LE, 3, **changes))]
    assert all(event.kind == "alarm" for event in events)
    return [(event.step, event.data["cause"], event.data["layer"]) for event in events]


COLLAPSE = np.concatenate([even(8, 2), total_collapse(8, 2)])
HEALTHY = even(8, 2, layers=2)
IDLE = np.concatenate([even(8, 2), np.array([[0, 1170, 1170, 1170, 1170, 1170, 1171, 1171]])])


def test_a_collapse_is_told_once_when_it_lasted():
    loads = [COLLAPSE] * (COLLAPSED_STEPS - 1) + [HEALTHY] + [COLLAPSE] * (COLLAPSED_STEPS + 30)
    assert told(RoutingAlarms(), loads) == [(2 * COLLAPSED_STEPS, "collapse", 4)]


def test_it_is_told_again_after_a_healthy_step():
    again = [COLLAPSE] * COLLAPSED_STEPS
    assert [step for step, _, _ in told(RoutingAlarms(), [*again, HEALTHY, *again])] == [COLLAPSED_STEPS, 2 * COLLAPSED_STEPS + 1]


def test_an_idle_expert_is_told_once_and_by_its_layer():
    assert told(RoutingAlarms(), [IDLE] * (IDLE_STEPS - 1) + [HEALTHY] + [IDLE] * (IDLE_STEPS - 1)) == []
    assert told(RoutingAlarms(), [IDLE] * (3 * IDLE_STEPS)) == [(IDLE_STEPS, "idle", 4)]


def test_experts_that_take_turns_are_not_idle():
    assert told(RoutingAlarms(), [np.roll(IDLE, step, axis=1) for step in range(3 * IDLE_STEPS)]) == []


def test_steps_without_tokens_raise_nothing():
    assert told(RoutingAlarms(), [np.zeros((2, 8), int)] * 200, tokens=[0, 0]) == []


def test_balanced_and_noisy_load_raises_nothing():
    rng = np.random.default_rng(0)
    assert told(RoutingAlarms(), rng.multinomial(TOKENS * 2, np.full(8, 1 / 8), (300, 2))) == []


def test_what_an_alarm_says():
    alarms = RoutingAlarms()
    said = [event.data["reason"] for _ in range(IDLE_STEPS) for event in alarms.update(1, balance(COLLAPSE, 3))]
    assert said[0].startswith("layer 4: the router collapses: expert 0 is chosen by 100.0% of the tokens, 4.0 times its even share")
    assert said[1].startswith("layer 4: 6 of 8 experts have received no token for 100 steps")
    assert all("raise model.moe.router.balance_loss or bias_rate" in reason for reason in said)


def test_unsound_logits_name_the_first_layer_at_once():
    alarms = RoutingAlarms()
    (event,) = alarms.update(7, balance(even(8, 2, layers=3), 2, unsound=[0, 512, 4096]))
    assert (event.step, event.data["cause"], event.data["layer"]) == (7, "unsound", 3)
    assert event.data["reason"].startswith("the router of layer 3 gave logits that are not finite for 512 tokens")
    assert alarms.update(8, balance(even(8, 2, layers=3), 2, unsound=[0, 512, 4096])) == []


# The meter and the files


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs a meter over steps with the given routing, and gives the run's directory."""
    monkeypatch.setattr(meter, "token_flops", lambda *_: 1.0)

    def steps(first, last, total, log_every=1, routing_of=lambda step: routing(HEALTHY), loss=3.0, n_dense=0, rest=()):
        experts = {"n_experts": 8, "top_k": 2, "d_ff": 32, "n_dense": n_dense}
        model = {"vocab_size": 64, "d_model": 16, "n_layers": 2 + n_dense, "n_heads": 2, "d_ff": 32, "moe": experts}
        training = {"train": {"steps": total, "global_batch": 8}, "run": {"name": "r", "log_every": log_every}}
        config = Config.model_validate({"model": model, "data": {"store": "s", "seq_len": 8}, "optimizer": {"peak_lr": 1e-3}, **training})
        run = RunDirectory.create(tmp_path, "r")
        observers = Observers([FileObserver(run), *rest])
        measured = meter.Meter(
            SimpleNamespace(config=config, objective=build_objective(config), mesh=SimpleNamespace(size=1), metrics=ROUTING_METRICS),
            observers,
            first - 1,
        )
        for step in range(first, last + 1):
            scalars = {"loss": loss, "z": 0.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64.0, "skipped": 0, "batch_digest": 1}
            measured.stepped(step, Metrics(scalars, routing_of(step)), 0.0)
        measured.flush()
        observers.close()
        return run

    return steps


def lines(path):
    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def test_a_line_of_routing_and_the_figures_beside_the_loss(train):
    run = train(1, 1, 1, routing_of=lambda step: routing(COLLAPSE, dropped=[0, 12]))
    (line,), (record,) = lines(run.routing), lines(run.metrics)
    assert line == {"step": 1, "load": COLLAPSE.tolist(), "dropped": [0, 12], "confidence": [0.5, 0.5], "entropy": [1.0, 1.0]}
    assert record["expert_load_max"] == 4.0
    assert record["dropped"] == pytest.approx(12 / COLLAPSE.sum())
    assert "load" not in record


def test_what_is_not_finite_is_null(train):
    run = train(1, 1, 1, routing_of=lambda step: routing(HEALTHY, confidence=[math.nan, 1.0], entropy=[math.inf, 1.0], z=[math.nan, 1.0]))
    (line,), (record,) = lines(run.routing), lines(run.metrics)
    assert line["confidence"][0] is line["entropy"][0] is record["router_z"] is None


def test_a_dense_run_has_none_of_it(train):
    run = train(1, 3, 3, routing_of=lambda step: None)
    assert not run.routing.exists()
    assert not {"expert_load_max", "dropped", "balance"} & set(lines(run.metrics)[0])


@pytest.mark.parametrize(("total", "log_every"), [(5, 1), (99, 1), (100, 1), (101, 1), (250, 1), (250, 7), (400, 10), (60, 100)])
def test_routing_is_thinned_to_so_many_lines_with_both_ends(train, monkeypatch, total, log_every):
    """A hundred here, a thousand in a run."""
    monkeypatch.setattr(meter, "DETAILED_RECORDS", 100)
    run = train(1, total, total, log_every)
    steps = [line["step"] for line in lines(run.routing)]
    assert len(steps) <= 102
    assert len(steps) >= min(total // log_every, 30)
    assert (steps[0], steps[-1]) == (1, total)
    assert steps == sorted(set(steps))
    assert set(steps) <= {line["step"] for line in lines(run.metrics)}


@pytest.mark.parametrize("again", [1, 6, 7, 11, 12])
def test_after_a_resume_no_step_stands_there_twice(train, again):
    """12 steps, then from `again` on; at 2,000 steps in all every second record holds a line, and the first of an attempt."""
    train(1, 12, 2000, routing_of=lambda step: routing(HEALTHY))
    run = train(again, 14, 2000, routing_of=lambda step: routing(COLLAPSE))
    kept = lines(run.routing)
    steps = [line["step"] for line in kept]
    assert steps == sorted({1, *range(2, 15, 2), again})
    assert [line["load"] == COLLAPSE.tolist() for line in kept] == [step >= again for step in steps]


def test_a_restore_drops_what_came_after_it(train):
    run = train(1, 12, 12)
    files = FileObserver(run)
    files.on_event(Event("restore", 5))
    files.close()
    assert [line["step"] for line in lines(run.routing)] == [1, 2, 3, 4, 5]


def test_alarms_are_events_of_the_run_and_a_skip_names_the_layer(train):
    run = train(1, 2, 5, routing_of=lambda step: routing(HEALTHY, unsound=[0, 9]), loss=math.nan, n_dense=4)
    alarm, *skips = lines(run.events)
    assert (alarm["kind"], alarm["layer"], alarm["cause"]) == ("alarm", 5, "unsound")
    assert [event["kind"] for event in skips] == ["skip", "skip"]
    assert all("the router of layer 5 gave logits that are not finite for 9 tokens" in event["reason"] for event in skips)


# TensorBoard and console


def test_tensorboard_gets_a_scalar_a_layer(record):
    written = {}
    board = TensorBoardObserver(None)
    board._write = lambda figures, step, when: written.update(figures)
    board.on_step(record(5, balance=balance(COLLAPSE, 3)))
    assert {name: value for name, value in written.items() if "/" in name} == {
        "experts/layer_03/load_max": 1.0,
        "experts/layer_04/load_max": 4.0,
    }


def test_the_console_says_the_load_and_what_was_dropped(record):
    said = describe(record(1, extra={"expert_load_max": 1.312, "dropped": 0.0041}, declared=ROUTING_METRICS), 10, 5.0)
    assert said[3:5] == ["load 1.31x", "drop 0.4%"]
    assert not any(
        "drop" in piece for piece in describe(record(1, extra={"expert_load_max": 1.0, "dropped": 0.0}, declared=ROUTING_METRICS), 10, 5.0)
    )
    assert not any("load" in piece for piece in describe(record(1), 10, 5.0))
