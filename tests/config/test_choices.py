"""Parts: values of settings that choose implementations, those of maxlm and those of other packages, by the same record."""

import importlib
from typing import Any

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
    with pytest.raises(UserError, match=r"optimizer.tiger: place nowhere.tiger:Tiger failed: ModuleNotFoundError") as caught:
        build_optimizer(config)
    assert "\n" not in str(caught.value)


def test_facts_are_named_by_their_kinds():
    module = importlib.import_module("maxlm.config.part")
    assert all(getattr(module, kind.facts.__name__) is kind.facts for kind in KINDS.values())
