"""Meshes of fewer hosts: the same global batch in more and smaller microbatches, found exactly where there is one."""

import itertools

import pytest

from maxlm.config import ConfigError, rules
from maxlm.config.derived import devices_of, on_fewer
from maxlm.config.schema import Config, MeshConfig

MODEL = {"vocab_size": 96, "d_model": 48, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96}


def config_of(batch=24, microbatches=1, mesh=None, **sections):
    return Config(
        model={**MODEL, **sections.pop("model", {})},
        data={"store": "unused", "seq_len": 32},
        train={"steps": 10, "global_batch": batch, "microbatches": microbatches},
        mesh=mesh or {},
        **sections,
    )


def is_valid(config, devices):
    try:
        rules.check(config)
        rules.check_devices(config, devices)
    except ConfigError:
        return False
    return True


def rows(config, devices):
    """Rows of a device's microbatch."""
    sizes = rules.resolve_mesh(config.mesh, devices)
    apart = sizes["data"] if config.diloco is None else config.diloco.workers
    return config.train.global_batch / config.train.microbatches / (apart * sizes["fsdp"] * sizes["expert"])


def every_smaller(config, devices, left_devices):
    """Brute force: every valid (data, fsdp, microbatches) with one of both axes smaller and no more rows a device at a time."""
    full = rules.resolve_mesh(config.mesh, devices)
    divisors = [number for number in range(1, config.train.global_batch + 1) if config.train.global_batch % number == 0]
    for data, fsdp, microbatches in itertools.product(range(1, full["data"] + 1), range(1, full["fsdp"] + 1), divisors):
        if (data == full["data"]) == (fsdp == full["fsdp"]):
            continue
        mesh = MeshConfig(**{**config.mesh.model_dump(), **full, "data": data, "fsdp": fsdp})
        tried = config.model_copy(
            update={"mesh": mesh, "train": config.train.model_copy(update={"microbatches": microbatches}), "cluster": None}
        )
        if is_valid(tried, left_devices) and rows(tried, left_devices) <= rows(config, devices):
            yield data, fsdp, microbatches


MESHES = [
    {"data": data, "fsdp": fsdp, **other}
    for data, fsdp in itertools.product((1, 2, 3, 4, -1), repeat=2)
    for other in ({}, {"tensor": 2}, {"stage": 2})
    if (data, fsdp) != (-1, -1)
]


@pytest.mark.parametrize("batch", [12, *(pytest.param(batch, marks=pytest.mark.soak) for batch in (8, 24))])
def test_the_mesh_is_the_best_of_all_that_exist(batch):
    """Against brute force: the axis that is -1 before `data` before `fsdp`, and the fewest microbatches."""
    found = 0
    for mesh, hosts, devices, microbatches in itertools.product(MESHES, (2, 3, 4), (1, 2), (1, 2)):
        config = config_of(batch, microbatches, mesh)
        if not is_valid(config, hosts * devices):
            continue
        full = rules.resolve_mesh(config.mesh, hosts * devices)
        first = "fsdp" if mesh["fsdp"] == -1 else "data"
        for left in range(1, hosts):
            smaller = on_fewer(config, hosts, devices, left)
            best = min(
                every_smaller(config, hosts * devices, left * devices),
                key=lambda one: ({"data": one[0], "fsdp": one[1]}[first] == full[first], one[2]),
                default=None,
            )
            chosen = None if smaller is None else (smaller.mesh.data, smaller.mesh.fsdp, smaller.train.microbatches)
            assert chosen == best, (mesh, hosts, devices, microbatches, left)
            found += smaller is not None
    assert found > 50


def test_all_hosts_keep_their_config():
    config = config_of(mesh={"data": -1})
    assert on_fewer(config, 4, 2, 4) is config


def test_only_the_mesh_and_the_microbatches_change():
    config = config_of(mesh={"data": 3, "fsdp": 2}, cluster={"topology": "v5e:2x3"})
    smaller = on_fewer(config_of(mesh={"data": 3, "fsdp": 2}), 3, 2, 2)
    assert smaller is not None
    changed = {"mesh", "train", "cluster"}
    assert {name for name in type(config).model_fields if getattr(config, name) != getattr(smaller, name)} <= changed
    assert smaller.train.model_copy(update={"microbatches": 1}) == config.train
    assert (smaller.mesh.data, smaller.mesh.fsdp, smaller.train.microbatches) == (2, 2, 2)


@pytest.mark.parametrize(("left", "expected"), [(3, (6, 4)), (2, (4, 4)), (1, (2, 8))])
def test_workers_of_a_lost_host_are_taken_over_by_the_others(left, expected):
    """They are trained one after another, so a device's microbatch does not grow, and the number of workers stays."""
    config = config_of(96, 4, {"data": 8, "fsdp": 1}, diloco={"workers": 24, "every": 2})
    smaller = on_fewer(config, 4, 2, left)
    if left == 3:
        assert (smaller.mesh.data, smaller.train.microbatches) == expected
    else:
        assert smaller.mesh.data == expected[0]
    assert smaller.diloco == config.diloco and rows(smaller, 2 * left) <= rows(config, 8)


def test_a_slice_is_lost_as_a_whole():
    """And the cluster that is left is checked as such."""
    mesh = {"data": 4, "fsdp": 4, "slices": 4}
    config = config_of(48, mesh=mesh, cluster={"topology": "v5e:2x2"})
    assert devices_of(config) == 16
    smaller = on_fewer(config, 4, 4, 3)
    assert (smaller.mesh.data, smaller.mesh.slices, smaller.train.microbatches) == (3, 3, 2)
    assert rules.topology_of(smaller).devices == 12
    alone = on_fewer(config, 4, 4, 1)
    assert (alone.mesh.data, alone.mesh.slices, alone.train.microbatches) == (1, 1, 4)
    assert on_fewer(config_of(48, mesh={**mesh, "data": 4, "fsdp": 2, "stage": 4, "slices": 4, "across_slices": "stage"}), 4, 8, 3) is None


def test_interleaved_pipelines_take_microbatches_in_rounds():
    config = config_of(24, 2, {"data": 3, "fsdp": 1, "stage": 2}, pipeline={"chunks": 2})
    smaller = on_fewer(config, 3, 2, 2)
    assert (smaller.mesh.data, smaller.train.microbatches) == (2, 4)


def test_devices_are_known_from_the_mesh_or_the_cluster():
    assert devices_of(config_of(mesh={"data": 3, "fsdp": 2})) == 6
    assert devices_of(config_of(mesh={"data": -1})) is None


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 48, "router": {"balance_loss": 0.01}}}}, "model.moe.router.balance_over"),
        ({"mesh": {"stage": 2, "slices": 2, "across_slices": "stage"}}, "mesh.across_slices"),
    ],
)
def test_what_would_change_the_losses_or_helps_nobody_is_refused(sections, field):
    with pytest.raises(ConfigError) as refused:
        rules.check(config_of(**sections, elastic={"min_hosts": 2}))
    assert refused.value.field == field
