"""What a specialist would say: only where there is something to say."""

import re

import pytest
from tiny import tiny_config, tiny_program

from maxlm.compiler.aot import CompiledStep, Memory
from maxlm.cost import advice
from maxlm.cost.network import AxisLinks
from maxlm.cost.step_cost import StepCost, Traffic
from maxlm.hardware.topologies import parse

GIB = 2**30
SIZES = {"data": 1, "stage": 1, "fsdp": 4, "context": 1, "tensor": 1, "expert": 1}
GOOD = {"d_model": 512, "n_heads": 4, "n_kv_heads": 4, "head_dim": 128, "d_ff": 1024, "vocab_size": 1024}


def traffic(
    opcode="all-gather", axes=("fsdp",), where="jit(train_step)/jvp()/while/body/x", size=GIB, exposed_s=0.0, seconds=1e-2
) -> Traffic:
    return Traffic(axes, opcode, where, "sync", "ici", count=2, bytes=size, seconds=seconds, exposed_s=exposed_s)


def remarks(config, *, chip="v5e:2x2", sizes=SIZES, used=14 * GIB, collectives=(), loops=()) -> list[str]:
    memory = Memory(argument=used, output=0, alias=0, temp=0, code=0, peak=0, host=0)
    step = CompiledStep("", memory, used, 16 * GIB, 1.0)
    names = ("matmul_s", "attention_s", "kernel_s", "memory_s", "exposed_s", "hidden_s")
    none = dict.fromkeys(("assumed", "uncharged", "unknown_loops", "top"), ()) | {"unknown_loops": loops}
    flops = dict.fromkeys(("matmul_flops", "attention_flops", "kernel_flops"), 0)
    seconds = {**dict.fromkeys(names, 0.0), "matmul_s": 1.0}
    cost = StepCost(**seconds, **flops, **none, traffic=tuple(collectives))
    return advice.remarks(config, parse(chip), sizes, {"fsdp": AxisLinks(dims=2)}, step, cost)


def config(**sections):
    return tiny_config(**{"model": GOOD, "data": {"seq_len": 4096}, "train": {"global_batch": 16}, **sections})


def test_a_good_step_gets_no_remark():
    assert remarks(config(), collectives=[traffic()]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"config": config(model={**GOOD, "d_ff": 1056})}, "model.d_ff = 1056"),
        ({"config": config(model={**GOOD, "head_dim": 64})}, "model.head_dim = 64"),
        ({"loops": tuple("abcde")}, "loops turn is not in the compiled program: a, b, c and 2 others. They count once, so the time is a"),
        ({"chip": "v6e:2x2"}, "fill 50% of it"),  # heads of 128 on a unit of 256
        ({"sizes": {**SIZES, "tensor": 16}}, "model.d_ff = 1024 / mesh.tensor 16"),
        ({"config": config(data={"seq_len": 128})}, "too few to hide gathers over mesh.fsdp"),
        ({"collectives": [traffic(exposed_s=0.2)]}, "20% of the step waits for all-gather over fsdp"),
        ({"collectives": [traffic("all-reduce")]}, "activations are summed over fsdp"),
        ({"collectives": [traffic("all-reduce", where="jit(train_step)/transpose(jvp())/x")]}, "twice what a reduce-scatter would"),
        ({"collectives": [traffic("all-to-all")]}, "moves data between layouts"),
        ({"collectives": [traffic(axes=("unknown",))]}, "no mesh axis"),
        ({"used": GIB}, "memory.remat = full recomputes what could be kept"),
    ],
)
def test_what_is_wrong_is_said_once(changes, said):
    found = remarks(**{"config": config(), **changes})
    assert len([remark for remark in found if said in remark]) == 1, found


@pytest.mark.parametrize("opcode", ["all-reduce", "all-to-all", "collective-permute"])
def test_small_collectives_surprise_nobody(opcode):
    assert advice.surprise(traffic(opcode, size=4096)) == ""


@pytest.mark.parametrize(("opcode", "operation"), [("collective-permute", "ppermute"), ("all-to-all", "all_to_all")])
def test_what_the_source_asks_for_surprises_nobody(opcode, operation):
    """The hops of a ring, and heads exchanged for tokens."""
    assert advice.surprise(traffic(opcode, axes=("context",), where=f"jit(train_step)/jvp()/shard_map/{operation}")) == ""
    assert "moves data between layouts" in advice.surprise(traffic(opcode, axes=("context",), where="jit(train_step)/jvp()/dot_general"))


def test_matrices_that_an_update_spreads_surprise_nobody():
    """The exchange of Muon's update, as its program names it."""
    program = tiny_program(2, mesh={"fsdp": 2}, optimizer={"name": "muon"})
    places = set(re.findall(r" all-to-all\(.*op_name=\"([^\"]*)", program.step.as_text()))
    assert places and {advice.surprise(traffic("all-to-all", axes=("fsdp",), where=place)) for place in places} == {""}
    assert "moves data" in advice.surprise(traffic("all-to-all", axes=("fsdp",), where="jit(train_step)/mul"))


def test_what_is_unexpected_says_what_to_do_and_is_said_only_where_it_takes_time():
    collective = traffic("all-to-all")
    (said,) = remarks(config(), collectives=[collective])
    assert "1.0% of the step" in said and "compare another mesh, as maxlm plan does; if it stays, report this line" in said
    brief = traffic("all-to-all", seconds=1e-3)
    assert advice.surprise(brief) and remarks(config(), collectives=[brief]) == [], "a thousandth of the step is nobody's to act on"


def test_settings_that_break_a_rule_are_not_tried():
    assert advice.changed(config(), {"train.microbatches": 3}) is None
    fewer = advice.changed(config(), {"train.global_batch": 8, "memory.remat": "dots"})
    assert (fewer.train.global_batch, fewer.memory.remat) == (8, "dots")


def test_settings_are_written_as_they_are_typed():
    assert advice.as_arguments({"memory.remat": ("gate", "up"), "train.microbatches": 2}) == "memory.remat=[gate,up] train.microbatches=2"
