"""State in host memory (`memory.offload_state`): the same bits as on the device, on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memory_cases import BOTH_TIERS, HOST, equal, plain_run, run_both
from tiny import run_steps, tiny_batch, tiny_program

from maxlm.checkpoint.digest import digest
from maxlm.checkpoint.tree_paths import named_leaves
from maxlm.memory.pieces import copy_to_device, stream
from maxlm.memory.spaces import is_on_host, on_device, on_host
from maxlm.training.saving import not_finite
from maxlm.training.split_masters import join_all

MOE = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 64, "router": {"bias_rate": 1e-3}}}
SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        pytest.param({"fsdp": 1}, {"precision": {"compute": "bfloat16"}}, id="one device, bfloat16", marks=SOAK),
        pytest.param({"fsdp": 2, "tensor": 2}, {}, id="tensor", marks=SOAK),
        pytest.param({"fsdp": 1, "stage": 2}, {"train": {"microbatches": 2}}, id="stages", marks=SOAK),
        pytest.param({"fsdp": 1, "expert": 2}, {"model": MOE}, id="experts", marks=SOAK),
    ],
)
def test_steps_on_other_layouts_are_bitwise_those_on_the_device(mesh, sections, cut):
    compare(*run_both(mesh, sections, HOST))


def test_three_steps_are_bitwise_those_on_the_device_and_a_batch_that_is_not_finite_changes_nothing(cut):
    program = tiny_program(4, **BOTH_TIERS, memory={"offload_state": HOST})
    state, seen = run_steps(program, 3)
    compare(plain_run(), (state, seen), program)
    before = jax.device_get(state)
    broken = tiny_batch()._replace(weights_BS=tiny_batch().weights_BS * np.nan)
    with jax.set_mesh(program.mesh):
        after, metrics = program.step(state, jax.device_put(broken, program.batch_sharding))
    assert int(after.skipped) == 1 and not np.isfinite(metrics.loss)
    equal((after.params, after.opt_state), (before.params, before.opt_state))


def compare(plain, offloaded, program):
    """Layers are streamed one by one, each with all of its matrices: of one alone XLA divides the moments in another way. The norm of the
    gradient, which clips nothing here, is a sum that XLA may compute in another order where other operations follow it.
    """
    (plain, seen), (offloaded, seen_there) = plain, offloaded
    equal(offloaded, plain)
    np.testing.assert_allclose([m.grad_norm for m in seen_there], [m.grad_norm for m in seen], rtol=1e-6)
    equal(
        *(
            [m._replace(values={name: value for name, value in m.values.items() if name != "grad_norm"}) for m in one]
            for one in (seen_there, seen)
        )
    )
    assert max(group.pieces for group in program.placement.groups) == 2
    assert jax.tree.map(lambda leaf: leaf.sharding, offloaded) == program.state_shardings
    for path, leaf in jax.tree.leaves_with_path(offloaded):
        name = jax.tree_util.keystr(path)
        assert is_on_host(leaf) == (leaf.ndim > 1 and leaf.size > 256 and "router" not in name), name


@pytest.mark.soak  # in the suite: by the tier of files, `test_nvme_tier`, which updates the same pieces
def test_counters_go_on_where_every_parameter_is_updated_in_pieces(cut):
    """As of adapters, all of which are in the layers: the learning rate and Adam's bias correction follow them."""
    (plain, seen), (offloaded, seen_there), program = run_both({"fsdp": 1}, {"model": {"lora": {"rank": 4}}}, HOST)
    assert min(group.pieces for group in program.placement.groups) == 2
    equal(offloaded, plain)
    equal(seen_there, seen)
    counters = [int(leaf) for leaf in jax.tree.leaves(offloaded.opt_state) if leaf.ndim == 0]
    assert counters and set(counters) == {3}


IN_24 = {"masters": "split24"}
SMALL = {"moments": "int8", **IN_24}
FACTORED = {"moments": "bfloat16", "second_moment": "factored", "masters": "split"}


@pytest.mark.soak
def test_small_states_are_bitwise_those_on_the_device(cut):
    """Each layer rounds by the chances of its place in the whole array. Halves of masters stay on the device, where matmuls read them."""
    sections = {"optimizer": {"state": SMALL}, "ema": {"decay": 0.9}, "precision": {"compute": "bfloat16"}}
    (plain, seen), (offloaded, seen_there), program = run_both({"fsdp": 2}, sections, HOST)
    equal(offloaded, plain)
    equal(seen_there, seen)
    assert max(group.pieces for group in program.placement.groups) == 2
    of_a_matrix = {name: is_on_host(leaf) for name, leaf in named_leaves(offloaded).items() if "query_DHK" in name}
    assert of_a_matrix == {name: not name.startswith("params") for name in of_a_matrix}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("optimizer", "tiers"),
    [
        pytest.param({"state": FACTORED}, {"master": "host"}, id="factored, moments on the device"),
        pytest.param({"name": "adafactor", "state": IN_24}, HOST, id="adafactor"),
    ],
)
def test_means_of_a_layer_may_differ_in_their_last_bits(optimizer, tiers, cut):
    """XLA sums a row in another order where one layer is computed at a time, and then a code may be the next one."""
    sections = {"optimizer": optimizer, "precision": {"compute": "bfloat16"}}
    (plain, seen), (offloaded, seen_there), program = run_both({"fsdp": 2}, sections, tiers)
    np.testing.assert_allclose([m.loss for m in seen_there], [m.loss for m in seen], rtol=1e-5)
    assert max(group.pieces for group in program.placement.groups) == 2
    both = [(state.opt_state, join_all(state.params, state.extra["residual"])) for state in jax.device_get((offloaded, plain))]
    for mine, theirs in zip(*map(jax.tree.leaves, jax.device_get(both)), strict=True):
        assert mine.dtype == theirs.dtype and np.mean(np.isclose(mine.astype("float32"), theirs.astype("float32"), rtol=1e-5)) > 0.99


def test_every_piece_is_updated_once():
    """Two buffers in host memory of several pieces, one of which is fetched from first, the other written to first; one on the device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spaces = [on_host(place), on_host(place), on_device(place)]
    arrays = [jax.device_put(jnp.arange(24.0).reshape(6, 4) + 100 * i, space) for i, space in enumerate(spaces)]
    grads = jnp.arange(6.0)[:, None] * jnp.ones((6, 4))

    def update(changed, read, first_row):
        return [2 * array + read[0] + first_row for array in changed]

    for pieces in (1, 2, 3, 6):
        run = jax.jit(lambda arrays, grads, pieces=pieces: stream(update, arrays, [grads], pieces), out_shardings=spaces)
        found = run(arrays, grads)
        first_rows = np.arange(6)[:, None] // (6 // pieces) * (6 // pieces)
        equal(found, [2 * np.asarray(array) + np.asarray(grads) + first_rows for array in arrays])
        assert [array.sharding.memory_kind for array in found] == [space.memory_kind for space in spaces]
        equal(jax.jit(lambda array, pieces=pieces: copy_to_device(array, jnp.bfloat16, pieces))(arrays[1]), arrays[1].astype(jnp.bfloat16))


def test_digest_and_check_read_host_memory_in_pieces(cut):
    """The digest of an array does not depend on where it is, nor does the search for values that are not finite."""
    plain, program = (tiny_program(2, mesh={"fsdp": 2}, memory={"offload_state": tiers}) for tiers in (None, HOST))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: (100 * rng.random(leaf.shape)).astype(leaf.dtype), plain.abstract_state)
    here, state = (jax.device_put(drawn, one.state_shardings) for one in (plain, program))
    assert digest(state) == digest(here)
    assert not_finite(state, program.mesh) == []
    layers = state.params["layers"]["0"]["attention"]
    broken = np.array(layers["out_HKD"])
    broken[1, 3, 5, 7] = np.nan
    layers["out_HKD"] = jax.device_put(broken, layers["out_HKD"].sharding)
    assert not_finite(state, program.mesh) == ["params.layers.0.attention.out_HKD"]
