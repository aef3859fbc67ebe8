"""The fast model behind `maxlm plan`: which layouts there are, what is exact about them, and which way its predictions go."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from tiny import tiny_config

from maxlm.base.errors import ConfigError
from maxlm.config import rules
from maxlm.config.loader import load
from maxlm.config.sections.mesh import AXES
from maxlm.cost.memory import state_parts
from maxlm.cost.model_shapes import attention_flops, kernel_attention_flops, layers, parameter_leaves
from maxlm.cost.network import AxisLinks
from maxlm.hardware.chips import chip_named
from maxlm.hardware.topologies import parse
from maxlm.models import abstract_parameters, parameter_axes, token_flops
from maxlm.parallel import build_mesh
from maxlm.planning.analytic import Analytic, Estimate
from maxlm.planning.branching import search_all
from maxlm.planning.layouts import Layout, LayoutSpace, why_microbatches_stay
from maxlm.planning.plan import _why_none, analytic_model
from maxlm.training.program import build_program

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = [f"models/{path.stem}" for path in sorted((CONFIGS / "models").glob("*.yml"))]
MESHES = [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
MESHES += [{"fsdp": 8, "zero": 1}, {"fsdp": 4, "context": 2}, {"fsdp": 2, "stage": 2, "tensor": 2}]
EXPERTS = {"n_experts": 8, "top_k": 2, "d_ff": 32, "n_shared": 1, "n_dense": 1}
LATENT = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
MIXTURE = {"n_layers": 4, "n_kv_heads": 8, "moe": EXPERTS, "latent": LATENT, "mtp": {"depth": 1}}  # all that DeepSeek-V3 has
LARGE = ("train.steps=10", "train.global_batch=256", "data.store=unused", "data.seq_len=8192", "model.rope.scaling=null")


def analytic(config, topology="v5p:2x2x2") -> Analytic:
    """Links as on a torus whose sides are 4, each axis along whole ones."""
    return Analytic(config, parse(topology), lambda layout: {a: AxisLinks(max(1, round(math.log(n, 4)))) for a, n in layout.mesh if n > 1})


def estimate(layout: Layout, config=None, topology="v5p:4x4x4") -> Estimate:
    return analytic(config or load("models/llama3-8b", LARGE).config, topology).estimate(layout)


def some_layouts(config, devices: int, step: int) -> Iterator[Layout]:
    """Every step-th way to save something, of every frame."""
    first = 0
    for frame in LayoutSpace(config, devices).frames():
        ways = LayoutSpace(config, 64).savings(frame)
        for loss_chunks, remat, offload in ways[first::step]:
            yield dataclasses.replace(frame, loss_chunks=loss_chunks, remat=remat, offload=offload)
        first = (first - len(ways)) % step


def layout(**changes) -> Layout:
    mesh = {"data": 1, "stage": 1, "fsdp": 64, "context": 1, "tensor": 1, "expert": 1} | changes.pop("mesh", {})
    return Layout(**{"mesh": tuple(mesh.items()), "microbatches": 1, "loss_chunks": 8, **changes})


@pytest.mark.parametrize("devices", [1, 8, 12])
def test_every_layout_keeps_the_rules_and_comes_once(devices):
    config = tiny_config(train={"global_batch": 48}, model={"n_kv_heads": 4})
    found = list(LayoutSpace(config, devices))
    assert len(found) == len(set(found)) > 50
    for one in found[:: 1 + len(found) // 150]:
        applied = one.apply(config)
        rules.check_devices(applied, devices)
        assert LayoutSpace(applied, devices).own() == one
        assert math.prod(one.sizes.values()) == devices
        assert (applied.train.global_batch, applied.data, applied.model) == (48, config.data, config.model)


def test_every_mesh_that_the_rules_allow_is_found():
    config = tiny_config(train={"global_batch": 48}, model={"n_layers": 3, "moe": EXPERTS})
    found = {one.mesh for one in LayoutSpace(config, 12).meshes()}
    allowed = set()
    for counts in itertools.product([1, 2, 3, 4, 6, 12], repeat=len(AXES)):
        mesh = dict(zip(AXES, counts, strict=True))
        with contextlib.suppress(rules.ConfigError):
            if math.prod(counts) == 12:
                rules.check_devices(tiny_config(train={"global_batch": 48}, model={"n_layers": 3, "moe": EXPERTS}, mesh=mesh), 12)
                allowed.add(tuple(mesh.items()))
    assert found == allowed
    assert all(any(dict(one)[axis] > 1 for one in found) for axis in AXES)


def test_what_an_axis_leaves_to_choose_is_searched():
    config = tiny_config(train={"global_batch": 8}, model={"n_layers": 4, "n_kv_heads": 2})
    some = list(LayoutSpace(config, 4).frames())
    assert {one.attention for one in some if one.sizes["context"] == 2} == {"ring", "gather", "ulysses"}
    assert {one.attention for one in some if one.sizes["context"] == 4} == {"ring", "gather"}  # there are two heads of keys
    fsdp = [one for one in some if one.sizes["fsdp"] == 4]
    assert {(one.zero, one.microbatches) for one in fsdp} == {(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)}
    assert {one.zero for one in some if one.sizes["fsdp"] == 1} == {3}
    piped = {(one.sizes["stage"], one.microbatches, one.chunks) for one in some if one.sizes["stage"] > 1}
    assert {(2, 1, 1), (2, 4, 2), (4, 4, 1)} <= piped
    assert (2, 1, 2) not in piped  # rounds of two microbatches
    assert not any(one.offload for one in LayoutSpace(config, 4) if one.sizes["stage"] > 1)


@pytest.mark.parametrize(
    ("train", "meshes_found"),
    [
        ({"microbatches": 2, "noise_scale": {}}, 1),
        ({"batch_ramp": [{"global_batch": 8, "until_tokens": 1000}]}, 2),
    ],
)
def test_rules_of_microbatches_are_kept_with_the_real_number(train, meshes_found):
    """One microbatch measures no noise; a pipeline's are of every size of the batch."""
    config = tiny_config(train={"global_batch": 32, **train})
    found = list(LayoutSpace(config, 4).frames())
    assert {one.sizes["stage"] for one in found} == {1, 2}.intersection(range(1, 1 + meshes_found))
    for one in found:
        assert one.apply(config).train.microbatches == one.microbatches


def test_links_are_read_off_a_mesh_whatever_the_config_asks_of_microbatches():
    pytest.importorskip("libtpu")
    config = tiny_config(train={"global_batch": 32, "microbatches": 2, "noise_scale": {}})
    layout = next(one for one in LayoutSpace(config, 4) if one.sizes["fsdp"] == 4)
    plain = tiny_config(train={"global_batch": 32, "microbatches": 2})
    found = [analytic_model(one, parse("v5e:2x2")).estimate(layout).parts for one in (config, plain)]
    assert found[0] == found[1] and sum(found[0]) > 0


def test_no_layout_has_checks_that_compare_nothing():
    config = tiny_config(integrity={}, mesh={"fsdp": 4})
    assert all(one.sizes["data"] * one.sizes["context"] * one.sizes["tensor"] > 1 for one in LayoutSpace(config, 4).meshes())
    with pytest.raises(ConfigError, match="holds a copy"):
        LayoutSpace(config, 4).own()
    with pytest.raises(ConfigError, match="on GPUs"):
        rules.check(tiny_config(integrity={"repeat_every": 5}, cluster={"topology": "h100:1x4"}), any_mesh=True)
    with pytest.raises(ConfigError, match="holds a copy"):
        rules.check(tiny_config(integrity={}, mesh={"fsdp": 4}, cluster={"topology": "h100:1x4"}))


def test_microbatches_stay_where_experts_are_balanced_over_each():
    def counts(**router):
        config = tiny_config(model={"moe": {**EXPERTS, "router": router}}, train={"microbatches": 2, "global_batch": 32})
        return {one.microbatches for one in LayoutSpace(config, 8).frames()}, why_microbatches_stay(config.model, config.train.microbatches)

    assert counts(balance_loss=0.01)[0] == {2} and "train.microbatches stays 2" in counts(balance_loss=0.01)[1]
    assert counts(balance_loss=0.01, balance_over="sequence") == counts() == ({1, 2, 4, 8, 16, 32}, "")


def test_a_pipeline_of_the_config_is_left_when_a_layout_has_none():
    config = tiny_config(mesh={"stage": 2, "fsdp": 2}, train={"microbatches": 4, "global_batch": 8}, pipeline={"schedule": "gpipe"})
    own = LayoutSpace(config, 4).own()
    assert own.schedule == "gpipe"
    assert own.settings(config).keys().isdisjoint({"pipeline", "mesh.zero", "mesh.context_attention"})
    assert own.apply(config) == config
    other = next(one for one in LayoutSpace(config, 4) if one.sizes["stage"] == 1)
    assert other.apply(config).pipeline is None


def test_slices_are_joined_along_an_axis_that_they_divide():
    config = tiny_config(mesh={"slices": 2, "data": 2})
    for one in LayoutSpace(config, 8).meshes():
        assert one.sizes[one.across_slices] % 2 == 0
    assert {one.across_slices for one in LayoutSpace(config, 8).meshes()} == {"data", "fsdp", "stage"}


@pytest.mark.parametrize("name", SIZES)
def test_flops_and_parameters_are_those_of_the_model(name):
    config = load(name, [*LARGE[:3], "data.seq_len=1024"]).config
    model = config.model
    blocks = [(len(kind.depths), matmul) for kind in layers(model) for matmul in kind.matmuls]
    vocab, heads = model.vocab_size * model.d_model, 1 + model.mtp_depth
    ours = 6 * (sum(count * matmul.multiply_adds for count, matmul in blocks) + heads * vocab) + 3 * attention_flops(model, 1024)
    assert ours == pytest.approx(token_flops(model, 1024), rel=1e-12)
    shapes = jax.tree.leaves(abstract_parameters(model))
    axes = jax.tree.leaves(parameter_axes(model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    inside = [leaf.size for leaf, names in zip(shapes, axes, strict=True) if _in_a_matmul(names)]
    assert sum(count * matmul.gathered(dict.fromkeys(AXES, 1)) for count, matmul in blocks) == sum(inside)


def _in_a_matmul(names: tuple[str, ...]) -> bool:
    """True if parameters with these axes are operands of a matmul in a layer."""
    return "embed" in names and "vocab" not in names


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_state_is_exact(mesh, optimizer):
    config = tiny_config(mesh=mesh, optimizer={"name": optimizer})
    program = build_program(config, build_mesh(config, jax.devices()))
    parameters, moments, batch = (part.bytes for part in state_parts(program))
    said = analytic(config).estimate(LayoutSpace(config, 8).own()).state
    assert 0 <= parameters + moments + batch - said < 100  # counters
    assert sum(leaf.numbers for leaf in parameter_leaves(config)) == sum(
        leaf.size for leaf in jax.tree.leaves(program.abstract_state.params)
    )


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
    for one in some_layouts(config, 64, 1999):
        said = model.estimate(one)
        least_s, least_bytes = model.frame_bounds(one)
        assert least_s <= sum(said.parts) * (1 + 1e-9)
        assert least_bytes <= said.least_bytes
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
    assert not any("gate" in one.kept for one in LayoutSpace(plain, 8) if isinstance(one.remat, tuple))


def test_no_more_is_offloaded_than_the_hosts_hold():
    """8B, 32,768 tokens a chip: the inputs of the layers are 8.6 GB, with queries, keys, values and projections 30 GB."""
    config = load("models/llama3-8b", LARGE).config
    little, much = (layout(remat="full", offload=names) for names in (KEPT[:1], (*KEPT[:4], "attention_out")))
    for topology, fits in (("v5e:8x8", (True, True)), ("v5p:4x4x4", (True, True)), ("v4:4x4x4", (True, False))):
        assert tuple(map(analytic(config, topology).fits_host, (little, much))) == fits


def test_one_microbatch_at_a_time_waits_on_the_host():
    """Of the case before a quarter fits. Of shipped runs with state and layers' inputs there the compiler says as much as is counted."""
    config, much = load("models/llama3-8b", LARGE).config, layout(remat="full", offload=(*KEPT[:4], "attention_out"))
    assert analytic(config, "v4:4x4x4").fits_host(dataclasses.replace(much, microbatches=4))
    for name, gib in (("llama3-70b-v5e-64", 17.3), ("llama3-405b-v5p-256", 31.5)):  # docs/explanation/memory-tiers.md
        config = load(f"runs/{name}").config
        topology = rules.topology_of(config)
        one, model = LayoutSpace(config, topology.devices).own(), analytic(config, topology.name)
        assert model.fits_host(one)
        assert model._host_bytes(one, model.tokens(one) // one.microbatches) == pytest.approx(gib * 2**30, rel=0.02)


def test_state_that_the_hosts_cannot_hold_is_no_plan():
    """8B, 16 bytes a parameter: 128 GB. A v5e has 48 GB of host memory; of a v4 none is stated, and nothing is refused for a guess."""
    tiers = "memory.offload_state={optimizer: host, master: host, weights: host, gradients: host}"
    config = load("models/llama3-8b", [*LARGE, tiers, "memory.remat=full"]).config
    for topology, chips, fits in (("v5e:1x1", 1, False), ("v5e:8x8", 64, True), ("v4:2x2x1", 4, True)):
        one = layout(mesh={"fsdp": chips}, remat="full", microbatches=2)
        assert analytic(config, topology).fits_host(one) == fits
    found = search_all(analytic(config, "v5e:1x1"), 2**60, layout(mesh={"fsdp": 1}, remat="full"))
    assert found.counted == found.cannot_fit == found.host_full > 0 and not found.open
    assert "more than the 33.5 GiB of host memory a device" in _why_none(found, analytic(config, "v5e:1x1"))


def test_layers_on_the_host_leave_the_device():
    """2 bytes a number of the layers' matrices for weights and 4 for the sum of gradients. Layouts with all layers there: none."""
    tiers = "memory.offload_state={optimizer: host, master: host, %s}"
    one_by_one = "weights: host, gradients: host"
    near, far = (load("models/llama3-8b", [*LARGE, tiers % more, "memory.remat=full"]).config for more in ("", one_by_one))
    before, after = (estimate(layout(remat="full", microbatches=2), config) for config in (near, far))
    numbers = sum(leaf.numbers for leaf in parameter_leaves(far) if leaf.matrix and leaf.scanned) // 64
    assert before.temporaries - after.temporaries >= 6 * numbers > 0
    assert after.state == before.state and after.host_s > before.host_s
    assert {(one.zero, one.remat, one.sizes["stage"]) for one in LayoutSpace(far, 8)} == {(3, "full", 1)}


def test_gradients_that_go_to_the_host_are_summed_over_data_in_every_microbatch():
    """As training does: elsewhere once an update."""
    tiers = "memory.offload_state={optimizer: host, master: host, %s}"
    near, far = (load("models/llama3-8b", [*LARGE, tiers % more, "memory.remat=full"]).config for more in ("", "gradients: host"))
    mesh = layout(mesh={"data": 4, "fsdp": 16}).mesh
    once, each = (analytic(config, "v5p:4x4x4").collectives.of(mesh, "data", 3, "ring", True) for config in (near, far))
    assert each.once == 0 < once.once
    assert each.sums + each.end_sums == pytest.approx(once.sums + once.end_sums + once.once)


def test_recomputing_costs_what_it_computes():
    """Full remat runs every matmul of the forward pass again but the last, and attention; keeping all named tensors runs none again."""
    config = load("models/llama3-8b", LARGE).config
    full, kept = (estimate(layout(remat=remat)) for remat in ("full", (*KEPT, "gate", "up")))
    shapes = layers(config.model)[0].matmuls
    again = sum(m.wide_in * m.wide_out for m in shapes if m.name != "mlp_out") * config.model.n_layers
    all_of_it = 3 * (sum(m.wide_in * m.wide_out for m in shapes) * config.model.n_layers + config.model.vocab_size * config.model.d_model)
    assert full.matmul_s / kept.matmul_s == pytest.approx(1 + again / all_of_it, rel=1e-3)
    reached = chip_named("v5p").reached.our_attention
    forward, backward = (matmuls / reached.at(config.data.seq_len, backward=matmuls == 5) for matmuls in (2, 5))
    assert full.attention_s / kept.attention_s == pytest.approx((2 * forward + backward) / (forward + backward))


@pytest.mark.parametrize(
    ("settings", "parts", "needed"),
    [
        ({}, (4.037, 0.796, 0.181, 0.015), 16.4),
        (HAND, (3.306, 0.617, 0.268, 0.029), 54.6),
        ({**HAND, "mesh": {"data": 4, "fsdp": 16}, "loss_chunks": 16}, (3.308, 0.617, 0.278, 0.029), 60.2),
        ({**HAND, "mesh": {"data": 16, "fsdp": 4}, "loss_chunks": 2}, (3.310, 0.617, 0.327, 0.048), 87.8),
        ({"remat": "none", "microbatches": 4, "loss_chunks": 16}, (3.390, 0.617, 0.507, 0.055), 82.4),
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


@pytest.mark.parametrize(
    ("name", "topology", "settings", "parts", "needed"),
    [
        (
            "runs/long-context",
            "v5p:4x8x8",
            {"mesh": {"fsdp": 4, "context": 64}, "loss_chunks": 16, "remat": ("layer_input", "attention")},
            (2.03, 38.0, 4.09, 0.04),
            42.55,
        ),
    ],
)
def test_a_step_with_a_sequence_on_many_chips_is_near_what_the_compiler_said(name, topology, settings, parts, needed):
    said = analytic(load(name).config, topology).estimate(layout(**settings))
    assert sum(said.parts) == pytest.approx(sum(parts), rel=0.03)
    assert said.parts[:3] == pytest.approx(parts[:3], rel=0.03)
    assert (said.state + said.temporaries) / 2**30 == pytest.approx(needed, rel=0.1)


def test_a_pipeline_waits_as_its_schedule_says():
    """Bubbles of (P - 1) / (v M + P - 1), in what stages compute; embedding and loss are divided among them and wait for nobody."""
    config = load("models/llama3-8b", LARGE).config
    model, times = analytic(config), {}
    for stage, chunks in ((1, 1), (4, 1), (4, 2)):
        mesh = {"stage": stage, "fsdp": 64 // stage}
        times[stage, chunks] = model.estimate(layout(mesh=mesh, microbatches=8, chunks=chunks)).attention_s
    tokens = 4  # times as many a device, in a quarter of the layers
    assert times[4, 1] / times[1, 1] == pytest.approx(tokens / 4 * (8 + 3) / 8)
    assert times[4, 2] / times[1, 1] == pytest.approx(tokens / 4 * (16 + 3) / 16)


def test_what_zero_keeps_whole_is_counted():
    config = load("models/llama3-8b", LARGE).config
    needed = {zero: analytic(config).estimate(layout(zero=zero)).least_bytes for zero in (1, 2, 3)}
    weights = 2 * sum(leaf.numbers for leaf in parameter_leaves(config) if leaf.matrix)
    assert needed[1] == pytest.approx(needed[2], abs=2 * weights)
    assert needed[3] < needed[2] <= needed[1]
    assert needed[2] - needed[3] > 0.5 * weights


def test_a_layout_that_differs_is_another_layout():
    one = layout()
    assert len({one, *(dataclasses.replace(one, **change) for change in ({"microbatches": 2}, {"remat": "dots"}, {"loss_chunks": 4}))}) == 4


# Mixtures of experts, latent attention, tokens predicted further ahead


def mixtral(*settings: str):
    return load("runs/mixtral-8x7b-v5p-256", settings).config


def of_mixtral(config=None, topology="v5p:4x4x8", **changes) -> Estimate:
    config = config or mixtral()
    mesh = {"fsdp": 128} | changes.pop("mesh", {})
    return analytic(config, topology).estimate(layout(mesh=mesh, **changes))


def test_experts_are_split_in_every_way_that_the_rules_allow():
    config = tiny_config(model={"moe": EXPERTS})
    found = {tuple(one.sizes[axis] for axis in ("data", "fsdp", "tensor", "expert")) for one in LayoutSpace(config, 8).meshes()}
    assert {(1, 1, 1, 8), (1, 4, 1, 2), (2, 1, 1, 4), (1, 2, 2, 2), (1, 8, 1, 1)} <= found
    assert {expert for *_, expert in found} == {1, 2, 4, 8}
    assert {one.sizes["expert"] for one in LayoutSpace(tiny_config(), 8).meshes()} == {1}


def test_an_axis_that_a_plan_gives_up_is_said():
    """Else the user's own size of it would stay."""
    config = tiny_config(model={"moe": EXPERTS}, mesh={"expert": 4, "fsdp": 2})
    one = next(one for one in LayoutSpace(config, 8) if one.sizes["expert"] == 1)
    assert one.settings(config)["mesh.expert"] == 1
    assert LayoutSpace(one.apply(config), 8).own() == one
    assert "mesh.expert" not in one.settings(tiny_config())


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "expert": 4}, {"data": 2, "tensor": 2, "expert": 2}], ids=str)
def test_the_state_of_experts_is_exact(mesh):
    config = tiny_config(model=MIXTURE, mesh=mesh)
    program = build_program(config, build_mesh(config, jax.devices()))
    said = analytic(config).estimate(LayoutSpace(config, 8).own()).state
    parts = state_parts(program)
    assert 0 <= sum(part.bytes for part in parts) - said < 100
    assert sum(leaf.numbers for leaf in parameter_leaves(config)) == sum(
        leaf.size for leaf in jax.tree.leaves(program.abstract_state.params)
    )


@pytest.mark.parametrize("router", [{}, {"choice": "expert"}, {"capacity": 1.5}], ids=str)
def test_bounds_are_below_predictions_with_experts(router):
    config = tiny_config(model={**MIXTURE, "moe": {**EXPERTS, "router": router}}, precision={"compute": "bfloat16"})
    model = analytic(config)
    for one in some_layouts(config, 8, 397):
        said = model.estimate(one)
        least_s, least_bytes = model.frame_bounds(one)
        assert least_s <= sum(said.parts) * (1 + 1e-9)
        assert least_bytes <= said.least_bytes
        assert said.least_s < sum(said.parts)
        assert said.least_bytes <= said.state + said.temporaries
        assert min(said.parts) >= 0


NAMED = ("layer_input", "query", "key", "value", "attention", "attention_out")


@pytest.mark.parametrize(
    ("before", "after", "faster", "smaller"),
    [
        ({}, {"remat": (*NAMED, "gate", "up")}, "matmul_s", ""),
        ({"remat": "dots"}, {"remat": (*NAMED, "gate", "up")}, "matmul_s", ""),  # that policy knows no kernel, but keeps no rows either
        ({"remat": (*NAMED, "gate", "up")}, {"remat": "dots"}, "", "temporaries least_bytes"),
        ({"mesh": {"fsdp": 16, "expert": 8}}, {}, "exposed_s", ""),  # at an even load the same rows, and none that cross
        ({"mesh": {"fsdp": 16, "tensor": 8}}, {"mesh": {"fsdp": 16, "expert": 8}}, "exposed_s", ""),
    ],
)
def test_what_helps_experts_is_predicted_to_help(before, after, faster, smaller):
    old, new = of_mixtral(**before), of_mixtral(**after)
    for name in f"{faster} {smaller}".split():
        assert getattr(new, name) < getattr(old, name), name


def test_splitting_experts_gathers_less_and_exchanges_tokens():
    """Few tokens a device: weights of experts weigh more than tokens. Many: it is the other way round."""
    for seq_len, better in ((512, 8), (8192, 1)):
        config = mixtral(f"data.seq_len={seq_len}", "train.global_batch=128")
        waits = {expert: of_mixtral(config, mesh={"fsdp": 128 // expert, "expert": expert}).exposed_s for expert in (1, 8)}
        assert min(waits, key=waits.get) == better


def test_latent_attention_pays_for_whole_lanes():
    """DeepSeek-V3: queries and keys of 192 numbers, of which the kernel makes 256, and values of 128."""
    config = load("models/deepseek-v3", [*LARGE[:3], "data.seq_len=4096"]).config
    ((share, (forward, backward)),) = kernel_attention_flops(config.model, 4096, chip_named("v5p")).items()
    assert share == 1
    assert backward / forward == pytest.approx((3 * 256 + 2 * 128) / (256 + 128), rel=0.1)  # blocks of the two passes differ
    assert forward == pytest.approx(attention_flops(config.model, 4096) * (256 + 128) / (192 + 128))


def test_the_mixtral_step_on_v5p_is_near_what_the_compiler_said():
    """Seconds and GiB as `maxlm compile` gave them (libtpu 0.0.42)."""
    config = mixtral()
    said = of_mixtral(remat=config.memory.remat, loss_chunks=4)
    assert sum(said.parts) == pytest.approx(3.57, rel=0.03)
    assert said.parts[:3] == pytest.approx((3.075, 0.167, 0.300), rel=0.05)
    assert said.parts[3] == pytest.approx(0.037, abs=0.04)
    assert (said.state + said.temporaries) / 2**30 == pytest.approx(85.9, rel=0.05)
