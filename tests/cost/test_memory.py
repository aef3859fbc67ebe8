"""What fills memory: to the byte where it can be known, by a replay of the schedule where it cannot."""

import math
from types import SimpleNamespace

import jax
import pytest
from tiny import first_state, tiny_config

from maxlm.cost.memory import _BufferNames, kept_sizes, state_parts
from maxlm.hlo.liveness import at_peak
from maxlm.hlo.parser import Shape, read
from maxlm.models import count_parameters
from maxlm.parallel import build_mesh
from maxlm.training.program import build_program

KIB = 1024


def peak(*computations: str) -> dict[str, int]:
    """KiB alive at the fullest moment of a program, by the operation that made each buffer first; the last computation is the entry."""
    *called, entry = computations
    text = "HloModule m, is_scheduled=true\n\n" + "\n\n".join([*called, f"ENTRY {entry}"]) + "\n"
    return {buffer.writers[0].name: buffer.bytes // KIB for buffer in at_peak(read(text))}


def test_a_buffer_is_alive_until_its_last_reader():
    assert peak("""%e (p: f32[256]) -> f32[512] {
  %p = f32[256]{0} parameter(0)
  %a = f32[1024]{0} broadcast(%p), dimensions={}
  %b = f32[2048]{0} concatenate(%a, %a), dimensions={0}
  %c = f32[512]{0} slice(%b), slice={[0:512]}
  ROOT %d = f32[512]{0} sort(%c), dimensions={0}
}""") == {"a": 4, "b": 8}


def test_views_take_no_memory_and_keep_what_they_show_alive():
    assert peak("""%e (p: f32[256]) -> f32[1024] {
  %p = f32[256]{0} parameter(0)
  %a = f32[1024]{0} broadcast(%p), dimensions={}
  %t = (f32[1024]{0}, f32[256]{0}) tuple(%a, %p)
  %g = f32[1024]{0} get-tuple-element(%t), index=0
  %v = f32[32,32]{1,0} bitcast(%g)
  %x = f32[4096]{0} broadcast(%p), dimensions={}
  ROOT %r = f32[1024]{0} custom-call(%v, %x), custom_call_target="f"
}""") == {"a": 4, "x": 16, "r": 4}


def test_what_lies_in_fast_memory_is_not_counted():
    assert peak("""%e (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %a = f32[4096]{0:T(1024)S(1)} broadcast(%p), dimensions={}
  ROOT %r = f32[512]{0} slice(%a), slice={[0:512]}
}""") == {"r": 2}


def test_an_output_takes_the_place_of_its_donated_argument():
    assert peak("""%e (p: f32[2048]) -> f32[2048] {
  %p = f32[2048]{0} parameter(0)
  %a = f32[1024]{0} slice(%p), slice={[0:1024]}
  ROOT %r = f32[2048]{0} custom-call(%p, %a), custom_call_target="f"
}""") == {"a": 4}


LOOP = (
    """%body (s: (s32[], f32[8,256], f32[256])) -> (s32[], f32[8,256], f32[256]) {
  %s = (s32[], f32[8,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %kept = f32[8,256]{1,0} get-tuple-element(%s), index=1
  %x = f32[256]{0} get-tuple-element(%s), index=2
  %wide = f32[4096]{0} broadcast(%x), dimensions={}
  %y = f32[256]{0} slice(%wide), slice={[0:256]}, metadata={op_name="step/jvp()/while/body/y"}
  %row = f32[1,256]{1,0} bitcast(%y)
  %put = f32[8,256]{1,0} dynamic-update-slice(%kept, %row, %i, %i), metadata={op_name="step/jvp()/while/body/put"}
  ROOT %out = (s32[], f32[8,256]{1,0}, f32[256]{0}) tuple(%i, %put, %y)
}""",
    """%cond (s: (s32[], f32[8,256], f32[256])) -> pred[] {
  %s = (s32[], f32[8,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(8)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}""",
    """%e (p: f32[256]) -> f32[8,256] {
  %p = f32[256]{0} parameter(0)
  %zero = s32[] constant(0)
  %stack = f32[8,256]{1,0} broadcast(%zero), dimensions={}
  %x = f32[256]{0} copy(%p)
  %start = (s32[], f32[8,256]{1,0}, f32[256]{0}) tuple(%zero, %stack, %x)
  %loop = (s32[], f32[8,256]{1,0}, f32[256]{0}) while(%start), condition=%cond, body=%body
  ROOT %r = f32[8,256]{1,0} get-tuple-element(%loop), index=1
}""",
)


def test_a_loop_carries_one_buffer_and_adds_what_lives_inside():
    """The stack that is written row by row exists once; the row that the next turn reads takes the place of the last."""
    found = peak(*LOOP)
    assert {name: size for name, size in found.items() if size} == {"stack": 8, "x": 1, "wide": 16}


def test_a_buffer_tells_where_the_loop_fills_it():
    buffers = at_peak(read("HloModule m, is_scheduled=true\n\n" + "\n\n".join([*LOOP[:2], f"ENTRY {LOOP[2]}"]) + "\n"))
    (stack,) = [buffer for buffer in buffers if buffer.shape.dims == (8, 256)]
    assert stack.where == "step/jvp()/while/body/put"


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_the_state_is_what_the_devices_hold(mesh):
    config = tiny_config(mesh=mesh)
    program = build_program(config, build_mesh(config, jax.devices()[: math.prod(mesh.values())]))
    parameters, optimizer, batch = (part.bytes for part in state_parts(program))
    device = jax.devices()[0]

    def held(tree):
        return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == device)

    state = first_state(program)
    assert (parameters, optimizer) == (held(state.params), held(state.opt_state))
    assert optimizer == 2 * parameters + 8  # two moments, and two counters
    if not mesh:
        assert parameters == 4 * count_parameters(config.model)
    rows = config.train.global_batch // (mesh.get("data", 1) * mesh.get("fsdp", 1))
    assert batch == 5 * 4 * rows * config.data.seq_len


def kept(config, **sizes):
    return kept_sizes(config.model, config.memory.remat, **sizes)


def test_kept_tensors_are_told_apart_by_their_size():
    config = tiny_config(memory={"remat": ("query", "key", "gate")})  # width 64, 8 heads and 4 key/value heads of 8, 128 hidden units
    assert kept(config, tokens=10, tensor=1) == {
        640: ("layer_input", "query"),
        320: ("key",),
        1280: ("gate",),
    }
    assert kept(tiny_config(), tokens=10, tensor=2) == {320: ("layer_input",)}


MIXTURE = {"n_experts": 8, "top_k": 2, "d_ff": 48, "n_shared": 1, "n_dense": 1}


def test_kept_tensors_of_experts_are_rows():
    """Width 64, 128 hidden units of the dense layer, 48 of an expert, padded to 128 on a TPU; 2 rows a token."""
    config = tiny_config(model={"moe": MIXTURE}, memory={"remat": ("up",)})
    assert kept(config, tokens=100, tensor=1) == {
        6400: ("layer_input",),
        12800: ("up",),
        4800: ("up",),  # of the shared expert
        9600: ("up",),
        25600: ("up",),
    }
    assert set(kept(config, tokens=100, tensor=1, expert=4)) == {
        6400,
        12800,
        4800,
        256 * 48,
        256 * 128,
    }  # 1.25 x 200, whole lanes
    latent = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
    config = tiny_config(model={"latent": latent, "n_kv_heads": 8}, memory={"remat": ("key", "value")})
    assert kept(config, tokens=10, tensor=1) == {640: ("layer_input", "value"), 960: ("key",)}


@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"fsdp": 2, "expert": 4}, {"fsdp": 2, "tensor": 2, "expert": 2}], ids=str)
def test_buffers_of_experts_have_names(mesh):
    """Experts of 48 hidden units, split along their width by `fsdp`, among devices by `expert` and inside by `tensor`."""
    sizes = {"fsdp": 1, "tensor": 1, "expert": 1} | mesh
    model = {"vocab_size": 1056, "d_model": 128, "moe": {**MIXTURE, "n_experts": 32}, "mtp": {"depth": 1}, "n_layers": 4}
    config = tiny_config(model=model, mesh=mesh, memory={"remat": ("gate", "up")}, train={"global_batch": 64})
    names = _BufferNames(build_program(config, build_mesh(config, jax.devices())))
    tokens = config.train.global_batch * config.data.seq_len // (sizes["fsdp"] * sizes["expert"])
    experts, inside = 32 // sizes["expert"], 48 // sizes["tensor"]
    rows = 2 * tokens if sizes["expert"] == 1 else -(-9 * 2 * tokens // (8 * 128)) * 128  # room for an eighth more
    forward, backward = "step/jvp()/while/body/put", "step/transpose(jvp())/while/body/add"

    def name(dims, where, dtype="bf16"):
        return names.name_of(SimpleNamespace(shape=Shape(dtype, dims), where=where, writers=[SimpleNamespace(where=where)]))

    assert name((3, rows, inside), forward) == "kept for backward: gate, up"
    for side_by_side in (experts * inside, experts * 128):
        assert name((128, side_by_side), forward) == "gathered weights"
        assert name((sizes["fsdp"], 128 // sizes["fsdp"], side_by_side), forward) == "gathered weights"
        assert name((128, side_by_side), backward) == "gradients"
    assert name((3, 128 // sizes["fsdp"], experts, inside), "step/convert") == "weights as matmuls read them"
    assert name((rows, inside), backward) == name((rows, 128), backward) == "feed-forward"
    assert name((tokens, 32), backward, "f32") == "routing"
