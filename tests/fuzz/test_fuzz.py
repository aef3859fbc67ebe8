"""Random configs on random meshes: as on one device, resumed on another, unrolled, in evaluation, within the bound of memory."""

import random

import fuzz
import jax
import pytest
from compared_meshes import (
    CHECKS,
    STEPS,
    Case,
    Failure,
    Judged,
    bounded,
    draw_case,
    on_one_device,
    resumed,
    same_on_the_mesh,
    sees_microbatches,
    updates,
)
from drawn_configs import BASE, NOT_DRAWN, SETTINGS, VALUES, CannotDrawError, build, changed, devices_of, draw_field, get, settings

from maxlm.config.schema import Config

CHUNKS, CASES = 6, 29  # of a day: 200 in a week
CHUNK_S = 160.0  # of processor time, after which a chunk begins no further case
SECTIONS_THAT_STAY = {"checkpoint", "run"}


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_configs_on_random_meshes(chunk):
    """The cases of a day: its date is their seed, or MAXLM_FUZZ_SEED."""
    found = fuzz.run(fuzz.SEED, range(chunk, CASES, CHUNKS), seconds=CHUNK_S)
    assert not found, f"{len(found)} failures of the seed {fuzz.SEED}, in {fuzz.FOLDER}:\n" + "\n".join(found)


def test_every_setting_is_drawn_or_listed_with_a_reason():
    for key, info in settings():
        try:
            draw_field(random.Random(0), key, info)
        except CannotDrawError as error:
            raise AssertionError(str(error)) from None
    every = set(dict(settings(Config, left_out=()))) | SECTIONS_THAT_STAY
    assert set(NOT_DRAWN) <= every, "a reason for a setting that is no more"
    assert set(VALUES) <= every | {"train.batch_ramp.global_batch", "train.batch_ramp.until_tokens"}, "values of a setting that is no more"


def test_settings_of_every_section_come_into_valid_configs():
    sections = [key for key in SETTINGS if key.rpartition(".")[0] in ("", "model", "train", "optimizer", "mesh", "memory")]
    never = []
    for key in sections:
        tried = (changed(random.Random(seed), BASE, key) for seed in range(60))
        if not any(found is not None and get(found, key) not in (None, get(BASE, key)) for found in tried):
            never.append(key)
    assert never == []


def test_cases_are_valid_and_the_same_again():
    for number in range(8):
        case = draw_case(f"a seed-{number}")
        assert case == draw_case(f"a seed-{number}")
        config, moved = build(case.values), build(case.moved)
        assert devices_of(config) > 1
        assert moved.model == config.model and moved.optimizer == config.optimizer
        assert not sees_microbatches(config) or moved.train == config.train
        assert build(on_one_device(case.values)).model == config.model


def test_a_failure_is_reduced_to_what_it_needs(tmp_path):
    """Of 40 settings a fault needs the window and the mesh's context."""
    window = {"layer_pattern": ["local"], "window": 6, "qk_norm": True, "softcap": {"logits": 5.0}, "activation": "gelu", "d_ff": 32}
    case = draw_case("a seed-0")
    values = {**case.values, "model": {**BASE["model"], **window}, "mesh": {"fsdp": 2, "context": 4}, "ema": {"decay": 0.5}}
    values |= {name: BASE[name] for name in ("data", "train", "optimizer")}
    other = {"mesh": {"fsdp": 1, "tensor": 4}}
    least = fuzz.reduced(Case(values, other), lambda case: bool(get(case.values, "model.window")) and get(case.values, "mesh.context") == 4)
    assert set(fuzz.leaves(least.values)) == {"model.layer_pattern", "model.window", "mesh.context"}
    assert least.other == {"mesh": {"fsdp": 1, "tensor": 1}}
    file = tmp_path / "failed.yml"
    file.write_text(fuzz.text_of(least, Failure("resumed", "loss: 1.0e-02"), "a seed-0"), encoding="utf-8")
    assert fuzz.read(file) == least


def fixed_case():
    return Judged(Case(BASE | {"mesh": {"fsdp": 1, "tensor": 2}}, {"mesh": {"fsdp": 1}}))


def test_a_fixed_case_passes_and_notices_a_change_of_the_mesh():
    """A small case on a mesh, and resumed on one device; a state that differs by a thousandth on the mesh fails the comparison."""
    judged = fixed_case()
    assert {check.__name__: told for check in (same_on_the_mesh, bounded, resumed) if (told := check(judged))} == {}
    changed_first = jax.tree.map(lambda leaf: (leaf * (1 + 1e-3)).astype(leaf.dtype), judged.first)
    judged.spread = updates(judged.mesh, changed_first, 0, STEPS)
    told = same_on_the_mesh(judged)
    assert "noise" in told and "params" in told


@pytest.mark.soak
def test_a_fixed_case_passes_every_check():
    judged = fixed_case()
    assert {name: told for name, check in CHECKS.items() if (told := check(judged))} == {}
