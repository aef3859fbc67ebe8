"""Every setting is described in full sentences, with the unit of a number; `config --explain` and the JSON schema show what is written."""

import json
import re
import subprocess
import sys
from typing import Annotated

import pytest
from extensions.swa import CAPABILITY
from pydantic import Field

from maxlm.base.errors import UserError
from maxlm.config import choices, load
from maxlm.config.descriptions import descriptions
from maxlm.config.explain import leaves
from maxlm.config.explain_setting import explain
from maxlm.config.fields import Positive, PositiveFloat, Section
from maxlm.config.json_schema import file_schema
from maxlm.config.loader import SHIPPED, parse_yaml, shipped
from maxlm.config.rule_texts import rules_about
from maxlm.config.settings import Setting, all_settings, find
from maxlm.config.table import clear, config_class, register
from maxlm.corpus.settings import CorpusSettings
from maxlm.evaluation.task import ExactMatchTask, MultipleChoiceTask, PerplexityTask
from maxlm.ladder.settings import LadderSettings
from maxlm.planning.price_file import PriceFile

FILES = [config_class(), LadderSettings, CorpusSettings, PriceFile, PerplexityTask, MultipleChoiceTask, ExactMatchTask]


def is_number(setting: Setting) -> bool:
    """True for a setting that is a number, or a list of numbers, and nothing but that, null or a section."""
    plain = {leaf for leaf in leaves(setting.info.annotation) if leaf not in (type(None), ...) and leaf not in setting.sections}
    return bool(plain) and plain <= {int, float}


def faults(setting: Setting) -> list[str]:
    text, unit, _ = setting.description
    words = re.findall(r"[A-Za-z]{2,}", text)
    found = [] if len(words) >= 4 else ["fewer than four words"]
    found += [] if text.endswith(".") else ["no full stop at the end"]
    found += [] if text[:1].isupper() or text.split(" ")[0] == setting.default or not text[:1].isalpha() else ["no capital letter"]
    found += ["no unit"] if is_number(setting) and not unit else []
    found += ["a unit, and it is no number"] if unit and not {int, float} & set(leaves(setting.info.annotation)) else []
    found += ["repeats the name"] if {word.lower() for word in words} <= {*setting.name.lower().split("_"), "the", "of", "a", "an"} else []
    return found


@pytest.mark.parametrize("schema", FILES, ids=lambda schema: schema.__name__)
def test_every_setting_is_described(schema):
    settings = {(setting.owner, setting.name): setting for setting in all_settings(schema)}
    assert len(settings) > (350 if schema is config_class() else 5)
    wrong = {f"{owner.__name__}.{name}": faults(setting) for (owner, name), setting in settings.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


class Written(Section):
    """A section that a test describes well and badly. Its second sentence is not shown."""

    good: Positive = 3
    """Updates between two looks.

    A look costs 0.5 s. Default: good / 2. Unit: updates.
    """
    short: bool = False
    """The short."""
    unit: tuple[PositiveFloat, ...] = ()
    """Weights of the losses of all heads."""
    bare: int = 0
    field: Annotated[int, Field(ge=2, le=9, description="A number with a description of pydantic's. Unit: steps.")] = 4
    inner: "Inner | None" = None


class Inner(Section):
    """A section inside of it (arXiv 1711.05101): with one setting."""

    lr: PositiveFloat | None = None
    """Learning rate of the inner step. Unit: factor."""


Written.model_rebuild()


def test_bad_descriptions_are_noticed():
    found = {setting.name: faults(setting) for setting in all_settings(Written)}
    assert found == {
        "good": [],
        "short": ["fewer than four words", "repeats the name"],
        "unit": ["no unit"],
        "bare": ["fewer than four words", "no full stop at the end", "no unit", "repeats the name"],
        "field": [],
        "inner": [],
        "lr": [],
    }


def test_descriptions_are_read_from_the_strings_below():
    found = descriptions(Written)
    assert found["good"] == ("Updates between two looks. A look costs 0.5 s.", "updates", "good / 2")
    assert found["field"].unit == "steps"
    assert found["inner"].text == "A section inside of it (arXiv 1711.05101): with one setting."
    assert file_schema(Written, "")["properties"]["good"]["description"].endswith("0.5 s. Default: good / 2. Unit: updates.")


def test_a_section_that_extends_another_keeps_its_descriptions():
    class Longer(Written):
        """A longer section."""

        last: int = 0
        """Steps after the last look. Unit: steps."""

    assert [descriptions(Longer)[name].unit for name in ("good", "last")] == ["updates", "steps"]


def test_facts_about_a_setting():
    found = {setting.key: (setting.type, setting.range, setting.default, setting.nullable) for setting in all_settings(Written)}
    assert found["good"] == ("whole number", "at least 1", "good / 2", False)
    assert found["unit"] == ("list of numbers", "above 0", "[]", False)
    assert found["field"] == ("whole number", "2 to 9", "4", False)
    assert found["inner.lr"] == ("number", "above 0", "null", True)


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        ("mesh.fsdp", [""]),
        ("compression.density", ["top_k"]),
        ("compression.warmup_steps", ["int8", "sign", "top_k"]),
        ("train.batch_ramp.0.global_batch", [""]),
        ("data.mixture.sources.web.store", [""]),
        ("data.mixture.sources.store", [""]),
        ("data.mixture.sources.web", [""]),
    ],
)
def test_settings_are_found_by_their_keys(key, kinds):
    assert [setting.kind for setting in find(config_class(), key)] == kinds


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("mesh.fdsp", "did you mean mesh.fsdp"),
        ("lr", "optimizer.peak_lr"),
        ("model.rope.theta.x", "no setting"),
        ("seq_len", "data.seq_len"),
        ("zzz", "sections are model, data"),
        ("", "sections are model"),
        ("a..b", "no setting"),
    ],
)
def test_a_wrong_key_is_one_line(key, near):
    with pytest.raises(UserError, match=near):
        find(config_class(), key)


def test_rules_are_read_from_their_source():
    """A rule of a section itself, of another record, by an exclusion, of the table of axes; and never of another setting."""
    texts = {rule.rule for rule in rules_about("mesh.fsdp")}
    assert "must be 1 or more, or -1 for the devices that are left" in texts
    assert "must divide model.d_model (every matrix is split along it)" in texts
    assert {rule.capability for rule in rules_about("diloco")} >= {"model.lora", "train.batch_ramp", "precision"}
    assert "does not divide model.n_heads = …" in {rule.rule for rule in rules_about("model.n_kv_heads")}
    assert "is not below the … sequences of the batches that follow" in {rule.rule for rule in rules_about("train.batch_ramp.global_batch")}
    assert "must be 1 or more, or -1 for the devices that are left" not in {rule.rule for rule in rules_about("mesh.zero")}


def test_explain_says_all_that_is_known():
    text = explain("train.global_batch", load("runs/quickstart", ["train.steps=7"]))
    for part in (
        "Sequences in the batch",
        "unit      sequences",
        "range     at least 1",
        "default   required",
        "set in",
        "train.microbatches",
    ):
        assert part in text
    assert "train.global_batch = 8, from" in text
    assert "train.steps = 7, from command line" in explain("train", load("runs/quickstart", ["train.steps=7"]))
    assert "compression = null, its default" in explain("compression.density", load("runs/quickstart"))
    values = json.loads(explain("compression.warmup_steps", as_json=True))
    assert [one["default"] for one in values["settings"]] == ["0", "required", "required"]


@pytest.fixture
def swa(monkeypatch):
    """The settings of a package by a stranger."""
    with monkeypatch.context() as patch:
        patch.setattr(choices, "registered", [])
        register(CAPABILITY)
        yield
    clear()


def test_settings_of_a_registered_package_are_explained(swa):
    assert "is above the … updates of the run" in explain("train.swa.every")
    assert "Stochastic weight averaging" in explain("train.swa")
    assert file_schema(config_class(), "")["$defs"]["SwaConfig"]["properties"]["every"]["description"]
    with pytest.raises(UserError, match=r"did you mean train\.swa"):
        find(config_class(), "train.sva")


def test_explain_and_schema_import_no_jax():
    program = "import sys\nfrom maxlm.cli import app\napp(sys.argv[1:], standalone_mode=False)\nassert 'jax' not in sys.modules, 'jax'"
    for arguments in (["config", "--explain", "mesh.fsdp"], ["config", "--schema"]):
        answer = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema", reason="of the extra `test`")
    schema = file_schema(config_class(), "A config")
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_accepts_all_configs(validator):
    """Also configs that extend others, or that hold a part of the settings."""
    names = [name for name in shipped() if not name.startswith("ladders/")]
    assert len(names) > 100
    wrong = {name: [error.message for error in validator.iter_errors(parse_yaml((SHIPPED / f"{name}.yml").read_text()))] for name in names}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"d_modle": 8}},
        {"mesh": {"fsdp": "all"}},
        {"train": {"batch_ramp": [{"global_batch": 8}]}},  # an entry of a list is whole
        {"optimizer": {"schedule": "linear"}},
        {"train": {"steps": 0}},
        {"extends": {"a": "b"}},
        {"compression": {"kind": "int8", "density": 0.01}},
        {"extra": {}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(validator, values):
    assert list(validator.iter_errors(values))


@pytest.mark.parametrize("values", [{"extends": "models/llama3-8b"}, {"compression": {"density": 0.01}}, {"train": {"tokens": 15e12}}])
def test_the_schema_accepts_parts(validator, values):
    assert not list(validator.iter_errors(values))
