"""Attention against its definition, and the properties that training rests on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from maxlm.kernels import attention, attention_and_logsumexp
from maxlm.kernels.attention import (
    CAUSAL,
    Mask,
    chunk_attention,
    chunk_attention_gradients,
    chunks,
    merge,
    tpu,
    xla,
)
from maxlm.kernels.attention.reference import attention_reference, visible

# B batch, S sequence, H query heads, G key/value heads, K head dim


def normal(seed, *shape):
    """Drawn by numpy: a shape costs no compilation."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def operands(seed=0, B=2, S=24, H=4, G=2, K=8):
    q, k, v = normal(3 * seed, B, S, H, K), normal(3 * seed + 1, B, S, G, K), normal(3 * seed + 2, B, S, G, K)
    segments_BS = np.sort(np.random.default_rng(seed).integers(1, 4, (B, S)), axis=1).astype(np.int32)
    segments_BS[0, -3:] = 0  # padding
    return q, k, v, jnp.asarray(segments_BS)


def run(q, k, v, segments_BS, **options):
    options = {"scale": 0.3, **options}
    return attention(q, k, v, query_segments_BS=segments_BS, key_segments_BT=segments_BS, **options)


def reference(q, k, v, segments_BS, *, scale=0.3, mask=CAUSAL, softcap=None, prefix_BT=None):
    """Of every row and head by itself."""
    places, share = np.arange(q.shape[1]), q.shape[2] // k.shape[2]
    prefixes = [None] * len(q) if prefix_BT is None else np.asarray(prefix_BT)
    seen_BST = np.stack(
        [visible(row, row, places, places, mask, prefix_T) for row, prefix_T in zip(np.asarray(segments_BS), prefixes, strict=True)]
    )
    of_a_head = functools.partial(attention_reference, scale=scale, softcap=softcap)
    of_a_row = jax.vmap(of_a_head, in_axes=(1, 1, 1, None), out_axes=1)
    return jax.vmap(of_a_row)(q, jnp.repeat(k, share, axis=2), jnp.repeat(v, share, axis=2), seen_BST)


def total_and_gradients(total, *operands):
    """A total, what is given beside it, and the gradients of the first three operands: one program, traced once for the same `total`."""
    return _jitted(total)(*operands)


@functools.lru_cache(maxsize=8)
def _jitted(total):
    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))


LONGEST_WINDOW = int(jnp.iinfo(jnp.int32).max)
OPTIONS = [{}, {"mask": Mask(window=5)}, {"softcap": 2.0}, {"mask": Mask(window=1)}, {"mask": Mask(window=3), "softcap": 1.0, "scale": 1.5}]


@pytest.mark.parametrize(("options", "heads"), [*((options, (4, 2)) for options in OPTIONS), (OPTIONS[4], (4, 1))])
def test_values_and_gradients_equal_the_definition(options, heads):
    q, k, v, segments = operands(1, H=heads[0], G=heads[1])
    weights = normal(109, *q.shape)
    ours, theirs = (jax.vjp(lambda *qkv, attend=attend: attend(*qkv, segments, **options), q, k, v) for attend in (run, reference))
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-6)
    for mine, other in zip(ours[1](weights), theirs[1](weights), strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-6)


FORMS = [
    Mask("bidirectional"),
    Mask("bidirectional", window=3),
    Mask("bidirectional", documents=False),
    Mask("prefix"),
    Mask("prefix", window=4),
    Mask("prefix", documents=False),
    Mask("causal", window=5, documents=False),
]


def prefix_of(mask, lengths, S):
    """True at the first `lengths[b]` keys of row b, where the mask has a prefix."""
    return jnp.arange(S) < jnp.asarray(lengths)[:, None] if mask.form == "prefix" else None


@pytest.mark.parametrize(
    ("mask", "query_block"), [*((mask, 8) for mask in FORMS), *((mask, 1024) for mask in FORMS if mask.window)], ids=str
)
def test_the_portable_form_has_every_mask(mask, query_block, monkeypatch):
    """Output, logsumexp and every gradient equal the definition, with documents, padding, and a prefix of its own length in each row."""
    monkeypatch.setattr(xla, "QUERY_BLOCK", query_block)
    q, k, v, segments = operands(2)
    prefix_BT = prefix_of(mask, [13, 4], q.shape[1])
    weights = normal(109, *q.shape)

    options = {"mask": mask, "prefix_BT": prefix_BT}
    ours, theirs = (jax.vjp(lambda *qkv, attend=attend: attend(*qkv, segments, **options), q, k, v) for attend in (run, reference))
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-6)
    for mine, other in zip(ours[1](weights), theirs[1](weights), strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-6)


@pytest.mark.parametrize("form", ["bidirectional", "prefix"])
@pytest.mark.parametrize("implementation", ["flash", "splash", "hopper"])
def test_a_kernel_refuses_a_form_that_it_does_not_have(implementation, form):
    if (implementation, form) == ("splash", "bidirectional"):
        pytest.skip("splash has it")
    q, k, v, segments = operands(S=128)
    forms = "causal and bidirectional" if implementation == "splash" else "causal"
    prefix_BT = prefix_of(Mask(form), [3, 4], 128)
    with pytest.raises(ValueError, match=rf"{implementation} has {forms} masks only, not {form} ones \(implementation 'xla' can\)"):
        run(q, k, v, segments, mask=Mask(form), prefix_BT=prefix_BT, implementation=implementation)
    run(q, k, v, segments, mask=Mask(form), prefix_BT=prefix_BT)


def test_masks_that_say_nothing_are_refused():
    q, k, v, segments = operands()
    with pytest.raises(ValueError, match="form 'full' is unknown: use one of causal, bidirectional, prefix"):
        Mask("full")
    with pytest.raises(ValueError, match="a window of 0 hides every key"):
        Mask(window=0)
    with pytest.raises(ValueError, match="prefix mask and prefix_BT None: give both or none"):
        run(q, k, v, segments, mask=Mask("prefix"))


@pytest.mark.parametrize("window", [None, 1, 3, 99])
@pytest.mark.parametrize("form", ["causal", "bidirectional", "prefix"])
def test_attended_pairs_are_those_that_the_mask_leaves(form, window):
    mask, one, places = Mask(form, window), np.ones(7, int), np.arange(7)
    for prefix in (0, 1, 5, 7):
        assert mask.attended_pairs(7, prefix) == visible(one, one, places, places, mask, places < prefix).sum()


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        pytest.param("flash", {}, marks=pytest.mark.soak),
        pytest.param("flash", {"mask": Mask(window=128), "softcap": 2.0}, marks=pytest.mark.soak),
        pytest.param("flash", {"mask": Mask(window=300)}, marks=pytest.mark.soak),
        ("splash", {"mask": Mask(window=100), "softcap": 2.0}),
        pytest.param("splash", {"mask": Mask("bidirectional")}, marks=pytest.mark.soak),
        ("splash", {"mask": Mask("bidirectional", window=100, documents=False)}),
        pytest.param("flash", {"mask": Mask(documents=False)}, marks=pytest.mark.soak),
    ],
)
def test_kernels_equal_the_definition(implementation, options, monkeypatch):
    """Those of the TPU, interpreted: values and gradients, documents that end inside a block and skip some, a head dim below a lane."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    q, k, v, segments = operands(5, S=512, G=2, K=16)
    weights = normal(109, *q.shape)

    def total(chosen, *qkv):
        out = reference(*qkv, segments, **options) if chosen is None else run(*qkv, segments, implementation=chosen, **options)
        return jnp.sum(weights * out), out

    (_, ours), our_gradients = total_and_gradients(functools.partial(total, implementation), q, k, v)
    (_, theirs), their_gradients = total_and_gradients(functools.partial(total, None), q, k, v)
    for mine, other in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        np.testing.assert_allclose(mine, other, atol=3e-5)


@pytest.mark.parametrize(
    ("implementation", "form"),
    [("flash", "causal"), pytest.param("splash", "causal", marks=pytest.mark.soak), ("splash", "bidirectional"), ("xla", "bidirectional")],
)
def test_the_longest_window_hides_nothing(implementation, form, monkeypatch):
    """The window that models clamp to: a sum with it would wrap in int32, and kernels would visit no block."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(128, 128))
    q, k, v, segments = operands(7, B=1, S=256, H=2, G=1, K=16)
    weights = normal(109, *q.shape)

    documents = implementation != "flash"  # flash without: with documents it is compared elsewhere
    longest = functools.partial(run, implementation=implementation, mask=Mask(form, window=LONGEST_WINDOW, documents=documents))
    none = functools.partial(reference, mask=Mask(form, documents=documents))

    def total(attend, *qkv):
        out = attend(*qkv, segments)
        return jnp.sum(weights * out), out

    (_, ours), our_gradients = total_and_gradients(functools.partial(total, longest), q, k, v)
    (_, theirs), their_gradients = total_and_gradients(functools.partial(total, none), q, k, v)
    for mine, other in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("S", [640, pytest.param(768, marks=pytest.mark.soak)])
def test_splash_runs_blocks_that_512_does_not_divide(S):
    q, k, v, segments = operands(8, B=1, S=S, H=1, G=1, K=16)
    weights = normal(109, *q.shape)

    def total(implementation, *qkv):
        out = run(*qkv, segments, implementation=implementation)
        return jnp.sum(weights * out), out

    ours, theirs = (total_and_gradients(functools.partial(total, name), q, k, v) for name in ("splash", "xla"))
    for mine, other in zip((ours[0][1], *ours[1]), (theirs[0][1], *theirs[1]), strict=True):
        np.testing.assert_allclose(mine, other, atol=3e-5)


@pytest.mark.parametrize(
    ("implementation", "flipped"),
    [("flash", False), ("flash", True), ("splash", False), ("xla", False)],
    ids=["flash", "v6e", "splash", "xla"],
)
def test_values_may_be_narrower_than_keys(implementation, flipped, monkeypatch):
    """By whole lanes, and by less: latent attention has heads of 192 and of 128. v6e, with its matrix unit of 256, sums gradients head dim
    by tokens.
    """
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(128, 128))
    monkeypatch.setattr(tpu, "WIDE", ("",) if flipped else ())  # an interpreted device has no kind
    q, k, v, segments = operands(6, B=1, S=256, H=2, G=1, K=160)
    v, scale = v[..., :96], 0.05
    weights = normal(109, *q.shape[:3], 96)

    def total(chosen, *qkv):
        options = {"scale": scale, "mask": Mask(window=200)}
        out = reference(*qkv, segments, **options) if chosen is None else run(*qkv, segments, implementation=chosen, **options)
        return jnp.sum(weights * out), out

    (_, ours), our_gradients = total_and_gradients(functools.partial(total, implementation), q, k, v)
    (_, theirs), their_gradients = total_and_gradients(functools.partial(total, None), q, k, v)
    for mine, other in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        np.testing.assert_allclose(mine, other, atol=3e-5)
    if flipped:
        traced = []
        for wide in ((), ("",)):
            monkeypatch.setattr(tpu, "WIDE", wide)
            traced.append(str(jax.make_jaxpr(jax.grad(lambda *qkv: total("flash", *qkv)[0]))(q, k, v)))
        assert traced[0] != traced[1]


@pytest.mark.parametrize(
    ("heads", "groups", "flipped"),
    [
        pytest.param(4, 4, True, marks=pytest.mark.soak),
        (4, 4, False),
        pytest.param(4, 2, True, marks=pytest.mark.soak),
        pytest.param(6, 2, True, marks=pytest.mark.soak),
    ],
    ids=["own keys, v6e", "own keys", "the same keys, v6e", "three to a group, v6e"],
)
def test_heads_that_share_lanes_know_nothing_of_each_other(heads, groups, flipped, monkeypatch):
    """Two heads of 64 lie in 128 lanes: each is what the portable form says, and keeps every bit when queries of the one beside it change,
    also where the sums of those are lost and computed again.
    """
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    monkeypatch.setattr(tpu, "WIDE", ("",) if flipped else ())
    q, k, v, segments = operands(15, S=256, H=heads, G=groups, K=64)
    weights, changed = normal(109, *q.shape), jnp.arange(heads) == 1
    k = k.at[:, 3].multiply(30.0)

    def total(implementation, *qkv):
        out = run(*qkv, segments, implementation=implementation)
        return jnp.sum(weights * out), out

    ours, theirs = (functools.partial(total, implementation) for implementation in ("flash", "xla"))
    ((_, out), gradients), ((_, other_out), other_gradients) = (total_and_gradients(attend, q, k, v) for attend in (ours, theirs))
    for mine, other in zip((out, *gradients), (other_out, *other_gradients), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-3)  # of 185: scores are in the hundreds
    (_, after), (dq, _, _) = total_and_gradients(ours, jnp.where(changed[:, None], 9 * q[:, ::-1], q), k, v)
    for old, new in ((out, after), (gradients[0], dq)):
        np.testing.assert_array_equal(old[:, :, ~changed], new[:, :, ~changed])
        assert not np.allclose(old[:, :, 1], new[:, :, 1])


def logsumexp_reference(q, k, segments_BS, mask=CAUSAL, scale=0.3, softcap=None):
    """Logsumexp of the scores that the mask leaves, in nats [B, H, S]."""
    places, share = np.arange(q.shape[1]), q.shape[2] // k.shape[2]
    seen = np.stack([visible(row, row, places, places, mask) for row in np.asarray(segments_BS)])
    scores = scale * jnp.einsum("bshk,bthk->bhst", q, jnp.repeat(k, share, axis=2))
    capped = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    return jax.nn.logsumexp(capped, axis=-1, where=seen[:, None])


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        pytest.param("flash", {}, marks=pytest.mark.soak),
        pytest.param("flash", {"mask": Mask(window=100), "softcap": 2.0}, marks=pytest.mark.soak),  # parts of chunks have it, too
        ("xla", {}),
        ("xla", {"mask": Mask(window=100)}),
    ],
)
def test_output_logsumexp_and_gradients_equal_the_definition(implementation, options, monkeypatch):
    """With documents that end inside a block and skip some, and a head dim below a lane."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    monkeypatch.setattr(xla, "QUERY_BLOCK", 128)
    q, k, v, segments = operands(10, S=512, G=2, K=16)
    of_out, of_lse = normal(101, *q.shape), normal(102, 2, 4, 512)

    def ours(q, k, v):
        return attention_and_logsumexp(
            q, k, v, query_segments_BS=segments, key_segments_BT=segments, scale=0.3, implementation=implementation, **options
        )

    def loss(both, q, k, v):
        out, lse = both(q, k, v)
        return jnp.sum(of_out * out) + jnp.sum(jnp.where(jnp.isfinite(lse), of_lse * lse, 0.0)), (lse, out)

    def theirs(q, k, v):
        return reference(q, k, v, segments, **options), logsumexp_reference(q, k, segments, **options)

    found, exact = (total_and_gradients(functools.partial(loss, both), q, k, v) for both in (ours, theirs))
    (lse, out), (other_lse, other_out) = found[0][1], exact[0][1]
    np.testing.assert_allclose(lse, other_lse, atol=1e-5)
    for a, b in zip((out, *found[1]), (other_out, *exact[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


@pytest.mark.parametrize("implementation", ["flash", "xla"])
def test_a_sink_is_a_key_without_value(implementation):
    q, k, v, segments = operands(11, S=128, H=2, G=1, K=16)
    sinks = jnp.asarray([0.7, -3.0])

    def by_definition(sinks):
        out, lse = reference(q, k, v, segments), logsumexp_reference(q, k, segments)
        kept = jnp.exp(lse) / (jnp.exp(lse) + jnp.exp(sinks)[:, None])
        return out * jnp.swapaxes(kept, 1, 2)[..., None]

    def ours(sinks):
        return run(q, k, v, segments, sinks_H=sinks, implementation=implementation)

    def value_and_gradient(attend):
        def total(sinks):
            out = attend(sinks)
            return jnp.sum(out**2), out

        return jax.jit(jax.grad(total, has_aux=True))(sinks)

    (mine, out), (other, other_out) = map(value_and_gradient, (ours, by_definition))
    np.testing.assert_allclose(out, other_out, atol=1e-5)
    np.testing.assert_allclose(mine, other, rtol=1e-4)


def test_parts_that_saw_different_keys_add_up_by_logsumexp():
    """What ring attention relies on."""
    q, k, v, segments = operands(12)
    places = jnp.broadcast_to(jnp.arange(24), segments.shape)
    half = [
        attention_and_logsumexp(
            q, k[:, part], v[:, part], query_segments_BS=segments, key_segments_BT=segments[:, part],
            query_positions_BS=places, key_positions_BT=places[:, part], scale=0.3,
        )
        for part in (slice(0, 12), slice(12, 24))
    ]  # fmt: skip
    total = jnp.logaddexp(half[0][1], half[1][1])
    shares = [jnp.swapaxes(jnp.where(jnp.isfinite(lse), jnp.exp(lse - total), 0.0), 1, 2)[..., None] for _, lse in half]
    merged = sum(share * out for share, (out, _) in zip(shares, half, strict=True))
    np.testing.assert_allclose(jnp.where((segments != 0)[..., None, None], merged, 0), run(q, k, v, segments), atol=2e-6)


def test_splash_gives_no_logsumexp():
    q, k, v, segments = operands(S=128)
    with pytest.raises(ValueError, match="splash cannot run this: its logsumexp has no gradient"):
        run(q, k, v, segments, sinks_H=jnp.zeros(4), implementation="splash")
    with pytest.raises(ValueError, match=r"attention: sinks of shape \(3,\) for 4 query heads"):
        run(q, k, v, segments, sinks_H=jnp.zeros(3))


def test_bfloat16_is_as_exact_as_xla(monkeypatch):
    """Against the definition in float32: no implementation may be off by more than twice what plain bfloat16 operations are."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    q, k, v, segments = operands(13, B=1, S=512, H=2, G=1, K=64)
    weights = normal(103, *q.shape)
    rounded = [x.astype(jnp.bfloat16) for x in (q, k, v)]

    def errors(**options):
        def both(q, k, v):
            out = run(q, k, v, segments, scale=0.4, **options)
            return jnp.sum(weights * out), out

        (_, out), gradients = total_and_gradients(both, *rounded)
        return [jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y) for x, y in zip((out, *gradients), exact, strict=True)]

    def defined(q, k, v):
        out = reference(q, k, v, segments, scale=0.4)
        return jnp.sum(weights * out), out

    (_, out), gradients = total_and_gradients(defined, *(x.astype(jnp.float32) for x in rounded))
    exact = (out, *gradients)
    for ours, plain in zip(errors(implementation="flash"), errors(implementation="xla"), strict=True):
        assert ours < 2 * plain


def test_a_score_far_above_those_of_near_keys_is_no_overflow(monkeypatch):
    """The forward kernel sums weights against a near score; a query whose sum then is lost, and no other, is computed again."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    q, k, v, segments = operands(8, B=1, S=512, H=2, G=1, K=16)
    segments = jnp.where(jnp.arange(512) < 300, 1, 2)[None]
    attend = jax.jit(lambda k: run(q, k, v, segments, implementation="flash"))
    far = k.at[:, 3].multiply(300.0)  # scores of a few hundred: e to their power is beyond float32
    plain, loud = attend(k), attend(far)
    np.testing.assert_allclose(loud, reference(q, far, v, segments), atol=3e-5)
    np.testing.assert_array_equal(loud[:, 300:], plain[:, 300:], "another document shares blocks with it and keeps every bit")
    assert not np.allclose(loud[:, 256:300], plain[:, 256:300])


def test_flash_computes_only_blocks_where_queries_meet_keys(monkeypatch):
    """Poison what no query of the second document may read: were a block of it visited, NaN times 0 would show."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(128, 128))
    q, k, v, _ = operands(6, B=1, S=384)
    segments = jnp.asarray(np.repeat([[1, 2, 2]], 128, axis=1), jnp.int32)
    v = v.at[:, :128].set(jnp.nan)

    def second(q, k, v):
        return jnp.sum(run(q, k, v, segments, implementation="flash")[:, 128:] ** 2)

    value, gradients = jax.jit(jax.value_and_grad(second, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.all(np.isfinite(gradient[:, 128:]))


def test_blocks_are_those_of_the_nearest_head_dim_and_divide_the_sequence(monkeypatch):
    v6e = "TPU v6 lite"
    rows = {(v6e, False, 128): (1024, 512), (v6e, False, 256): (512, 256), (v6e, True, 128): (256, 256), ("TPU v5", False, 128): (256, 128)}
    monkeypatch.setattr(tpu, "table", lambda: {key: tpu.Blocks(*sizes) for key, sizes in rows.items()})
    assert tpu.blocks_of(8192, 64, None, v6e) == (1024, 512), "a head dim below a lane is padded"
    assert tpu.blocks_of(8192, 192, None, v6e) == tpu.blocks_of(8192, 512, None, v6e) == (512, 256)
    assert tpu.blocks_of(8192, 256, 1024, v6e) == (256, 256)
    assert tpu.blocks_of(384 * 5, 128, None, v6e) == (640, 384), "the largest that divide it"
    assert tpu.blocks_of(8192, 128, None, "TPU v9") == tpu.blocks_of(8192, 128, 1024, "TPU v5") == tpu.DEFAULT


def test_smaller_blocks_run_where_those_of_the_table_have_no_room(monkeypatch):
    """A sequence that fits into VMEM with blocks that are small is not left to another kernel."""
    rows = {("TPU v6 lite", False, 128): tpu.Blocks(1024, 2048)}
    monkeypatch.setattr(tpu, "table", lambda: rows)
    for seq_len, backward in ((4096, 2048), (16384, 512)):
        assert tpu.sizes_of(seq_len, 128, None, "TPU v6 lite") == (1024, backward)
        assert tpu.why_not(seq_len, 128, "TPU v6 lite") == ""


def test_every_row_of_the_table_can_run():
    for (kind, windowed, head_dim), sizes in tpu.table().items():
        assert tpu.sizes_of(4096, head_dim, 1024 if windowed else None, kind) == sizes
        assert tpu.why_not(4096, head_dim, kind) == ""


def test_float32_takes_twice_the_room_of_what_is_stored():
    """Of 16,384 tokens on v6e, whose bfloat16 fits: the compiler runs out of VMEM."""
    assert tpu.why_not(16384, 128, "TPU v6 lite", 2) == ""
    assert "of VMEM are needed" in tpu.why_not(16384, 128, "TPU v6 lite", 4)
    q, segments = jax.ShapeDtypeStruct((1, 16384, 1, 128), jnp.float32), jnp.ones((1, 16384), int)
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="TPU v6 lite", num_cores=None, platform="tpu"))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=r"flash cannot run this: .* MiB of VMEM are needed"):
        jax.eval_shape(lambda q: run(q, q, q, segments, implementation="flash"), q)


@pytest.mark.parametrize("implementation", ["flash", "splash"])
def test_kernels_refuse_what_they_cannot_run(implementation):
    q, k, v, segments = operands(S=24)
    with pytest.raises(ValueError, match=f"{implementation} cannot run this: a sequence of 24 is no multiple of 128"):
        run(q, k, v, segments, implementation=implementation)


def test_an_unknown_implementation_is_refused():
    q, k, v, segments = operands()
    with pytest.raises(ValueError, match="no implementation 'triton': there are flash, splash, hopper, xla"):
        run(q, k, v, segments, implementation="triton")


def test_blocks_of_queries_change_nothing(monkeypatch):
    q, k, v, segments = operands(2)
    whole = run(q, k, v, segments, mask=Mask(window=7))
    gradient = jax.grad(lambda q: jnp.sum(run(q, k, v, segments, mask=Mask(window=7)) ** 2))
    whole_gradient = gradient(q)
    monkeypatch.setattr(xla, "QUERY_BLOCK", 8)
    np.testing.assert_allclose(run(q, k, v, segments, mask=Mask(window=7)), whole, atol=1e-6)
    np.testing.assert_allclose(gradient(q), whole_gradient, atol=1e-5)


@pytest.mark.parametrize("implementation", ["flash", "splash", "xla"])
def test_changing_one_document_changes_no_bit_of_another(implementation, monkeypatch):
    """Of outputs nor gradients: documents of one token and of many, that end inside a block, and padding between."""
    monkeypatch.setattr(tpu, "DEFAULT", tpu.Blocks(256, 128))
    q, k, v, _ = operands(3, B=1, S=256, K=16)
    segments = jnp.asarray(np.repeat([[1, 2, 3, 0, 4]], [90, 1, 69, 20, 76], axis=1), jnp.int32)
    changed = (segments == 3)[..., None, None]
    weights = normal(102, *q.shape)

    @jax.jit
    def everything(*operands):
        out, transposed = jax.vjp(lambda *qkv: run(*qkv, segments, implementation=implementation), *operands[:3])
        return out, *transposed(operands[3])

    before = everything(q, k, v, weights)
    after = everything(*(jnp.where(changed, 100 * x[:, ::-1], x) for x in (q, k, v, weights)))
    for x, y in zip(before, after, strict=True):
        kept = np.asarray(segments[0] != 3)
        np.testing.assert_array_equal(x[:, kept], y[:, kept])
        assert not np.array_equal(x[:, ~kept], y[:, ~kept])


def test_padding_gives_zero():
    q, k, v, segments = operands(4)
    out = run(q, k, v, segments)
    assert not np.any(np.asarray(out)[np.asarray(segments) == 0])


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        (((2, 8, 3, 4), (2, 8, 2, 4), (2, 8, 2, 4), (2, 8)), "3 query heads"),
        (((2, 8, 4, 4), (2, 8, 2, 4), (2, 8, 2, 8), (2, 8)), "v (2, 8, 2, 8)"),
        (((2, 8, 4, 4), (2, 8, 2, 4), (2, 8, 2, 4), (2, 7)), "segment ids"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, named):
    q, k, v = (jnp.zeros(shape) for shape in shapes[:3])
    with pytest.raises(ValueError, match="attention: ") as error:
        run(q, k, v, jnp.ones(shapes[3], jnp.int32))
    assert named in str(error.value)


# Parts: the keys of a chunk, `offset` tokens before the queries.


def chunk(x, at, L):
    return jnp.swapaxes(x[:, at * L : (at + 1) * L], 1, 2)


STATIC = ("offset", "scale", "mask", "softcap", "implementation")
part_of, part_gradients = (jax.jit(function, static_argnames=STATIC) for function in (chunk_attention, chunk_attention_gradients))


def in_chunks(q, k, v, segments, L, dout, dlse, **options):
    """((output, logsumexp), gradients of q, k and v) of sequences from parts: every chunk of queries with every one of keys before."""
    n, wholes, gradients = q.shape[1] // L, [], [jnp.zeros_like(x) for x in (q, k, v)]

    def pair(i, j):
        own = (slice(None), slice(i * L, (i + 1) * L)), (slice(None), slice(j * L, (j + 1) * L))
        return (chunk(q, i, L), chunk(k, j, L), chunk(v, j, L), segments[own[0]], segments[own[1]]), {"offset": (i - j) * L, **options}

    for i in range(n):
        asked = [pair(i, j) for j in range(i + 1)]
        wholes.append(merge([part_of(*operands, **kwargs) for operands, kwargs in asked]))
        for j, (operands, kwargs) in enumerate(asked):
            rows = slice(i * L, (i + 1) * L)
            found = part_gradients(*operands, wholes[i], dout[:, rows], dlse[:, :, rows], **kwargs)
            for at, (which, x) in zip((i, j, j), enumerate(found), strict=True):
                gradients[which] = gradients[which].at[:, at * L : (at + 1) * L].add(jnp.swapaxes(x, 1, 2))
    whole = jnp.concatenate([out for out, _ in wholes], axis=1), jnp.concatenate([lse for _, lse in wholes], axis=2)
    return whole, gradients


@pytest.mark.parametrize(
    ("implementation", "options", "pieces", "K"),
    [
        pytest.param("flash", {}, 1, 16, marks=pytest.mark.soak),
        ("flash", {"mask": Mask(window=200), "softcap": 2.0}, 1, 16),
        pytest.param("flash", {"mask": Mask(window=LONGEST_WINDOW)}, 1, 64, marks=pytest.mark.soak),
        ("xla", {"mask": Mask(window=100)}, 1, 16),
        ("xla", {}, 2, 16),
        pytest.param("xla", {"mask": Mask(window=70)}, 4, 16, marks=pytest.mark.soak),
    ],
)
def test_parts_of_chunks_add_up_to_the_whole(implementation, options, pieces, K, monkeypatch):
    """Outputs and logsumexp, and gradients under the cotangents of both: documents and padding that cross chunks, and chunks in pieces."""
    monkeypatch.setattr(chunks, "_cut", lambda *_: [slice(start, start + 256 // pieces) for start in range(0, 256, 256 // pieces)])
    monkeypatch.setattr(tpu, "sizes_of", lambda *_: tpu.Blocks(128, 128))
    monkeypatch.setattr(xla, "QUERY_BLOCK", 128)
    q, k, v, _ = operands(14, B=2, S=512, H=2, G=1, K=K)
    segments = jnp.asarray([[1] * 512, [1] * 100 + [2] * 300 + [0] * 112], jnp.int32)
    dout, dlse = normal(101, *q.shape), normal(102, 2, 2, 512)
    dlse = jnp.where((segments != 0)[:, None], dlse, 0.0)

    def total(q, k, v):
        lse = attention_and_logsumexp(q, k, v, query_segments_BS=segments, key_segments_BT=segments, scale=0.3, **options)[1]
        out = reference(q, k, v, segments, **options)
        return jnp.sum(dout * out) + jnp.sum(jnp.where(jnp.isfinite(lse), dlse * lse, 0.0)), (out, lse)

    asked = {**options, "scale": 0.3, "implementation": implementation}
    (_, whole), gradients = total_and_gradients(total, q, k, v)
    part_of.clear_cache(), part_gradients.clear_cache()  # traced with other blocks
    found, found_gradients = in_chunks(q, k, v, segments, 256, dout, dlse, **asked)
    for mine, other in zip(found, whole, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)
    for mine, other in zip(found_gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=5e-5)
