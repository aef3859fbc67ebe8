"""The Hopper kernels: interpreted against the definition, and compiled for an H200 that is not there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_interpreter import interpreting
from test_attention import logsumexp_reference, normal, operands, reference, run

from maxlm.kernel_lab import hopper
from maxlm.kernels.attention import CAUSAL, Mask
from maxlm.kernels.attention.gpu import attention_hopper, why_not
from maxlm.kernels.attention.gpu_keys import DKV
from maxlm.kernels.attention.gpu_queries import DQ, FORWARD
from maxlm.kernels.attention.gpu_tiles import BLOCK, block_bounds, query_bounds
from maxlm.kernels.attention.reference import visible

# B batch, S sequence, H query heads, G key/value heads, K head dim


def rounded(*shape_seed, **shape):
    """Operands in bfloat16; documents that end inside a block, and padding."""
    q, k, v, _ = operands(*shape_seed, **{"B": 1, "H": 1, "G": 1, **shape})
    segments = np.sort(np.random.default_rng(1).integers(1, 4, (1, q.shape[1])), axis=1).astype(np.int32)
    segments[0, -40:] = 0
    return [x.astype(jnp.bfloat16) for x in (q, k, v)], segments


def values_and_gradients(attend, of_out, of_lse, operands):
    """(output, logsumexp, gradients of q, k and v) of a loss in which both take part; of_lse None: only the output."""

    def loss(*qkv):
        out, lse = attend(*qkv)
        total = jnp.sum(of_out * out.astype(jnp.float32))
        return total if of_lse is None else total + jnp.sum(jnp.where(jnp.isfinite(lse), of_lse * lse, 0.0)), (out, lse)

    (_, (out, lse)), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*operands)
    return out, lse, *gradients


def definition(segments, options, *qkv):
    return reference(*qkv, segments, **options), logsumexp_reference(*qkv[:2], segments, **options)


def hopper_interpreted(segments, options, *qkv):
    options = {"mask": CAUSAL, "softcap": None, "scale": 0.3, **options}
    return attention_hopper(*qkv, segments, **options, logsumexp=True, interpret=True)


def distance(x, y):
    return np.linalg.norm(np.asarray(x, np.float32) - np.asarray(y, np.float32)) / np.linalg.norm(np.asarray(y, np.float32))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param({"S": 384, "H": 2, "K": 64}, {}, marks=pytest.mark.soak),
        ({"S": 256, "H": 2, "G": 2, "K": 80}, {"mask": Mask(window=100), "softcap": 2.0}),
        pytest.param({"S": 384, "K": 128}, {"mask": Mask(window=150), "softcap": 2.0}, marks=pytest.mark.soak),
        pytest.param({"S": 256, "K": 256}, {"mask": Mask(window=100)}, marks=pytest.mark.soak),
    ],
)
def test_equals_the_definition(shape, options, monkeypatch):
    """Off by at most twice what plain bfloat16 operations are."""
    qkv, segments = rounded(3, **shape)
    of_out = normal(1, *qkv[0].shape)
    of_lse = normal(2, 1, qkv[0].shape[2], qkv[0].shape[1])
    exact = [x.astype(jnp.float32) for x in qkv]
    theirs = values_and_gradients(functools.partial(definition, segments, options), of_out, of_lse, exact)
    plain = values_and_gradients(lambda *x: (run(*x, segments, implementation="xla", **options), None), of_out, None, qkv)
    plain_exact = values_and_gradients(lambda *x: (definition(segments, options, *x)[0], None), of_out, None, exact)
    with interpreting(monkeypatch):
        ours = values_and_gradients(functools.partial(hopper_interpreted, segments, options), of_out, of_lse, qkv)
    for number in (0, 2, 3, 4):
        assert distance(ours[number], theirs[number]) < 2 * distance(plain[number], plain_exact[number])
    assert not np.any(np.asarray(ours[0], np.float32)[segments == 0]), "padding gives 0"
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)


@pytest.mark.soak
def test_changing_one_document_changes_no_bit_of_another(monkeypatch):
    (q, k, v), _ = rounded(4, S=256, K=64)
    segments = jnp.where(jnp.arange(256) < 100, 1, 2)[None]
    poison = jnp.where(segments == 1, 300.0, 0.0)[..., None, None].astype(jnp.bfloat16)

    def second(q, k, v):
        out = hopper_interpreted(segments, {}, q, k, v)[0]
        return jnp.sum(out[:, 100:].astype(jnp.float32) ** 2), out[:, 100:]

    both = jax.jit(jax.grad(second, argnums=(0, 1, 2), has_aux=True))
    with interpreting(monkeypatch):
        before, out_before = both(q, k, v)
        after, out_after = both(q + poison, k + poison, v + poison)
    np.testing.assert_array_equal(out_before.view(jnp.int16), out_after.view(jnp.int16))
    for mine, poisoned in zip(before, after, strict=True):
        np.testing.assert_array_equal(mine[:, 100:].view(jnp.int16), poisoned[:, 100:].view(jnp.int16))
        assert not np.any(mine[:, :100]), "a document's loss must not reach another document"
        assert np.any(mine[:, 100:])


@pytest.mark.parametrize("window", [None, 1, 70, 128, 300])
@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("documents", [(1, 2, 3, 7, 0), (2, 1, 0, 2, 7)])
def test_only_blocks_that_meet_are_visited_and_only_whole_ones_are_not_masked(keys, window, documents):
    """By what the definition says of every pair; documents in their order, and out of it."""
    length, block = 1024, BLOCK
    segments = np.repeat(documents, (300, 280, 20, 200, 224)).astype(np.int32)
    seen = visible(segments, segments, np.arange(length), np.arange(length), Mask(window=window))
    tiles = seen.reshape(length // block, block, length // keys, keys)
    some, every = tiles.any(axis=(1, 3)), tiles.all(axis=(1, 3))
    first, whole = np.asarray(block_bounds(jnp.asarray(segments)[None], keys, window))[:, 0]
    end, last_whole = np.asarray(query_bounds(jnp.asarray(segments)[None], keys, window))[:, 0]
    in_order = documents[0] == 1
    for i in range(length // block):
        diagonal = i * block // keys
        assert not some[i, : first[i]].any()
        assert every[i, whole[i] : diagonal].all()
        assert not in_order or first[i] == diagonal or some[i, first[i]], "no more than needed"
    for j in range(length // keys):
        diagonal = j * keys // block
        assert not some[end[j] :, j].any()
        assert every[diagonal + 1 : last_whole[j], j].all()
        assert not in_order or end[j] == diagonal + 1 or some[end[j] - 1, j]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ((4096, 128, jnp.bfloat16, "NVIDIA A100-SXM4-80GB"), "the device is no H100 or H200"),
        ((4096, 128, jnp.float32, "NVIDIA H200"), "operands are float32"),
        ((4096, 288, jnp.bfloat16, "NVIDIA H200"), "a head dim of 288 is above 256"),
        ((4000, 128, jnp.bfloat16, "NVIDIA H100 80GB HBM3"), "a sequence of 4000 is no multiple of 128"),
    ],
)
def test_says_why_it_cannot_run(case, named):
    assert named in why_not(*case)
    assert not why_not(4096, 128, jnp.bfloat16, "NVIDIA H200")


def test_is_refused_where_there_is_no_hopper():
    qkv, segments = rounded(S=256, K=64)
    with pytest.raises(ValueError, match="hopper cannot run this: the device is no GPU"):
        run(*qkv, segments, implementation="hopper")


@pytest.mark.skipif(bool(hopper.missing()), reason=hopper.missing())
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("llama1b-8k", marks=pytest.mark.soak),
        "llama-8k",
        pytest.param("gemma2-27b-8k", marks=pytest.mark.soak),
        pytest.param("gemma-local-8k", marks=pytest.mark.soak),
    ],
)
def test_machine_code_of_an_h200_is_that_of_a_fast_kernel(shape):
    """Head dims of 64, 128, also with a soft cap, and 256: nothing is spilled, and no wgmma waits for another for the compiler's sake."""
    kernels = hopper.kernels_of("attention", "hopper", shape)
    assert {kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in kernels} == {FORWARD, DQ, DKV}
    for kernel in kernels:
        assert kernel.target == "sm_90a"
        assert kernel.opcodes["HGMMA"] >= 16
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0
        assert not {"LDL", "STL", "HMMA"} & kernel.opcodes.keys()
        assert not {"UTMAREDG", "RED", "REDG", "ATOM", "ATOMG"} & kernel.opcodes.keys(), "nothing is added up in HBM, in whatever order"
        assert not any("serialized" in warning for warning in kernel.warnings)
