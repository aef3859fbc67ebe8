"""Every shipped recipe is one of a shipped model on a shipped cluster, named after both; it fits, by shape here, compiled in a soak."""

import datetime
import importlib.util
import math
import os
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh

from maxlm.config import load, rules
from maxlm.config.sections.mesh import AXES
from maxlm.cost.verify import verify
from maxlm.models import abstract_parameters, parameter_specs

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
NAME = re.compile(r"(?P<model>.+?)-(?:(?P<slices>\d+)x-)?(?P<cluster>(?:v\d|tpu)\w*-\d+)")
RECIPES = sorted(path.stem for path in (CONFIGS / "runs").glob("*.yml") if NAME.fullmatch(path.stem))
each_recipe = pytest.mark.parametrize("name", RECIPES)
UNSAID = ("train.steps=1", "train.global_batch=1", "data.store=unused", "data.seq_len=1024")  # what a model alone does not say
BYTES_OF_ADAMW = 12  # a parameter and two moments, float32
BYTES_OF_COPY = 2  # that the device has of a parameter where the state is in host memory


MIXTURES = {  # models with experts, or with latent attention, and the clusters that they have recipes for
    "deepseek-v2": set(),
    "deepseek-v2-lite": {"v5e-64"},
    "deepseek-v3": {"v5p-1024"},
    "gpt-oss-20b": set(),
    "gpt-oss-120b": set(),
    "mixtral-8x7b": {"v5p-256", "v6e-256"},
    "mixtral-8x22b": {"v6e-256"},
    "qwen3-30b-a3b": {"v5e-256"},
    "qwen3-235b-a22b": set(),
}
# Models that came as doors for published weights: for a machine of yours `maxlm plan` finds the layout, no recipe has been compiled.
UNPLANNED = {"gemma2-9b", "gemma2-27b", "gpt3-175b", "qwen2.5-7b", "qwen2.5-72b"}
UNPLANNED |= {"glm4.5-air", "granite3.1-8b", "phi4-14b", "seed-oss-36b"}


def test_every_model_has_its_recipes():
    """A dense one for every family, the others those of the table."""
    there = {(match["model"], match["cluster"]) for match in map(NAME.fullmatch, RECIPES)}
    models = {path.stem for path in (CONFIGS / "models").glob("*.yml")}
    dense = {model for model in models if load(f"models/{model}", UNSAID).config.model.moe is None}
    assert models - dense - UNPLANNED == set(MIXTURES)
    families = {(model, cluster.split("-")[0]) for model, cluster in there}
    assert {(model, family) for model in dense - UNPLANNED for family in ("v5e", "v5p", "v6e", "tpu7x")} <= families
    assert models >= UNPLANNED and not {model for model, _ in families} & UNPLANNED
    assert {(model, cluster) for model, clusters in MIXTURES.items() for cluster in clusters} == {
        (model, cluster) for model, cluster in there if model in MIXTURES
    }


def test_the_runs_that_others_rely_on_are_there():
    named = {
        "llama3-8b-v5e-256",
        "llama3-8b-v5p-128",
        "llama3-8b-v6e-256",
        "llama3-70b-v5p-512",
        "llama3-70b-v6e-256",
        "llama3-405b-v5p-1024",
    }
    assert named <= set(RECIPES)


@each_recipe
def test_recipe_joins_the_model_and_the_cluster_of_its_name(name):
    model, slices, cluster = NAME.fullmatch(name).groups()
    text = (CONFIGS / "runs" / f"{name}.yml").read_text(encoding="utf-8")
    assert f"extends: [models/{model}, clusters/{cluster}]" in text
    chips, tokens = (int(number.replace(",", "")) for number in re.match(r"# .* ([\d,]+) v?\w+ chips: ([\d,]+) tokens", text).groups())
    config = load(f"runs/{name}").config
    assert (rules.topology_of(config).chips, config.tokens_per_step) == (chips, tokens)
    assert config.mesh.slices == int(slices or 1)


@each_recipe
def test_state_of_a_recipe_is_split_over_its_mesh_and_leaves_room(name):
    config = load(f"runs/{name}").config
    topology = rules.topology_of(config)
    sizes = rules.check_devices(config, topology.devices)
    mesh = AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES)
    shapes, specs = jax.tree.leaves(abstract_parameters(config.model)), jax.tree.leaves(parameter_specs(config.model, mesh))

    def shards(spec):
        named = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
        return math.prod(sizes[axis] for axis in named)

    a_parameter = BYTES_OF_ADAMW if config.memory.offload_state is None else BYTES_OF_COPY
    state = a_parameter * sum(leaf.size // shards(spec) for leaf, spec in zip(shapes, specs, strict=True))
    assert state < topology.chip.hbm_bytes_per_device / 2
    rows = config.train.global_batch // config.train.microbatches
    assert rows % (sizes["data"] * sizes["fsdp"] * sizes["expert"]) == 0


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler")
@each_recipe
def test_recipe_compiles_and_fits(name):
    """Up to 20 minutes each: a week compiles one in seven, with MAXLM_EVERY_RECIPE=1 all, as does `tools/recipes.py`."""
    week = datetime.datetime.now(datetime.UTC).date().toordinal() // 7
    if RECIPES.index(name) % 7 != week % 7 and not os.environ.get("MAXLM_EVERY_RECIPE"):
        pytest.skip("another week's")
    config = load(f"runs/{name}").config
    verdict = verify(config, rules.topology_of(config))
    assert verdict.fits, f"{verdict.needed / 2**30:.1f} GiB of {verdict.available / 2**30:.1f}"
