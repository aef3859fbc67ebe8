"""The fast model behind `maxlm plan`: which layouts there are, what is exact about them, and which way its predictions go."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest
from tiny import tiny_config

from maxlm.config import rules
from maxlm.config.loader import load
from maxlm.hardware.topologies import parse
from maxlm.models.flops import token_flops
from maxlm.parallel import build_mesh
from maxlm.planning.collectives import AxisLinks
from maxlm.planning.cost import OUR_ATTENTION_SHARES
from maxlm.planning.memory import state_parts
from maxlm.planning.search.analytic import Analytic, Estimate
from maxlm.planning.search.layouts import Layout, layout_of, layouts, meshes
from maxlm.planning.search.shapes import attention_flops, held, matmuls
from maxlm.training.program import build_program

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = [f"models/{path.stem}" for path in sorted((CONFIGS / "models").glob("*.yml"))]
MESHES = [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
LARGE = ("train.steps=10", "train.global_batch=256", "data.store=unused", "data.seq_len=8192", "model.rope.scaling=null")


def analytic(config, topology="v5p:2x2x2") -> Analytic:
    """Links as on a torus whose sides are 4, each axis along whole ones."""
    return Analytic(config, parse(topology), lambda layout: {a: AxisLinks(max(1, round(math.log(n, 4)))) for a, n in layout.mesh if n > 1})


def estimate(layout: Layout, config=None, topology="v5p:4x4x4") -> Estimate:
    return analytic(config or load("models/llama3-8b", LARGE).config, topology).estimate(layout)


def layout(**changes) -> Layout:
    mesh = {"data": 1, "stage": 1, "fsdp": 64, "context": 1, "tensor": 1, "expert": 1} | changes.pop("mesh", {})
    return Layout(**{"mesh": tuple(mesh.items()), "microbatches": 1, "loss_chunks": 8, **changes})


@pytest.mark.parametrize("devices", [1, 8, 12])
def test_every_layout_keeps_the_rules_and_comes_once(devices):
    config = tiny_config(train={"global_batch": 48}, model={"n_kv_heads": 4})
    found = list(layouts(config, devices))
    assert len(found) == len(set(found)) > 50
    for one in found:
        applied = one.apply(config)
        rules.check_devices(applied, devices)
        assert layout_of(applied, devices) == one
        assert math.prod(one.sizes.values()) == devices
        assert (applied.train.global_batch, applied.data, applied.model) == (48, config.data, config.model)


def test_every_mesh_that_the_rules_allow_is_found():
    config = tiny_config(train={"global_batch": 48})
    found = {tuple(sizes[axis] for axis in ("data", "fsdp", "tensor")) for sizes, _ in meshes(config, 12)}
    allowed = set()
    for data, fsdp, tensor in ((a, b, c) for a in range(1, 13) for b in range(1, 13) for c in range(1, 13)):
        try:
            rules.check_devices(tiny_config(train={"global_batch": 48}, mesh={"data": data, "fsdp": fsdp, "tensor": tensor}), 12)
        except rules.ConfigError:
            continue
        allowed.add((data, fsdp, tensor))
    assert found == allowed
    assert len(found) == 6


def test_slices_are_joined_along_an_axis_that_they_divide():
    config = tiny_config(mesh={"slices": 2, "data": 2})
    for sizes, across in meshes(config, 8):
        assert sizes[across] % 2 == 0
    assert {across for _, across in meshes(config, 8)} == {"data", "fsdp"}


@pytest.mark.parametrize("name", SIZES)
def test_flops_and_parameters_are_those_of_the_model(name):
    config = load(name, [*LARGE[:3], "data.seq_len=1024"]).config
    model = config.model
    layer = sum(6 * matmul.wide_in * matmul.wide_out for matmul in matmuls(model))
    ours = model.n_layers * layer + 6 * model.vocab_size * model.d_model + 3 * attention_flops(model, 1024)
    assert ours == pytest.approx(token_flops(model, 1024), rel=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_state_is_exact(mesh, optimizer):
    config = tiny_config(mesh=mesh, optimizer={"name": optimizer})
    program = build_program(config, build_mesh(config, jax.devices()))
    parameters, moments, batch = (part.bytes for part in state_parts(program))
    said = analytic(config).estimate(layout_of(config, 8)).state
    assert 0 <= parameters + moments + batch - said < 100  # counters
    assert sum(leaf.numbers for leaf in held(config)) == sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params))


KEPT = ("layer_input", "query", "key", "value", "attention", "attention_out")
HAND = {"remat": (*KEPT, "gate", "up"), "microbatches": 2, "loss_chunks": 4}


@pytest.mark.parametrize(
    ("before", "after", "faster", "smaller"),
    [
        ({}, {"remat": KEPT}, "matmul_s attention_s", ""),
        ({"remat": KEPT}, {"remat": (*KEPT, "gate", "up")}, "matmul_s", ""),
        ({"remat": KEPT}, {"remat": KEPT, "microbatches": 2}, "", "temporaries least_bytes"),
        ({"remat": KEPT}, {"remat": KEPT[1:], "offload": KEPT[:1]}, "", "temporaries"),
        ({"loss_chunks": 2}, {"loss_chunks": 16}, "", "temporaries"),
        ({"mesh": {"data": 8, "fsdp": 8}}, {}, "", "state least_bytes"),
        ({"microbatches": 4}, {"microbatches": 1}, "exposed_s memory_s", ""),
    ],
)
def test_what_helps_is_predicted_to_help(before, after, faster, smaller):
    old, new = estimate(layout(**before)), estimate(layout(**after))
    for name in f"{faster} {smaller}".split():
        assert getattr(new, name) < getattr(old, name), name


def test_bounds_are_below_predictions():
    config = load("models/llama3-8b", LARGE).config
    model = analytic(config, "v5p:4x4x4")
    for one in layouts(config, 64):
        said = model.estimate(one)
        assert said.least_s < sum(said.parts)
        assert said.least_bytes <= said.state + said.temporaries
        assert min(said.parts) >= 0


def test_a_model_without_gates_keeps_none():
    gated, plain = (load("models/llama3-8b", [*LARGE, f"model.activation={name}"]).config for name in ("swiglu", "gelu"))
    per_layer = 2 * gated.model.d_ff * 256 // 64 * 8192  # bytes of bfloat16
    for remat in ("none", "dots"):
        more, less = (estimate(layout(remat=remat), config) for config in (gated, plain))
        state = more.state - less.state
        assert more.least_bytes - less.least_bytes - state == gated.model.n_layers * per_layer
    assert not any("gate" in one.kept for one in layouts(plain, 8) if isinstance(one.remat, tuple))


def test_no_more_is_offloaded_than_the_hosts_hold():
    """8B, 32,768 tokens a chip: the inputs of the layers are 8.6 GB, with queries, keys, values and projections 30 GB."""
    config = load("models/llama3-8b", LARGE).config
    little, much = (layout(remat="full", offload=names) for names in (KEPT[:1], (*KEPT[:4], "attention_out")))
    for topology, fits in (("v5e:8x8", (True, True)), ("v5p:4x4x4", (True, True)), ("v4:4x4x4", (True, False))):
        assert tuple(map(analytic(config, topology).fits_host, (little, much))) == fits


def test_recomputing_costs_what_it_computes():
    """Full remat runs every matmul of the forward pass again but the last, and attention; keeping all named tensors runs none again."""
    config = load("models/llama3-8b", LARGE).config
    full, kept = (estimate(layout(remat=remat)) for remat in ("full", (*KEPT, "gate", "up")))
    shapes = matmuls(config.model)
    again = sum(m.wide_in * m.wide_out for m in shapes if m.name != "mlp_out") * config.model.n_layers
    all_of_it = 3 * (sum(m.wide_in * m.wide_out for m in shapes) * config.model.n_layers + config.model.vocab_size * config.model.d_model)
    assert full.matmul_s / kept.matmul_s == pytest.approx(1 + again / all_of_it, rel=1e-3)
    forward, backward = (matmuls / share for matmuls, share in zip((2, 5), OUR_ATTENTION_SHARES["v5p"], strict=True))
    assert full.attention_s / kept.attention_s == pytest.approx((2 * forward + backward) / (forward + backward))


@pytest.mark.parametrize(
    ("settings", "parts", "needed"),
    [
        ({}, (4.037, 0.862, 0.181, 0.015), 16.4),
        (HAND, (3.306, 0.671, 0.268, 0.029), 54.6),
        ({**HAND, "mesh": {"data": 4, "fsdp": 16}, "loss_chunks": 16}, (3.308, 0.671, 0.278, 0.029), 60.2),
        ({**HAND, "mesh": {"data": 16, "fsdp": 4}, "loss_chunks": 2}, (3.310, 0.671, 0.327, 0.048), 87.8),
        ({"remat": "none", "microbatches": 4, "loss_chunks": 16}, (3.390, 0.671, 0.507, 0.055), 82.4),
    ],
)  # fmt: skip
def test_the_8b_step_on_v5p_is_near_what_the_compiler_said(settings, parts, needed):
    """Seconds and GiB as `maxlm compile` gave them (libtpu 0.0.42): before anything is compiled, the step is known to 3%.

    Attention's are of today's kernel, compiled for the second layout; in the others they are what its passes cost there, by how often
    each runs.
    """
    said = estimate(layout(**settings))
    assert sum(said.parts) == pytest.approx(sum(parts), rel=0.03)
    assert said.parts[:2] == pytest.approx(parts[:2], rel=0.025)
    assert said.parts[2] == pytest.approx(parts[2], rel=0.08)
    assert said.parts[3] == pytest.approx(parts[3], abs=0.016)
    assert (said.state + said.temporaries) / 2**30 == pytest.approx(needed, rel=0.1)


def test_a_layout_that_differs_is_another_layout():
    one = layout()
    assert len({one, *(dataclasses.replace(one, **change) for change in ({"microbatches": 2}, {"remat": "dots"}, {"loss_chunks": 4}))}) == 4
