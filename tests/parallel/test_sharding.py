"""The one table and its translation."""

import jax
import pytest
from jax.sharding import AxisType, PartitionSpec

from maxlm.config import ConfigError
from maxlm.config.schema import AXES, Config
from maxlm.parallel import RULES, build_mesh, partition_spec


def mesh_of(**sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def config_of(mesh, **changes):
    model = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 4, "d_ff": 64, **changes}
    return Config(model=model, data={"store": "x", "seq_len": 16}, train={"steps": 1, "global_batch": 8}, mesh=mesh)


def test_logical_axes_become_mesh_axes_in_order():
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    assert partition_spec(("embed", "mlp"), (32, 64), mesh, "w") == PartitionSpec("fsdp", "tensor")
    assert partition_spec(("batch", "seq", "embed_act"), (8, 16, 32), mesh, "x") == PartitionSpec(("data", "fsdp"))
    assert partition_spec(("batch", "seq_between", None), (8, 16, 32), mesh, "x") == PartitionSpec(("data", "fsdp"), "tensor")


def test_axes_of_size_one_split_nothing():
    assert partition_spec(("embed", "mlp"), (31, 63), mesh_of(data=8), "w") == PartitionSpec()


def test_a_dim_that_does_not_divide_names_tensor_axis_and_sizes():
    with pytest.raises(ConfigError) as error:
        partition_spec(("embed", "mlp"), (32, 66), mesh_of(fsdp=2, tensor=4), "layers/0/mlp/up_DF")
    assert "mesh.tensor = 4" in str(error.value)
    assert "layers/0/mlp/up_DF" in str(error.value)
    assert "66" in str(error.value)


def test_two_dims_cannot_take_one_mesh_axis():
    with pytest.raises(ValueError, match="'tensor' would split both dim 0 and dim 1"):
        partition_spec(("heads", "mlp"), (4, 64), mesh_of(fsdp=2, tensor=4), "w")


def test_unknown_axis_and_wrong_rank_are_refused():
    with pytest.raises(KeyError, match="no logical axis 'hads'"):
        partition_spec(("hads",), (4,), mesh_of(data=8), "w")
    with pytest.raises(ValueError, match="w has shape"):
        partition_spec(("embed",), (4, 4), mesh_of(data=8), "w")


def test_the_table_names_only_axes_of_the_mesh():
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)


def test_one_axis_takes_whatever_devices_are_left():
    assert dict(build_mesh(config_of({"tensor": 2})).shape)["fsdp"] == 4
    assert build_mesh(config_of({"fsdp": 8}, d_model=64)).size == 8


@pytest.mark.parametrize(
    ("mesh", "changes", "named"),
    [
        ({"fsdp": 3}, {}, "number of devices, 8"),
        ({"fsdp": 16}, {}, "number of devices, 8"),
        ({"fsdp": -1, "tensor": 3}, {}, "number of devices, 8"),
        ({"fsdp": 1, "tensor": 8}, {}, "mesh.tensor = 8"),
        ({"fsdp": 4, "tensor": 2}, {"vocab_size": 63}, "model.vocab_size = 63"),
        ({"fsdp": 8}, {"d_model": 36}, "mesh.fsdp = 8"),
        ({"fsdp": 8, "slices": 2}, {}, "mesh.slices = 2"),
    ],
)
def test_meshes_that_cannot_be_say_why(mesh, changes, named):
    with pytest.raises(ConfigError) as error:
        build_mesh(config_of(mesh, **changes))
    assert named in str(error.value)
