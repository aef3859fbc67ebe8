"""Parts: values of settings that choose implementations, those of maxlm and those of other packages, by the same record."""

import importlib
import sys
from typing import Any

import numpy as np
import pytest

import maxlm
from maxlm.base.errors import UserError
from maxlm.config import ConfigError, choices, table
from maxlm.config.capability import load as load_object
from maxlm.config.fields import Positive, PositiveFloat, Section
from maxlm.config.loader import dump, load
from maxlm.config.part import KINDS, ObjectiveFacts, OptimizerFacts, Part


class TigerConfig(Section):
    """Settings of a test."""

    sharpness: PositiveFloat = 1.0  # of the sign


class NeedsConfig(Section):
    """Settings of which one is required."""

    rank: Positive


@pytest.fixture
def registry():
    """The table, without parts of other packages before and after the test."""
    choices.registered.clear()
    table.clear()
    yield
    choices.registered.clear()
    table.clear()


def tiger(**fields: Any) -> Part:
    given = {"kind": "optimizer", "name": "tiger", "place": "extensions.tiger:Tiger", "section": TigerConfig, **fields}
    return Part(**given)


def test_every_part_of_maxlm_has_an_implementation_and_a_place_in_the_config():
    for part in choices.own_parts():
        assert part.kind in KINDS and isinstance(part.facts, KINDS[part.kind].facts), part.key
        assert callable(load_object(part.place)), part.key
    assert len({(part.kind, part.name) for part in choices.own_parts()}) == len(choices.own_parts())


def test_a_registered_name_is_a_choice_like_ours(registry):
    with pytest.raises(ConfigError, match=r"optimizer.name = tiger .*must be one of adamw, .*; write for example adamw"):
        load("runs/quickstart", ["optimizer.name=tiger"])
    maxlm.register(tiger())
    loaded = load("runs/quickstart", ["optimizer.name=tiger", "optimizer.muon=null", "optimizer.tiger.sharpness=2"])
    assert loaded.config.optimizer.name == "tiger" and table.value_of(loaded.config, "optimizer.tiger.sharpness") == 2
    assert "sharpness: 2" in dump(loaded.config) and loaded.config.optimizer.facts == OptimizerFacts()
    for given, said in {
        "optimizer.name=tigr": "must be one of .*schedule_free, tiger; the nearest is tiger",
        "optimizer.tiger.sharpnes=2": "no such setting in `optimizer.tiger`; the nearest is optimizer.tiger.sharpness",
        "optimizer.tiger.sharpness=-1": "must be above 0",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load("runs/quickstart", [given])
    with pytest.raises(ConfigError, match=r"optimizer.tiger = .*does nothing, since optimizer.name = muon; .*use optimizer.name=tiger"):
        load("runs/quickstart", ["optimizer.tiger.sharpness=2"])


def test_an_objective_is_a_branch_of_its_section(registry):
    maxlm.register(Part(kind="objective", name="smooth", place="extensions.x:Y", section=TigerConfig, facts=ObjectiveFacts()))
    maxlm.register(Part(kind="objective", name="plain", place="extensions.x:Y", about="A test."))
    config = load("runs/quickstart", ["objective={kind: smooth, sharpness: 3}"]).config
    assert config.objective.sharpness == 3 and type(config.objective).__name__ == "TigerConfig"
    assert load("runs/quickstart", ["objective.kind=plain"]).config.objective.kind == "plain"
    with pytest.raises(ConfigError, match=r"objective = .*must be one of next_token, sft, dpo, plain, smooth; the nearest is smooth"):
        load("runs/quickstart", ["objective.kind=smoth"])
    assert ("objective.kind", "smooth") in table.identity(config, "").items()


def test_rules_of_a_part_run_where_it_is_chosen_alone(registry):
    def odd(own, optimizer_beta1):
        yield "optimizer.beta1", optimizer_beta1, f"is odd beside {own.sharpness:g}", "use another"

    maxlm.register(tiger(rules=(odd,), identity=lambda own: {"optimizer.tiger.sharpness": own.sharpness}))
    assert load("runs/quickstart").config
    with pytest.raises(ConfigError, match=r"optimizer.beta1 = 0.9: is odd beside 1; use another"):
        load("runs/quickstart", ["optimizer.name=tiger", "optimizer.muon=null"])


def test_settings_that_a_part_needs_are_asked_for(registry):
    maxlm.register(tiger(section=NeedsConfig))
    with pytest.raises(ConfigError, match=r"optimizer.tiger = null: optimizer.name names tiger, which needs optimizer.tiger.rank; set it"):
        load("runs/quickstart", ["optimizer.name=tiger", "optimizer.muon=null"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "optimiser"}, "no such kind of part; use objective, optimizer"),
        ({"name": "adamw"}, "an update rule of that name is known already"),
        ({"name": "Tiger!"}, "its name is no value of a setting"),
        ({"name": "peak_lr"}, "optimizer.peak_lr is a setting already"),
        ({"place": "extensions.tiger"}, "is no place; write 'package.module:Object', which holds a class derived from"),
        ({"facts": ObjectiveFacts()}, r"are of another kind; use maxlm.config.part.OptimizerFacts\("),
        ({"section": dict}, "is no class derived from maxlm.config.fields.Section"),
        ({"rules": lambda own: None}, "rules is no tuple of functions"),
        ({"rules": (lambda own, total_stops: None,)}, "asks for total_stops, which is no setting and no figure"),
        ({"kind": "family"}, "a Hugging Face family has no section in a config"),
    ],
)
def test_a_record_that_no_config_could_use_is_refused_and_changes_nothing(registry, fields, said):
    with pytest.raises(ValueError, match=said):
        maxlm.register(tiger(**fields))
    assert choices.registered == [] and load("runs/quickstart").config
    maxlm.register(tiger())


def test_a_place_that_is_not_there_is_one_line(registry):
    from maxlm.training.optimizer import build_optimizer

    maxlm.register(tiger(place="nowhere.tiger:Tiger"))
    config = load("runs/quickstart", ["optimizer.name=tiger", "optimizer.muon=null"]).config
    said = r"optimizer.tiger: place nowhere.tiger:Tiger failed: ModuleNotFoundError.* \(line \d+ of .*test_choices.py\)"
    with pytest.raises(UserError, match=said) as caught:
        build_optimizer(config)
    assert "\n" not in str(caught.value)


SGD = """
import optax

from maxlm.training.update_rule import UpdateRule
from ext_sgd.nothing import absent  # left out in some cases

class Sgd(UpdateRule):
    def direction(self, axes):
        return optax.identity()

class Scaled(UpdateRule):
    def __init__(self, own, optimizer, total_steps):
        super().__init__(own, optimizer)
        self.factor = own.sharpness * total_steps

    def direction(self, axes):
        return optax.scale(self.factor)

class Empty(UpdateRule):
    pass

class Misspelt(UpdateRule):
    def __init__(self, own, optimizer, totl_steps):
        super().__init__(own, optimizer)

    def direction(self, axes):
        return optax.identity()
"""


@pytest.fixture
def sgd(registry, tmp_path, monkeypatch):
    """The function that gives one update of a parameter of 1 with gradient 1 by a class of the module `ext_sgd.rule`."""
    from maxlm.training.optimizer import build_optimizer

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ext_sgd").mkdir()

    def update(name: str, text: str = SGD.replace("from ext_sgd", "# from ext_sgd"), **fields: Any) -> float:
        (tmp_path / "ext_sgd" / "rule.py").write_text(text)
        maxlm.register(tiger(place=f"ext_sgd.rule:{name}", **fields))
        asked = ["optimizer.muon=null", "optimizer.name=tiger", "optimizer.warmup_steps=0", "optimizer.peak_lr=0.5", "train.steps=10"]
        given = [] if "section" in fields else ["optimizer.tiger.sharpness=2"]
        rule = build_optimizer(load("runs/quickstart", [*asked, *given]).config, {"w": ("norm",)})
        one = {"w": np.float32(1)}
        found, _ = rule.update(one, rule.init(one), one)
        return float(found["w"])

    yield update
    for name in [one for one in sys.modules if one.partition(".")[0] == "ext_sgd"]:
        del sys.modules[name]


def test_the_least_update_rule_is_a_class_with_one_method(sgd):
    assert sgd("Sgd", section=None) == -0.5


def test_an_update_rule_gets_its_section_and_the_settings_that_its_parameters_name(sgd):
    assert sgd("Scaled") == -0.5 * 2 * 10


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("Sgd", SGD, r"No module named 'ext_sgd.nothing' \(line 5 of .*rule.py\)"),
        ("Sgd", "x = (\n", r"SyntaxError: .* \(line 1 of .*rule.py\)"),
        ("Nope", "", r"has no attribute 'Nope' \(line \d+ of .*test_choices.py\)"),
        ("Empty", SGD.replace("from ext", "#"), r"Empty has no direction, which an update rule needs \(line 19 of .*rule.py\)"),
        ("Misspelt", SGD.replace("from ext", "#"), r"Misspelt asks for totl_steps, which is no setting .* \(line 22 of .*rule.py\)"),
    ],
)
def test_an_implementation_that_fails_is_named_with_the_line_of_its_package(sgd, name, text, said):
    with pytest.raises(UserError, match=rf"optimizer.tiger: .*{said}; mend the package that registers optimizer.tiger") as caught:
        sgd(name, text)
    assert "\n" not in str(caught.value)


def test_facts_are_named_by_their_kinds():
    module = importlib.import_module("maxlm.config.part")
    assert all(getattr(module, kind.facts.__name__) is kind.facts for kind in KINDS.values())
