"""The analytic model with quantized matmuls: what 8 bits change, and what they leave."""

import dataclasses

import pytest
from test_plan_model import LARGE, analytic, layout

from maxlm.config import load
from maxlm.hardware.chips import chip_named
from maxlm.planning.analytic import Analytic

WHOLE = layout(remat="none", microbatches=1, loss_chunks=4)


def model(topology="v5p:4x4x4", **matmul) -> Analytic:
    config = load("models/llama3-8b", LARGE).config
    section = {"precision": {**config.model_dump()["precision"], "matmul": matmul or None}}
    return analytic(type(config).model_validate({**config.model_dump(), **section}), topology)


def test_three_matmuls_of_each_matrix_take_the_time_of_their_format():
    """Nothing recomputed: time is in proportion to FLOPs over speed, but for the unembedding."""
    bf16, int8 = model().estimate(WHOLE), model(format="int8").estimate(WHOLE)
    blocks, vocabulary = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336), 4096 * 128256
    speed = chip_named("v5p").matmul_speed("int8")
    assert int8.matmul_s / bf16.matmul_s == pytest.approx((blocks / speed + vocabulary) / (blocks + vocabulary), rel=0.01)
    assert int8.attention_s == bf16.attention_s
    assert int8.memory_s > bf16.memory_s, "operands are quantized"
    assert int8.exposed_s < bf16.exposed_s, "their weights travel in half the bytes"


def test_gradients_in_bf16_leave_two_of_three():
    saved = [model().estimate(WHOLE).matmul_s - model(format="int8", gradients=how).estimate(WHOLE).matmul_s for how in ("bf16", None)]
    assert saved[1] == pytest.approx(3 * saved[0], rel=0.01)


def test_a_recomputed_matmul_is_recomputed_in_its_format():
    full = dataclasses.replace(WHOLE, remat="full")
    more = [one.estimate(full).matmul_s - one.estimate(WHOLE).matmul_s for one in (model(), model(format="int8"))]
    assert more[0] == pytest.approx(chip_named("v5p").matmul_speed("int8") * more[1], rel=0.01)


def test_matrices_and_layers_that_stay_high_are_priced_so():
    one = [model(format="int8", **kept).estimate(WHOLE).matmul_s for kept in ({}, {"skip": ["gate", "up", "down"]}, {"first_layers": 16})]
    bf16 = model().estimate(WHOLE).matmul_s
    assert one[0] < one[1] < bf16
    assert bf16 - one[2] == pytest.approx((bf16 - one[0]) / 2, rel=0.01)
    assert model(format="int8", weights_only=True).estimate(WHOLE) == model().estimate(WHOLE)


@pytest.mark.parametrize(
    ("topology", "format", "faster"), [("v6e:8x8", "int8", True), ("v6e:8x8", "fp8", False), ("tpu7x:4x4x4", "fp8", True)]
)
def test_a_format_that_the_chip_is_slow_with_gains_nothing(topology, format, faster):
    devices = 128 if topology.startswith("tpu7x") else 64
    at = layout(remat="none", microbatches=1, loss_chunks=4, mesh={"fsdp": devices})
    ratio = (
        model(topology, format=format, gradients="e4m3" if format == "fp8" else None).estimate(at).matmul_s
        / model(topology).estimate(at).matmul_s
    )
    assert (ratio < 0.8) == faster and (ratio >= 1) == (not faster)


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("topology", ["v5e:8x8", "v5p:4x4x4", "v6e:8x8"])
def test_the_lower_bound_stays_below(topology, format):
    found = model(topology, format=format).estimate(WHOLE)
    assert found.least_s < sum(found.parts)
