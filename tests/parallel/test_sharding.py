"""The one table and its translation."""

import itertools
import math

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from maxlm.config import ConfigError, axes, rules
from maxlm.config.schema import Config
from maxlm.config.sections.mesh import AXES, LOGICAL_AXES
from maxlm.models import parameter_axes
from maxlm.models.parameters import abstract_parameters, parameter_specs
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


def test_the_width_of_a_weight_leaves_mesh_axes_to_other_dims():
    mesh = mesh_of(stage=2, fsdp=2, expert=2)
    assert partition_spec(("embed", "heads"), (32, 4), mesh, "w") == PartitionSpec(("fsdp", "expert", "stage"))
    assert partition_spec(("vocab", "embed"), (64, 32), mesh, "w") == PartitionSpec("stage", ("fsdp", "expert"))
    assert partition_spec(("embed", "expert", "mlp"), (32, 4, 8), mesh, "w") == PartitionSpec(("fsdp", "stage"), "expert")


def test_unknown_axis_and_wrong_rank_are_refused():
    with pytest.raises(KeyError, match="no logical axis 'hads'"):
        partition_spec(("hads",), (4,), mesh_of(data=8), "w")
    with pytest.raises(ValueError, match="w has shape"):
        partition_spec(("embed",), (4, 4), mesh_of(data=8), "w")


def test_the_table_names_only_axes_of_the_mesh():
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)


MODELS = {
    "dense": {"n_kv_heads": 2, "bias": "all"},
    "moe": {"n_layers": 3, "moe": {"n_experts": 4, "top_k": 2, "d_ff": 24, "n_shared": 1, "n_dense": 1}},
    "mla": {"latent": {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}},
}
MESHES = [
    dict(zip(("stage", "fsdp", "tensor", "expert"), sizes, strict=True))
    for sizes in itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 4, 8), (1, 2))
]


@pytest.mark.parametrize("model", MODELS)
def test_the_table_gives_the_size_of_every_dim_that_is_split(model):
    """A dim of a parameter that the mesh may split is a multiple of a size that the rules of the config check."""
    config = config_of({}, **MODELS[model])
    checked = {name: [dim.size for dim in axes.dims(config) if dim.axis is axis] for name, axis in LOGICAL_AXES.items()}
    shapes = jax.tree.leaves(abstract_parameters(config.model))
    names = jax.tree.leaves(parameter_axes(config.model), is_leaf=lambda leaf: isinstance(leaf, tuple))
    split = [(name, size) for shape, logical in zip(shapes, names, strict=True) for name, size in zip(logical, shape.shape, strict=True)]
    assert {name for name, _ in split if RULES[name]} >= {"embed", "heads", "vocab"}
    assert [(name, size) for name, size in split if RULES[name] and not any(size % one == 0 for one in checked[name])] == []


@pytest.mark.parametrize("model", MODELS)
def test_the_rules_of_the_config_accept_only_meshes_that_split_every_parameter(model):
    """They need no jax, and say before any device is there what the partition specs would."""
    accepted = 0
    for sizes in MESHES:
        mesh = AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
        config = config_of(sizes, **MODELS[model])
        config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 24})})
        try:
            rules.check_devices(config, math.prod(sizes.values()))
        except ConfigError:
            continue
        parameter_specs(config.model, mesh)
        assert all(axes.largest(config, axis) % size == 0 for axis, size in sizes.items()), sizes
        accepted += 1
    assert accepted >= 5


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
