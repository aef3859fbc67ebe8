"""The table of capabilities: a record for each file of sections, and what a package of a stranger registers."""

import ast
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from extensions.swa import CAPABILITY, StochasticAverage, SwaConfig
from tiny import run_steps, tiny_batch, tiny_config, tiny_program
from typer.testing import CliRunner

import maxlm
from maxlm.checkpoint import Checkpoints
from maxlm.cli import app
from maxlm.config import ConfigError, UserError, choices, load, sections, table
from maxlm.config.capability import Capability, load as load_object, value_of, without
from maxlm.config.explain import sections_of
from maxlm.config.loader import dump, saved_text
from maxlm.config.sections.mesh import AXES
from maxlm.hardware.topologies import parse
from maxlm.planning.analytic import Analytic
from maxlm.planning.layouts import LayoutSpace
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training import fits
from maxlm.training.program import Program
from maxlm.training.saved_run import open_run
from maxlm.training.transform import in_order

ONE = dict.fromkeys(AXES, 1)


@pytest.fixture
def registry(monkeypatch):
    """The table, to which a test may register."""
    monkeypatch.setattr(choices, "registered", [])
    yield
    monkeypatch.undo()
    table.clear()


@pytest.fixture
def average(registry):
    """Another average of weights, as another package registers it."""
    maxlm.register(CAPABILITY)


def fails(section):
    raise KeyError("oops")


def yields_three(section):
    yield "mine.every", 1, "is wrong"


class Misspelt:
    @classmethod
    def from_config(cls, swa, train_sede): ...


class Other:
    """No transform."""

    @classmethod
    def from_config(cls, swa):
        return cls()


HERE = f"{__name__}:"
RECORDS = {  # a record of a stranger that no config could use -> its error
    "known key": ({"key": "ema"}, "has ema already"),
    "a setting": ({"key": "train.steps"}, "has a setting of that name"),
    "a figure": ({"key": "total_steps"}, "has a setting of that name"),
    "in a section that may be absent": ({"key": "diloco.mine"}, "diloco is no section that every config has"),
    "no name": ({"key": "a\nb"}, r"key='a\\nb'\): its key is no setting"),
    "no text": ({"key": 5}, "is no setting"),
    "no section": ({"section": None}, "no config has that section"),
    "section of another kind": ({"section": dict}, "is no class derived from"),
    "places as text": ({"transforms": "extensions.swa:StochasticAverage"}, "is no tuple of places"),
    "no place": ({"observers": ("extensions.swa",)}, "is no tuple of places"),
    "a rule alone": ({"rules": fails}, "rules is no tuple of functions"),
    "a rule of an older form": ({"rules": (lambda config, section: iter(()),)}, "asks for section, which is no setting"),
    "known average": ({"average": "ema"}, "is taken"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_no_config_could_use_is_refused_and_changes_nothing(registry, name):
    fields, error = RECORDS[name]
    with pytest.raises(ValueError, match=error):
        maxlm.register(Capability(**{"key": "mine", "section": CAPABILITY.section, **fields}))
    assert table.capabilities() and load("runs/quickstart").config
    maxlm.register(CAPABILITY)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"rules": (fails,)}, r"mine: rules fails failed: KeyError: 'oops' \(line \d+ of .*test_capabilities.py\); mend the package"),
        ({"rules": (yields_three,)}, "mine: rules yields_three failed: ValueError: not enough values"),
        ({"identity": lambda mine: None}, "mine: identity failed: TypeError"),
        ({"state": lambda mine, state: None}, "mine: state failed: AttributeError"),
        ({"transforms": ("nowhere.x:Y",)}, "mine: transforms nowhere.x:Y failed: ModuleNotFoundError: No module named 'nowhere'"),
        ({"transforms": ("extensions.swa:Nope",)}, "mine: transforms extensions.swa:Nope failed: AttributeError: .* no attribute 'Nope'"),
        ({"transforms": (f"{HERE}fails",)}, "mine: transforms .*fails failed: AttributeError: .*no attribute 'from_config'"),
        ({"transforms": (f"{HERE}Misspelt",)}, "mine: from_config .*asks for train_sede, which is no setting"),
        ({"transforms": (f"{HERE}Other",)}, "Other is no transform of an update: derive it"),
    ],
)
def test_code_of_a_package_that_fails_is_named_in_one_line(registry, fields, error):
    maxlm.register(Capability(key="mine", section=CAPABILITY.section, **fields))
    with pytest.raises(UserError, match=error) as caught:
        config = load("runs/quickstart", ["mine={}"]).config
        table.identity(config, "")
        table.state(config, ONE, 8)
        in_order(table.build(config, "transforms", device_mesh=None))
    assert "\n" not in str(caught.value)


def test_a_saved_run_names_the_section_that_no_package_registers_here(average, tmp_path):
    (tmp_path / "config.yml").write_text(saved_text(load("runs/quickstart", ["train.swa.every=3"]).config))
    choices.registered.clear()
    table.clear()
    with pytest.raises(
        UserError, match=r"train.swa = .*no such setting .* if an extension registers train.swa, add it with --extension MODULE"
    ):
        load(str(tmp_path))


def test_every_file_of_sections_has_a_record_of_a_setting_in_the_config():
    keys = [one.key for one in table.capabilities()]
    assert len(keys) == len(set(keys)) == len(list(pkgutil.iter_modules(sections.__path__)))
    for key in keys:
        owner, *path = table.config_class(), *key.split(".")
        for name in path:
            assert name in owner.model_fields, key
            owner = (sections_of(owner.model_fields[name]) or [owner])[0]


def test_rules_of_a_section_run_after_those_of_the_sections_before_it():
    keys = [one.key for one in table.capabilities()]
    assert keys.index("train") < keys.index("optimizer") < keys.index("ema") < keys.index("diloco") < keys.index("elastic")
    assert keys.index("optimizer.state") < keys.index("memory.offload_state") < keys.index("ema"), "state is moved, then followed"


def test_implementations_exist():
    for one in table.capabilities():
        for place in (*one.transforms, *one.update, *one.placement, *one.probes, *one.readers, *one.observers, *one.stored):
            assert callable(load_object(place).from_config), one.key


BY_NAME = {  # file -> sections that a config may lack and that the file reads by name, each with the reason
    "run/open_run.py": {"cluster": "the machine, which is compared with the devices"},
    "training/fits.py": {"optimizer.state": "bytes of the moments, by the rule of the optimizer"},
    "training/meter.py": {"health": "settings of the judge of every run", "precision.matmul": "the peak that MFU is a share of"},
    "training/program.py": {"run.profile": "the only section that asks for other options of the compiler"},
}


@pytest.mark.parametrize("file", BY_NAME)
def test_what_iterates_over_the_table_names_no_section(file):
    tree = ast.parse((Path(maxlm.__file__).parent / file).read_text(encoding="utf-8"))
    chains = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {chain.rpartition("config.")[2] for chain in chains if re.match(r"(\w+\.)*config\.", chain)}
    config = tiny_config()
    absent = {one.key for one in table.capabilities() if value_of(config, one.key) is None}
    assert {key for key in absent for one in read if f"{one}.".startswith(f"{key}.")} == set(BY_NAME[file])


@pytest.mark.parametrize("key", ["train.noise_scale", "integrity"])
def test_a_config_without_a_section_lacks_it_and_nothing_else(key):
    config = load("runs/quickstart", ["train.noise_scale={}", "train.microbatches=2", "integrity={}"]).config
    left = without(config, key)
    assert value_of(config, key) is not None
    keys = [one.key for one in table.capabilities()]
    assert {name for name in keys if (value_of(config, name) is None) != (value_of(left, name) is None)} == {key}


def test_a_registered_section_is_part_of_a_config(average):
    loaded = load("runs/quickstart", ["train.swa.every=3"])
    assert value_of(loaded.config, "train.swa.every") == 3 and loaded.source("train.swa.every") == "command line"
    assert "swa:" in dump(loaded.config) and "swa:" not in dump(load("runs/quickstart").config)
    with pytest.raises(ConfigError, match=r"train.swa.every = 100000 \(from command line\): is above the \d+ updates of the run; lower it"):
        load("runs/quickstart", ["train.swa.every=100000"])
    with pytest.raises(ConfigError, match=r"train.swa.evry = 3 .*the nearest is train.swa.every"):
        load("runs/quickstart", ["train.swa.evry=3"])
    with pytest.raises(ConfigError, match=r"train.swa.share = 0.1 .*does nothing, since every is 1"):
        load("runs/quickstart", ["train.swa.every=1", "train.swa.share=0.1"])
    with pytest.raises(ConfigError, match=r"train.start_from.weights = mean .*is no kind of weights; use raw, ema or swa"):
        load("runs/quickstart", ["train.start_from={path: x, weights: mean}"])
    with pytest.raises(ValueError, match=r"has train\.swa already"):
        maxlm.register(Capability(key="train.swa"))


def test_a_registered_section_is_part_of_the_identity_and_of_the_state(average):
    plain, averaged = (load("runs/quickstart", said).config for said in ([], ["train.swa={}"]))
    assert set(table.identity(averaged, "t").items()) - set(table.identity(plain, "t").items()) == {("train.swa.every", "10")}
    assert table.state(averaged, ONE, 8).bytes_in(None) == table.state(plain, ONE, 8).bytes_in(None) + 4


def test_a_registered_average_trains_and_resumes_to_the_bit(average, tmp_path):
    """It is saved, evaluated and read by other runs; `maxlm plan` counts its bytes, and `maxlm config` shows it."""
    model = {"n_layers": 1}
    program = tiny_program(1, model=model, train={"steps": 4, "swa": {"every": 2}})
    config, run = program.config, RunDirectory(tmp_path, primary=True)
    states = [run_steps(program, steps, first=Program.init)[0] for steps in (2, 4)]
    checkpoints = Checkpoints(run.checkpoints, config.checkpoint, table.identity(config, ""))
    checkpoints.save(2, states[0], {})
    checkpoints.wait()
    resumed = Checkpoints(run.checkpoints, config.checkpoint, table.identity(config, "")).restore(program.abstract_state).state
    with jax.set_mesh(program.mesh):
        for n in (2, 3):
            resumed, _ = program.step(resumed, jax.device_put(tiny_batch(n), program.batch_sharding))
    jax.tree.map(np.testing.assert_array_equal, resumed, states[1])
    mean = jax.tree.map(lambda a, b: (a + b) / 2, states[0].params, states[1].params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), resumed.extra["swa"], mean)

    (tmp_path / "config.yml").write_text(dump(config))
    jax.tree.map(np.testing.assert_array_equal, open_run(tmp_path).weights(program.mesh, kind="swa").params, states[0].extra["swa"])
    assert table.averages(config) == ("swa",) and "swa" in CliRunner().invoke(app, ["config", str(tmp_path)]).output

    layout, mesh = LayoutSpace(config, 1).own(), ONE
    plain, planned = (
        Analytic(one, parse("v5p:2x2x1"), lambda layout: {}).estimate(layout).state for one in (tiny_config(model=model), config)
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(states[0].extra["swa"]))
    assert planned - plain == held and fits.least(config, mesh)[0].bytes - fits.least(tiny_config(model=model), mesh)[0].bytes == held


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


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (("phase", "last"), "'last' is no phase of an update"),
        (("name", "ema"), "'ema' is the name of"),
        (("by_parameter", False), "StochasticAverage.by_parameter = False, so the state that StochasticAverage.write returns is dropped"),
    ],
)
def test_transforms_that_could_not_work_are_refused(average, monkeypatch, named, message):
    monkeypatch.setattr(StochasticAverage, *named)
    with pytest.raises(UserError, match=message):
        _ = tiny_program(1, ema={}, train={"steps": 4, "swa": {"every": 2}}).update


def test_a_figure_that_a_transform_does_not_declare_is_an_error_when_the_step_is_traced(average, monkeypatch):
    program = tiny_program(1, train={"steps": 4, "swa": {"every": 2}})
    error = r"StochasticAverage \(transform 'swa'\) reports the figure 'spread', which it does not declare: add Metric\('spread', \.\.\.\)"
    hooks = {
        "figures": lambda self, before, after: {"spread": 1.0},
        "reduce": lambda self, state, sums, gradient: (sums._replace(added={**sums.added, "spread": 1.0}), gradient, None),
    }
    for name, hook in hooks.items():
        with monkeypatch.context() as patched, pytest.raises(UserError, match=error):
            patched.setattr(StochasticAverage, name, hook)
            program.lower()


STATES = {  # what `write` makes of its state, error
    "another structure": (lambda own: {"average": own}, r"another structure, at \['average'\]\['embedding_VD'\]"),
    "another dtype": (lambda own: jax.tree.map(lambda a: a.astype("bfloat16"), own), r"\['embedding_VD'\] as bfloat16.* of float32"),
    "another shape": (lambda own: jax.tree.map(lambda a: a[:1], own), r"\['embedding_VD'\] as float32\[1, 64\] in place of"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_transform_whose_state_changes_is_one_line_when_the_step_is_traced(name, average, monkeypatch):
    made, error = STATES[name]
    monkeypatch.setattr(StochasticAverage, "write", lambda self, params, own, state, first_row: (params, made(own)))
    with pytest.raises(UserError, match=f"StochasticAverage .*returns a state unlike what it was given: {error}") as caught:
        tiny_program(1, train={"steps": 4, "swa": {"every": 2}}).lower()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_sections_without_a_place_or_that_exclude_each_other_are_refused(average):
    with pytest.raises(ValueError, match="samples is no section that every config has: choose another key for SwaConfig"):
        maxlm.register(Capability(key="samples.swa", section=SwaConfig))
    maxlm.register(Capability(key="local", section=SwaConfig, update=("maxlm.training.diloco:LocalUpdates",)))
    with pytest.raises(UserError, match="LocalUpdates and LocalUpdates replace Update, each for a section"):
        _ = tiny_program(1, diloco={"workers": 2, "every": 2}, local={}).update
