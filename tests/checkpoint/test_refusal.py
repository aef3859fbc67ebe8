"""A checkpoint that is whole but not ours is refused before an array is read, in one line that names what differs."""

import json

import jax
import jax.numpy as jnp
import pytest
from checkpoint_cases import IDENTITY, layout, make_state, open_store

from maxlm import __version__
from maxlm.base.errors import UserError
from maxlm.checkpoint import CheckpointError, manifest
from maxlm.checkpoint.manifest import Leaf
from maxlm.checkpoint.reader import check_leaves


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.d_model": "32"}, "model.d_model is 16 there and 32 here"),
        ({"tokenizer": "xyz"}, "tokenizer is abc there and xyz here"),
        ({"model.rope.theta": "1e6"}, "model.rope.theta is not set there and 1e6 here"),
        ({"model.d_model": "1", "model.n_layers": "1", "tokenizer": "1", "optimizer.name": "1"}, "and 1 more"),
    ],
)
def test_another_experiment(saved, change, said):
    directory, states = saved
    with pytest.raises(UserError) as caught:
        open_store(directory, {**IDENTITY, **change}).restore(states[3])
    message = str(caught.value)
    assert said in message
    assert "use another run.name" in message
    assert "\n" not in message


def test_a_field_that_is_gone_is_a_difference(saved):
    directory, states = saved
    with pytest.raises(CheckpointError, match="tokenizer is abc there and not set here"):
        open_store(directory, {name: value for name, value in IDENTITY.items() if name != "tokenizer"}).restore(states[3])


def test_another_dtype_is_never_cast(saved):
    directory, _ = saved
    wanted = make_state()
    wanted["params"]["layers"]["w"] = wanted["params"]["layers"]["w"].astype(jnp.bfloat16)
    with pytest.raises(CheckpointError, match=r"params\.layers\.w is float32 there and bfloat16 here"):
        open_store(directory).restore(layout(4, 2)(wanted))
    with pytest.raises(CheckpointError, match=r"params\.layers\.w is float32 there and bfloat16 here"):
        open_store(directory).restore_entries({"params": layout(4, 2)(wanted["params"])})


def test_another_shape(saved):
    directory, _ = saved
    with pytest.raises(CheckpointError, match=r"params\.embed has shape \[64, 32\] there and \[64, 64\] here"):
        open_store(directory).restore(layout(4, 2)(make_state(width=64)))


def test_a_leaf_missing_or_too_many(saved):
    directory, states = saved
    with pytest.raises(CheckpointError, match=r"ema\.w is missing there"):
        open_store(directory).restore({**states[3], "ema": {"w": jnp.ones(3)}})
    with pytest.raises(CheckpointError, match="step is there and not in this run's state"):
        open_store(directory).restore({name: leaf for name, leaf in states[3].items() if name != "step"})


def test_the_version_that_wrote_a_checkpoint_is_recorded_and_named(saved):
    directory, _ = saved
    file = directory / "3/manifest/manifest.json"
    content = manifest.parse(file.read_text())
    assert content.maxlm == __version__
    new = {**{key: value for key, value in json.loads(file.read_text()).items() if key != "sha256"}, "format": 3, "maxlm": "9.1.0"}
    with pytest.raises(CheckpointError, match=r"of format 3, written by maxlm 9\.1\.0, and this is maxlm .* use that version"):
        manifest.parse(json.dumps({**new, "sha256": manifest._checksum(new)}))


def test_another_state_of_the_same_optimizer_is_refused_with_the_version_and_what_to_do():
    names = {"params.w": "params.w", "opt_state.0.0.inner_states.muon.mu.w": "opt_state.0.inner_states.matrices.inner_state.mu.w"}
    saved = {name: Leaf("float32", (2, 3), (0, 0)) for name in names}
    wanted = {name: jax.ShapeDtypeStruct((2, 3), jnp.float32) for name in names.values()}
    said = r"written by maxlm 0\.0\.9, .*opt_state\.0\.inner_states\.matrices.* is missing there, .*train\.start_from"
    with pytest.raises(CheckpointError, match=said):
        check_leaves(saved, wanted, "checkpoint 4", "0.0.9", whole=True)
    check_leaves(saved, {"params.w": wanted["params.w"]}, "checkpoint 4", "0.0.9", whole=False)


def test_a_refused_checkpoint_is_not_passed_over(saved, monkeypatch):
    """The one before would only hide the mistake: nothing is loaded, and no older checkpoint is tried."""
    directory, states = saved
    monkeypatch.setattr(jax.random, "key_data", lambda *_: pytest.fail("an array was digested"))
    with pytest.raises(CheckpointError) as caught:
        open_store(directory, {}).restore(states[3])
    assert "/3 " in str(caught.value)
