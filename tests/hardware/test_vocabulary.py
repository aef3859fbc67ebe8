"""Reports on GPUs speak of GPUs, nodes and NVLink, and those on TPUs of chips, hosts and ICI."""

import io
import re

import pytest
from rich.console import Console

from maxlm.compiler.aot import CompiledStep, Memory
from maxlm.config.loader import load
from maxlm.cost.compile_report import Report, show, too_small
from maxlm.cost.expected import step_scale
from maxlm.cost.model_shapes import parameter_leaves
from maxlm.cost.step_cost import StepCost, Traffic
from maxlm.hardware.chips import CHIPS, GIB
from maxlm.hardware.prices import LIST_PRICES
from maxlm.hardware.topologies import is_tpu, near, parse
from maxlm.hardware.vocabulary import vocabulary
from maxlm.planning.plan import machine_name
from maxlm.planning.run_cost import Wanted, run_cost, sentences

OF_TPUS, OF_GPUS = r"\b(chips?|ici|dcn|hosts)\b", r"\b(gpus?|nvlink|nodes?)\b"


def traffic(link: str) -> Traffic:
    return Traffic(("fsdp",), "all-gather", "jit(train_step)/mul", "sync", link, 4, 2**24, 1e-3, 1e-4)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_report_has_the_words_of_its_platform(chip):
    topology = parse(near(chip, 16)[0])
    settings = ["train.steps=1", "train.global_batch=64", "data.store=unused", "data.seq_len=1024", f"cluster.topology={topology.name}"]
    config = load("models/llama3-8b", settings).config
    cost = StepCost(0.1, 0.1, 0.0, 0.1, 0.1, 0.0, 1, 1, 0, (), (), (), (), tuple(map(traffic, ("ici", "dcn", "host"))))
    fits = CompiledStep("text", Memory(1, 1, 0, 1, 0, 0, 0), GIB, 2 * GIB, 1.0)
    larger = CompiledStep("", None, 3 * GIB, 2 * GIB, 1.0)
    mesh = dict.fromkeys(("data", "stage", "context", "tensor", "expert"), 1) | {"fsdp": topology.devices}
    file, scale = io.StringIO(), step_scale(config.model, None, config.data.seq_len, config.tokens_per_step, topology)
    for step in (fits, larger):
        console = Console(file=file, width=200, markup=False, highlight=False)
        show(Report(config, topology, mesh, 8 * 10**9, scale, step, (), cost if step is fits else None, (), ()), console)
    wanted = Wanted(LIST_PRICES)
    costs = sentences(run_cost(topology, config.memory_checkpoints, 1e6, 4.0, wanted), wanted, vocabulary(chip).chip)
    text = "\n".join([file.getvalue(), machine_name(topology), too_small(parameter_leaves(config), topology, 1), *costs])
    own, foreign = (OF_TPUS, OF_GPUS) if is_tpu(chip) else (OF_GPUS, OF_TPUS)
    assert re.findall(foreign, text, re.IGNORECASE) == []
    expected = {"chips", "ici", "dcn"} if is_tpu(chip) else {"gpus", "nvlink", "node"}
    assert expected <= {one.lower() for one in re.findall(own, text, re.IGNORECASE)}
