"""Whatever routers choose, tokens that travel to experts and back give what a loop over experts gives, gradients included."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from maxlm.config.sections.mesh import AXES
from maxlm.hlo.parser import read
from maxlm.kernels.platform import RARELY
from maxlm.models.feed_forward.dense import gated
from maxlm.models.feed_forward.experts import _compute
from maxlm.parallel import experts
from maxlm.parallel.experts import through_experts

B, S, D, E, F, K = 8, 64, 16, 8, 32, 2
AXES_OF = ("embed", "expert", "mlp")
NAMES = ("gate_DEF", "up_DEF", "down_DEF")
MESHES = ({}, {"expert": 4, "data": 2}, {"expert": 2, "fsdp": 2, "tensor": 2})  # among 4, choices are sent


def choices(kind):
    """[B, S, K] experts of each token, E for none."""
    rng = np.random.default_rng(0)
    drawn = np.argsort(rng.random((B, S, E)))[..., :K]
    return {
        "drawn": drawn,
        "empty experts": np.where(drawn % 3 == 0, 1, drawn),
        "all tokens to one expert": np.broadcast_to([3, E], drawn.shape),
        "all tokens to two experts of a device": np.broadcast_to([6, 7], drawn.shape),
        "no token to any": np.full(drawn.shape, E),
        "fewer tokens than experts": np.where(np.arange(B * S).reshape(B, S, 1) < 3, drawn, E),
    }[kind].astype(np.int32)


@cache
def operands():
    """Weights; x, router weights and the gradient of the result."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.2, (D, E, F)).astype(np.float32) for name in NAMES}
    return weights, *(draw(size=(B, S, wide)).astype(np.float32) for draw, wide in ((rng.normal, D), (rng.uniform, K), (rng.normal, D)))


def in_a_loop(weights, x_BSD, weights_BSK, chosen_BSK):
    def one(y_BSD, expert):
        gate_DF, up_DF, down_DF = (weights[name][:, expert] for name in NAMES)
        made_BSD = (jax.nn.silu(x_BSD @ gate_DF) * (x_BSD @ up_DF)) @ down_DF.T
        return y_BSD + jnp.sum(jnp.where(chosen_BSK == expert, weights_BSK, 0), -1)[..., None] * made_BSD, None

    return jax.lax.scan(one, jnp.zeros_like(x_BSD), jnp.arange(E))[0]


wanted_of = jax.jit(lambda chosen_BSK, *given: outcome(in_a_loop, chosen_BSK, *given))


def by_the_mesh(weights, x_BSD, weights_BSK, chosen_BSK):
    def compute(*given):
        return _compute(partial(gated, "swiglu"), *given)

    weights_BSK = jnp.where(chosen_BSK < E, weights_BSK, 0)
    return through_experts(compute, weights, dict.fromkeys(NAMES, AXES_OF), x_BSD, chosen_BSK, weights_BSK, E)


def outcome(run, chosen_BSK, weights, x_BSD, weights_BSK, dy_BSD):
    y_BSD, pull = jax.vjp(lambda *given: run(*given, chosen_BSK), weights, x_BSD, weights_BSK)
    return y_BSD, pull(dy_BSD)


def name_of(mesh):
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device"


@pytest.fixture(
    scope="module", params=[pytest.param(mesh, id=name_of(mesh), marks=[pytest.mark.soak] if "fsdp" in mesh else []) for mesh in MESHES]
)
def on_mesh(request):
    """`outcome` on a mesh, compiled once for whatever is chosen."""
    sizes = [request.param.get(axis, 1) for axis in AXES]
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
    with jax.set_mesh(mesh):
        yield jax.jit(lambda chosen_BSK, *given: outcome(by_the_mesh, chosen_BSK, *given))


@pytest.mark.parametrize(
    "kind",
    (
        "drawn",
        "empty experts",
        "all tokens to one expert",
        "all tokens to two experts of a device",
        "no token to any",
        "fewer tokens than experts",
    ),
)
def test_any_choice_equals_a_loop(on_mesh, kind):
    found, wanted = (run(choices(kind), *operands()) for run in (on_mesh, wanted_of))
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5 * max(1.0, np.abs(other).max()))


def of_axis(size):
    """The forward pass of drawn choices where `expert` is the only axis, compiled."""
    mesh = jax.make_mesh((1, 1, 1, 1, 1, size), AXES, axis_types=(AxisType.Auto,) * 6, devices=jax.devices()[:size])
    with jax.set_mesh(mesh):
        return jax.jit(lambda *given: by_the_mesh(*given)).lower(*operands()[:3], choices("drawn")).compile()


def test_rounds_are_as_many_as_the_load_needs(monkeypatch):
    """Room is for one round, little more than an even load; all tokens at one device (above) take several."""
    rounds = []
    whole = experts.compute_rows
    monkeypatch.setattr(experts, "compute_rows", lambda *given: rounds.append(given[1]) or whole(*given))
    program = of_axis(2)
    even = B * S * K // 2
    assert len(set(rounds)) == 1 and even < rounds[0] < 2 * even, "rows of a round"
    turns = [run.op.turns for run in read(program.as_text()).executed() if run.op.opcode == "while" and RARELY in run.op.where]
    assert 0 in turns, "a plan charges none but the first"


@pytest.mark.parametrize(("size", "opcode", "tokens"), ((2, "all-gather", 2), (4, "all-to-all", 2 * 2 * 1.5)))
def test_what_moves_is_what_the_choice_of_exchange_counts_on(size, opcode, tokens):
    """Gathered: the tokens of all devices. Sent: each of two choices there and back, and room for half as many again."""
    assert experts.sends(size, K, "cpu") == (opcode == "all-to-all")
    ran = [run.op for run in read(of_axis(size).as_text()).executed() if run.op.opcode.startswith(("all-", "reduce-")) and run.times]
    moved = sum(op.bytes for op in ran if op.opcode == opcode and op.shapes[0].dims[-1] == D)
    assert moved == tokens * 4 * D * B * S // size


def test_choices_are_sent_where_that_is_less():
    """Two of a token: from 4 devices on. Eight: a switch sends from 10 on, a torus, which hands on what is gathered, from 18."""
    assert [size for size in range(2, 65) if not experts.sends(size, 2, "tpu")] == [2, 3]
    assert [size for size in range(2, 65) if not experts.sends(size, 8, "cuda")] == list(range(2, 10))
    assert [size for size in range(2, 65) if not experts.sends(size, 8, "tpu")] == list(range(2, 18))
