"""Generated ids are those of the model without a cache, whatever else is in the batch and whatever the mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlm.config import UserError
from maxlm.config.schema import Config, ModelConfig, PrecisionConfig
from maxlm.inference import decoding
from maxlm.inference.generate import Sampler, bucket, cache_slots, continue_ids, generate, prepare, prompt_slots
from maxlm.models import bind, init_model_state, init_parameters, model_state_specs, parameter_specs
from maxlm.parallel import build_mesh

VOCAB, END = 64, 0
BASE = {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 48, "init_std": 0.3}
_LONG = {"kind": "longrope", "factor": 4, "short_factor": (1.0, 1.5), "long_factor": (1.0, 4.0)}
MODELS = {
    "gemma3": {
        "layer_pattern": ("local", "global"),
        "window": 5,
        "norm_position": "sandwich",
        "softcap": {"attention": 5.0, "logits": 9.0},
        "tie_embeddings": True,
    },
    "gpt2": {"learned_positions": {"max_seq_len": 96}, "bias": "all", "norm": "layernorm", "activation": "gelu"},
    "phi, in one batch sequences below and beyond the original length": {
        "rope": {"share": 0.5, "scaling": {**_LONG, "original_seq_len": 16}},
        "multipliers": {"embedding": 3.0, "residual": 0.7, "logits_divisor": 2.0},
        "activation": "geglu_exact",
        "bias": "attention",
    },
    "deepseek": {
        "n_kv_heads": 4,
        "latent": {"q_rank": 12, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6},
        "moe": {"n_experts": 4, "top_k": 2, "d_ff": 24, "n_dense": 1, "n_shared": 1, "router": {"capacity": 0.5}},
    },
}
PROMPTS = [[5], [7, 3, 9, 11, 13], [21] * 17, [2, 4, 6]]
GREEDY = Sampler(max_new_tokens=12, temperature=0)
DRAWN = Sampler(max_new_tokens=12, temperature=1.2, top_k=40, top_p=0.95, seed=3)


@functools.cache
def case(name):
    config = ModelConfig(**{**BASE, **MODELS[name]})
    return config, *jax.jit(lambda: (init_parameters(config, 0), init_model_state(config, 0)))()


def run(name, prompts=PROMPTS, sampler=GREEDY, **options):
    return generate(*case(name), prompts, sampler, VOCAB + 1 if sampler is GREEDY else END, **options)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.soak] if name == "deepseek" else []) for name in MODELS])
def greedy(request):
    return request.param, run(request.param)


def test_greedy_ids_are_those_of_one_pass_without_a_cache(greedy):
    """Every token is the most likely one after all before it, by the model on that text alone."""
    name, found = greedy
    config, params, state = case(name)
    rows = [prompt + ids for prompt, ids in zip(PROMPTS, found, strict=True)]
    tokens = np.array([row + [0] * (32 - len(row)) for row in rows], np.int32)
    segments = np.array([[1] * len(row) + [0] * (32 - len(row)) for row in rows], np.int32)

    @jax.jit
    def scores(params):
        model = bind(config.dropless, params, state)
        positions = jnp.broadcast_to(jnp.arange(32), tokens.shape)
        return jnp.einsum("BSD,VD->BSV", model(tokens, positions, segments).x_BSD, model.unembedding_VD)

    best = np.argmax(scores(params), axis=-1)
    for row, prompt, ids in zip(best, PROMPTS, found, strict=True):
        assert len(ids) == 12
        np.testing.assert_array_equal(row[len(prompt) - 1 :][:12], ids)
    assert len({tuple(ids) for ids in found}) == len(found), "the model tells prompts apart"


def test_a_prompt_alone_gives_the_ids_that_it_gives_in_a_batch():
    together = run("gemma3", sampler=DRAWN)
    for i in (1, 3):
        assert run("gemma3", PROMPTS[i : i + 1], DRAWN) == together[i : i + 1]


def test_order_and_repeats():
    """A draw depends on the seed, the prompt and how many equal prompts come before."""
    together = run("gemma3", sampler=DRAWN)
    assert run("gemma3", PROMPTS[::-1], DRAWN) == together[::-1]
    twice = run("gemma3", [PROMPTS[1], PROMPTS[1], PROMPTS[0], PROMPTS[0]], DRAWN)
    assert twice[0] == together[1] and twice[2] == together[0]
    assert twice[1] != twice[0] and twice[3] != twice[2]
    other = Sampler(**{**vars(DRAWN), "seed": 4})
    assert run("gemma3", sampler=other) != together


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gemma3", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("gpt2", {"context": 2, "stage": 2}, marks=pytest.mark.soak),
        pytest.param("deepseek", {"expert": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_the_mesh_changes_no_id(name, mesh, monkeypatch):
    """And what the host reads is whole on every device: another process could not read it otherwise."""
    whole_on_devices = []
    for program in ("prefill", "decode", "grow"):

        def recorded(*arguments, run=getattr(decoding, program)):
            state = run(*arguments)
            whole_on_devices.extend(array.is_fully_replicated for array in (state.tokens_BT, state.done_B, state.slot))
            return state

        monkeypatch.setattr(decoding, program, recorded)
    wanted = run(name, sampler=DRAWN)
    config, params, state = case(name)
    whole = Config(model=config, data={"store": "unused", "seq_len": 32}, train={"steps": 1, "global_batch": 8}, mesh={"fsdp": 1, **mesh})
    devices = build_mesh(whole, jax.devices()[: int(np.prod(list(mesh.values())))])
    with jax.set_mesh(devices):
        split = [
            jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.sharding.NamedSharding(devices, spec)), tree, specs(config, devices))
            for tree, specs in ((params, parameter_specs), (state, model_state_specs))
        ]
        assert generate(config, *split, PROMPTS, DRAWN, END) == wanted
    assert whole_on_devices and all(whole_on_devices)


def test_caches_grow_and_all_lengths_agree():
    long = run("gpt2", [PROMPTS[1]], Sampler(max_new_tokens=90, temperature=0))
    assert len(long[0]) == 90
    for n in (1, 12, 50):
        assert run("gpt2", [PROMPTS[1]], Sampler(max_new_tokens=n, temperature=0))[0] == long[0][:n]


def test_a_stop_ends_a_continuation_after_its_token():
    whole = run("gemma3")
    wanted = whole[1][4]
    stopped = run("gemma3", finished=lambda ids: wanted in ids)
    for ids, all_ids in zip(stopped, whole, strict=True):
        cut = all_ids.index(wanted) + 1 if wanted in all_ids else len(all_ids)
        assert ids == all_ids[:cut]
    end = whole[1][4]
    ended = generate(*case("gemma3"), PROMPTS, GREEDY, end)
    assert ended == [ids[: ids.index(end)] if end in ids else ids for ids in whole]


def test_bfloat16_runs_in_bfloat16():
    found = run("gpt2", dtype="bfloat16")
    assert [len(ids) for ids in found] == [12] * 4 and all(0 <= token < VOCAB for ids in found for token in ids)


def test_few_programs_for_many_lengths():
    assert [bucket(n, 16) for n in (1, 16, 17, 25, 33, 49, 65)] == [16, 16, 24, 32, 48, 64, 96]
    assert [bucket(n, 1) for n in (1, 2, 3, 4, 5, 7, 9)] == [1, 2, 3, 4, 6, 8, 12]
    run("gpt2", [[1] * 3])
    before = decoding.decode._cache_size(), decoding.prefill._cache_size()
    for length in (1, 7, 15):
        run("gpt2", [[1] * length], Sampler(max_new_tokens=length, temperature=0))
    assert (decoding.decode._cache_size(), decoding.prefill._cache_size()) == before


def test_long_prompts_fill_whole_blocks_of_queries():
    """Attention reads others as one block, however long."""
    assert [prompt_slots(n) for n in (900, 1024, 1025, 1537, 2049)] == [1024, 1024, 2048, 2048, 3072]
    assert cache_slots(40, 16) == (48, 0, 64)
    assert cache_slots(40, 60) == (48, 96, 128)


def test_matmuls_have_the_precision_that_is_asked_for(monkeypatch):
    class TracedError(Exception): ...

    real, lowered = decoding.prefill, []

    def prefill(*arguments):
        lowered.append(real.lower(*arguments).as_text())
        raise TracedError

    monkeypatch.setattr(decoding, "prefill", prefill)
    for matmul in ("default", "highest"):
        prepared = prepare(*case("gpt2"), PrecisionConfig(compute="float32", float32_matmul=matmul))
        with pytest.raises(TracedError):
            continue_ids(prepared, PROMPTS, GREEDY, END)
    assert "HIGHEST" not in lowered[0]
    assert lowered[1].count("HIGHEST") >= 2 * 6


@pytest.mark.parametrize(
    ("prompts", "sampler", "words"),
    [
        ([[1], []], GREEDY, "the prompt is empty"),
        ([[1], [VOCAB]], GREEDY, "token id 64"),
        ([[1]], Sampler(stop=("a",)), "stop texts"),
    ],
)
def test_bad_input_is_one_line(prompts, sampler, words):
    with pytest.raises(UserError, match=words):
        run("gemma3", prompts, sampler)


LONG = {**_LONG, "short_factor": (1,) * 4, "long_factor": (2,) * 4, "original_seq_len": 8}


@pytest.mark.parametrize(
    ("scaling", "prompt", "new", "most"),
    [(LONG, 8, 1, None), (LONG, 4, 6, 9), (LONG, 9, 20, None), ({"kind": "dynamic", "factor": 4, "original_seq_len": 8}, 10, 2, 11)],
)
def test_frequencies_that_would_change_under_cached_keys_are_refused(scaling, prompt, new, most):
    config = ModelConfig(**BASE, rope={"scaling": scaling})
    limit = config.most_generated(prompt)
    assert limit == most or (most is None and (limit is None or prompt + new <= limit))
    if most is not None:
        with pytest.raises(UserError, match=f"a prompt of {prompt} tokens and {new} new ones are above {most}"):
            generate(config, {}, {}, [[1] * prompt], Sampler(max_new_tokens=new), END)


def test_experts_that_choose_are_refused():
    config = ModelConfig(**{**BASE, "moe": {"n_experts": 4, "top_k": 2, "d_ff": 24, "router": {"choice": "expert"}}})
    with pytest.raises(UserError, match=r"router\.choice"):
        generate(config, {}, {}, [[1]], GREEDY, END)


def test_no_prompts_no_continuations():
    assert run("gemma3", []) == []
