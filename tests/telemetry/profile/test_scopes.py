"""Parts and phases of op_names, and that the model sets the scopes they are told by."""

import pytest
from tiny import tiny_program

from maxlm.telemetry.profile import scopes
from maxlm.telemetry.profile.scopes import is_collective, phase_of, scope_of

EXPERTS, LATENT = {"n_experts": 4, "top_k": 2, "d_ff": 16}, {"kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
BODY = "jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint"
PLACES = {
    "jit(train_step)/jvp()/while/body/closed_call/attn/BSD,DHK->BSHK/dot_general": ("attn", "forward"),
    "jit(train_step)/jvp()/while/body/closed_call/attn/norm/mul": ("attn", "forward"),
    f"{BODY}/rematted_computation/norm/rsqrt": ("norm", "recomputed"),
    f"{BODY}/moe/shard_map/mlp/dot_general": ("moe", "backward"),
    f"{BODY}/(attn/BSD,DGK->BSGK/dot_general:norm/reduce_sum)": ("attn", "backward"),
    "jit(train_step)/transpose(jvp(embed))/shard_map/reduce_scatter": ("embed", "backward"),
    "jit(train_step)/jvp(unembed)/while/body/dot_general;jit(train_step)": ("unembed", "forward"),
    "jit(train_step)/jvp()/while/body/dynamic_slice": (scopes.LAYERS, "forward"),
    "jit(train_step)/accumulate/while/body/closed_call/jvp()/while/body/add": (scopes.LAYERS, "forward"),
    "jit(train_step)/accumulate/while/body/closed_call/jvp()/cos": (scopes.MODEL, "forward"),
    "jit(train_step)/accumulate/while/body/closed_call/transpose(jvp(embed))/scatter-add": ("embed", "backward"),
    "jit(train_step)/accumulate/while/body/closed_call/add": (scopes.ACCUMULATION, "update"),
    "jit(train_step)/jvp()/cos": (scopes.MODEL, "forward"),
    "jit(train_step)/jit(_where)/select_n": (scopes.OPTIMIZER, "update"),
    "": (scopes.UNKNOWN, "update"),
    "reduce_sum": (scopes.UNKNOWN, "update"),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_place_has_a_part_and_a_phase(where):
    assert (scope_of(where), phase_of(where)) == PLACES[where]


@pytest.mark.parametrize(
    ("name", "opcode"), [("all_gather.3", ""), ("psum.1", ""), ("fusion.2", "all-reduce"), ("ncclDevKernel_AllGather_RING_LL", "")]
)
def test_collectives_are_told_by_name_or_opcode(name, opcode):
    assert is_collective(name, opcode)
    assert not is_collective("fusion.1", "fusion")


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({}, {"embed", "norm", "attn", "mlp", "unembed"}),
        ({"n_kv_heads": 8, "moe": EXPERTS, "latent": LATENT}, {"embed", "norm", "attn", "moe", "unembed"}),
    ],
    ids=["dense", "latent attention and experts"],
)
def test_the_model_sets_scopes_which_are_metadata_only(model, named):
    lowered = tiny_program(1, model=model).lower()
    with_places, program = lowered.as_text(debug_info=True), lowered.as_text()
    for name in named:
        assert f"/{name}/" in with_places or f"({name})" in with_places, name
        assert f"/{name}/" not in program


def test_the_sum_over_microbatches_has_a_scope_which_is_metadata_only():
    lowered = tiny_program(1, train={"microbatches": 2, "global_batch": 4}).lower()
    program = lowered.as_text()
    assert "/accumulate/while/" in lowered.as_text(debug_info=True) and "accumulate" not in program
