"""The table of capabilities: a record for each file of sections, and what a package of a stranger registers."""

import pkgutil
import subprocess
import sys

import pytest

import maxlm
from maxlm.config import ConfigError, load, sections, table
from maxlm.config.capability import Capability, Inert, keeps, value_of
from maxlm.config.explain import sections_of
from maxlm.config.fields import Fraction, Positive, Section
from maxlm.config.loader import dump
from maxlm.config.schema import Config
from maxlm.config.sections.mesh import AXES

ONE = dict.fromkeys(AXES, 1)


class SwaConfig(Section):
    """Stochastic weight averaging."""

    every: Positive = 10
    share: Fraction = 0.5


def too_rare(swa, total_steps):
    if swa.every > total_steps:
        yield "swa.every", swa.every, f"is above the {total_steps} updates of the run", "lower it"


@pytest.fixture
def average(monkeypatch):
    """Another average of weights, as another package registers it."""
    monkeypatch.setattr(table, "_registered", [])
    maxlm.register(
        Capability(
            key="swa",
            section=SwaConfig,
            rules=(too_rare,),
            identity=keeps("swa.every"),
            inert=lambda swa: iter([Inert("swa.share", "every is 1", "raise it")] if swa.every == 1 else []),
            state=lambda swa, state: state.add("swa", 4, along="masters"),
            implementation="math:sqrt",
        )
    )
    yield
    monkeypatch.undo()
    table.clear()


def test_every_file_of_sections_has_a_record_of_a_setting_in_the_config():
    keys = [one.key for one in table.capabilities()]
    assert len(keys) == len(set(keys)) == len(list(pkgutil.iter_modules(sections.__path__)))
    for key in keys:
        owner, *path = Config, *key.split(".")
        for name in path:
            assert name in owner.model_fields, key
            owner = (sections_of(owner.model_fields[name]) or [owner])[0]


def test_rules_of_a_section_run_after_those_of_the_sections_before_it():
    keys = [one.key for one in table.capabilities()]
    assert keys.index("train") < keys.index("optimizer") < keys.index("ema") < keys.index("diloco") < keys.index("elastic")
    assert keys.index("optimizer.state") < keys.index("memory.offload_state") < keys.index("ema"), "state is moved, then followed"


def test_implementations_exist():
    for one in table.capabilities():
        assert not one.implementation or callable(one.load()), one.key


def test_a_registered_section_is_part_of_a_config(average):
    loaded = load("runs/quickstart", ["swa.every=3"])
    assert value_of(loaded.config, "swa.every") == 3 and loaded.source("swa.every") == "command line"
    assert "swa:" in dump(loaded.config) and "swa:" not in dump(load("runs/quickstart").config)
    with pytest.raises(ConfigError, match=r"swa.every = 100000 \(from command line\): is above the \d+ updates of the run; lower it"):
        load("runs/quickstart", ["swa.every=100000"])
    with pytest.raises(ConfigError, match=r"swa.evry = 3 .*the nearest is swa.every"):
        load("runs/quickstart", ["swa.evry=3"])
    with pytest.raises(ConfigError, match=r"swa.share = 0.1 .*does nothing, since every is 1"):
        load("runs/quickstart", ["swa.every=1", "swa.share=0.1"])
    with pytest.raises(ValueError, match="has swa already"):
        maxlm.register(Capability(key="swa"))


def test_a_registered_section_is_part_of_the_identity_and_of_the_state(average):
    plain, averaged = (load("runs/quickstart", said).config for said in ([], ["swa={}"]))
    assert set(table.identity(averaged, "t").items()) - set(table.identity(plain, "t").items()) == {("swa.every", "10")}
    assert table.state(averaged, ONE, 8).bytes_in(None) == table.state(plain, ONE, 8).bytes_in(None) + 4


def test_state_lies_where_masters_lie():
    tiers = ["optimizer.schedule=constant", "ema={}", "memory.offload_state={optimizer: nvme, master: host, nvme: {dir: /tmp}}"]
    config = load("runs/quickstart", tiers).config
    state = table.state(config, ONE, 8)
    assert {name: entry.tier for name, entry in state.entries.items()} == {
        "masters": "host",
        "moments": "nvme",
        "copy that matmuls read": None,
        "average": "host",
    }
    vectors = table.state(config, ONE, 8, matrix=False)
    assert vectors.bytes_in("host", "nvme") == 0 and vectors.bytes_in(None) == 4 + 8 + 4


def test_a_rule_that_asks_for_no_setting_is_refused_when_it_is_registered(average):
    def misspelled(swa, total_stops):
        yield from ()

    with pytest.raises(ValueError, match=r"lawa: misspelled asks for total_stops, which is no setting and no figure"):
        maxlm.register(Capability(key="lawa", section=SwaConfig, rules=(misspelled,)))
    assert "lawa" not in {one.key for one in table.capabilities()}


def test_a_rule_gets_what_its_parameters_name(average):
    seen = []

    def reads(section, health_layers, mesh, precision_scaling, total_steps, microbatches_of):
        seen.append((section, health_layers, mesh, precision_scaling, total_steps, microbatches_of(64, ONE)))
        yield from ()

    maxlm.register(Capability(key="lawa", section=SwaConfig, rules=(reads,)))
    config = load("runs/quickstart", ["lawa={}", "health.layers=warn", "train.global_batch=64", "train.steps=70"]).config
    assert seen == [(value_of(config, "lawa"), "warn", config.mesh, None, 70, 1)]
    with pytest.raises(ConfigError, match=r"exactly one of train.steps and train.tokens"):
        load("runs/quickstart", ["lawa={}", "train.steps=null"])
    assert len(seen) == 1, "a rule on a length waits until there is one"


@pytest.mark.parametrize("module", ["maxlm.config", "maxlm.config.rules", "maxlm.config.loader", "maxlm.hardware.xla_flags", "maxlm"])
def test_configs_load_nothing_heavy(module):
    said = f"import sys, {module}; print(sorted({{'jax', 'flax', 'numpy', 'optax'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
