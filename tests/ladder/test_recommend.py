"""From a budget to a model: the least loss of the fitted form, as settings that make a config."""

import json
import math
import shutil

import numpy as np
import pytest
from ladder_folder import end_all, rungs_of, write_ladder

from maxlm.base.errors import UserError
from maxlm.config.loader import load
from maxlm.ladder import ladder_command
from maxlm.ladder.ladder_command import Options
from maxlm.ladder.recommend import recommend
from maxlm.models.counts import count_parameters, token_flops


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(ladder_command, "page", lambda *_: "")
        file = write_ladder(folder)
        end_all(folder / "out", rungs_of(file))
        ladder_command.run(str(file), [], Options(train=False), print)
    return folder


@pytest.fixture
def ladder(fitted, tmp_path, monkeypatch):
    """A copy of a ladder that was fitted."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


@pytest.mark.parametrize("flops", [1e16, 1e19])
def test_the_recommended_size_is_the_best_of_its_neighbours(ladder, flops):
    found = recommend(ladder, "base.yml", [], flops)
    config = load("base.yml", found.overrides).config
    assert config.train.tokens == found.tokens
    assert token_flops(config.model, 32) * found.tokens == pytest.approx(flops, rel=0.01)

    def loss(parameters):  # that losses were made with
        return (
            1.5
            + 12 / parameters**0.3
            + 60 / (flops / (token_flops(config.model, 32) / count_parameters(config.model)) / parameters) ** 0.35
        )

    best = count_parameters(config.model)
    assert loss(best) <= min(loss(best / 1.5), loss(best * 1.5)) + 1e-9
    assert any("extrapolation" in sentence for sentence in found.sentences)
    assert config.model.n_layers == round(config.model.d_model * 2 / 32) and config.model.d_model % 128 == 0


def test_more_flops_are_a_larger_model_for_longer(ladder):
    configs = [load("base.yml", recommend(ladder, "base.yml", [], flops).overrides).config for flops in np.logspace(15, 21, 4)]
    sizes, tokens = ([f(config) for config in configs] for f in (lambda c: count_parameters(c.model), lambda c: c.train.tokens))
    assert sizes == sorted(set(sizes)) and tokens == sorted(set(tokens))


def test_where_a_narrower_model_may_be_better_it_is_said(ladder):
    said = "None narrower than 128 was tried"
    assert any(said in sentence for sentence in recommend(ladder, "base.yml", [], 1e13).sentences)
    assert not any(said in sentence for sentence in recommend(ladder, "base.yml", [], 1e19).sentences)


def test_a_config_of_another_kind_than_the_ladder_is_said(ladder):
    other = ["model.vocab_size=640", "model.parametrization={kind: mup, base_width: 32}", "train.global_batch=16"]
    assert not [sentence for sentence in recommend(ladder, "base.yml", [], 1e18).sentences if "was trained with" in sentence]
    (said,) = [sentence for sentence in recommend(ladder, "base.yml", other, 1e18).sentences if "was trained with" in sentence]
    assert "model.vocab_size = 320 (640 here), model.parametrization = None ({'kind': 'mup'" in said and "batch" not in said


def test_what_no_ladder_tells_is_refused(ladder, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        recommend(tmp_path, "base.yml", [], 1e18)
    for setting in ("train.steps=5", "train={steps: 5}"):
        with pytest.raises(UserError, match=r"train\.steps=5 does not go with --flops"):
            recommend(ladder, "base.yml", [setting], 1e18)
    with pytest.raises(UserError, match="is not a number of FLOPs"):
        recommend(ladder, "base.yml", [], float("nan"))
    with pytest.raises(UserError, match=r"too little for base\.yml"):
        recommend(ladder, "base.yml", [], 1e3)
    with pytest.raises(UserError, match="goes with dense models"):
        recommend(ladder, "runs/quickstart-moe", [], 1e18)
    text = (ladder / "ladder.json").read_text()
    for before, after in (
        ('"chinchilla"', '"cubic"'),
        ('"theta": [', '"theta": [null,'),
        ('"centre": [', '"centre": [1.0,'),
        ('"flops"', '"flop"'),
        ('"data.seq_len"', '"data.length"'),
    ):
        (ladder / "ladder.json").write_text(text.replace(before, after))
        with pytest.raises(UserError, match="fit it anew"):
            recommend(ladder, "base.yml", [], 1e18)
    (ladder / "ladder.json").write_text("[]")
    with pytest.raises(UserError, match="fit it anew"):
        recommend(ladder, "base.yml", [], 1e18)


def _first(of, name):
    return lambda result, value: result[of][0].__setitem__(name, value)


def _all(of, name):
    return lambda result, value: [one.__setitem__(name, value) for one in result[of]]


BAD = [math.nan, math.inf, -1, 0, "3", True, None, [1], 10**400]
DAMAGED = [
    *((_first("runs", name), value) for name in ("flops", "parameters", "tokens") for value in (BAD if name == "flops" else BAD[2:5])),
    *((_first("runs", "epochs"), value) for value in BAD[:6]),
    (_first("predictions", "error"), math.nan),
    *((_first("predictions", "error"), value) for value in BAD[4:]),
    (_all("runs", "tokens"), 0),
    *((lambda result, value: result.update(runs=value), value) for value in ([], {}, 3, None, "x", [3])),
    *((lambda result, value: result.update(predictions=value), value) for value in (3, None, "x", [3])),
    *((lambda result, value: result.update(parameters=value), value) for value in ("nonsense", 3, ["all"])),
    *((lambda result, value: result.update(base=value), value) for value in (3, None)),
    *((lambda result, value: result.update(form=value), value) for value in (3, ["chinchilla"])),
    (lambda result, value: result["theta"].__setitem__(0, value), 800),
    (lambda result, value: result.update(thetas=[[value] * len(result["theta"])] * 3), 800),
    (lambda result, value: result.update(thetas=value), 3),
]


def test_a_damaged_ladder_is_refused_in_one_line_and_its_text_is_no_control_character(ladder):
    """Figures that are no figures, another kind of count, losses that are not finite; never a traceback, and never a recommendation."""
    whole = (ladder / "ladder.json").read_text()
    for damage, value in DAMAGED:
        result = json.loads(whole)
        damage(result, value)
        (ladder / "ladder.json").write_text(json.dumps(result))
        with pytest.raises(UserError, match="fit it anew"):
            recommend(ladder, "base.yml", [], 1e18)
    result = json.loads(whole)
    result["base"] = result["assumed"]["optimizer.name"] = "x\x1b[31m\n# evil" * 1000
    result["predictions"] = []
    (ladder / "ladder.json").write_text(json.dumps(result))
    said = recommend(ladder, "base.yml", [], 1e18).sentences
    assert all(line.isprintable() and len(line) < 2000 for line in said)
    assert any("has not predicted any run" in line for line in said)
