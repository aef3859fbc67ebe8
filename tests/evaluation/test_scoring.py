"""Scores are those that numpy computes from logits, on every layout; each token is scored once, with the context that it should have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from tiny import tiny_config

from maxlm.config import UserError
from maxlm.evaluation.requests import Request, Window, likelihood_window, pack, rolling_windows, row_length, rows_of
from maxlm.evaluation.scoring import Scorer
from maxlm.kernels.linear_cross_entropy import logits, token_scores
from maxlm.models import bind, init_model_state, init_parameters, parameter_specs
from maxlm.parallel import build_mesh

CONTEXT = 64
EXPERTS = {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"bias_rate": 0.01, "capacity": 1.0}}}
MODELS = {
    "dense": {"init_std": 0.2, "softcap": {"logits": 20.0}, "layer_pattern": ("local", "global"), "window": 16},
    "experts": {"init_std": 0.2, **EXPERTS},
}
LAYOUTS = {
    "one device": {"fsdp": 1},
    "fsdp x tensor": {"fsdp": 4, "tensor": 2},
    "data x context": {"data": 2, "fsdp": 1, "context": 4},
}


def drawn_windows() -> list[Window]:
    """Forty requests of several lengths, and a text of 200 tokens in rolling windows."""
    rng = np.random.default_rng(0)
    windows = []
    for index in range(40):
        context, continuation = (tuple(rng.integers(0, 128, rng.integers(1, most)).tolist()) for most in (50, 20))
        windows.append(likelihood_window(Request(context, continuation), CONTEXT, index)[0])
    return windows + rolling_windows((5,), tuple(rng.integers(0, 128, 200).tolist()), CONTEXT, 32, 40)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    """(model section, parameters and model state on the host, log-probabilities and argmax of all windows by numpy)."""
    config = tiny_config(model=MODELS[request.param])
    if config.model.moe is not None:  # no token is dropped
        config = tiny_config(model={**MODELS["experts"], "moe": {**EXPERTS["moe"], "router": {"bias_rate": 0.01}}})
    params, state = jax.device_get((init_parameters(config.model, 0), init_model_state(config.model, 0)))
    windows = drawn_windows()
    longest = max(window.inputs for window in windows)
    tokens = np.zeros((len(windows), longest), np.int32)
    for row, window in enumerate(windows):
        tokens[row, : window.inputs] = window.tokens[:-1]

    @jax.jit
    def all_logits(params, state, tokens):
        decoder = bind(config.model.dropless, params, state)
        places = jnp.broadcast_to(jnp.arange(longest, dtype=jnp.int32), tokens.shape)
        with jax.default_matmul_precision(config.precision.float32_matmul):
            output = decoder(tokens, places, jnp.ones_like(tokens))
            return logits(output.x_BSD, decoder.unembedding_VD, config.model.logits_softcap)

    return MODELS[request.param], params, state, np.asarray(all_logits(params, state, tokens), np.float64)


def expected(windows, logits_BSV):
    """Request -> (log-probabilities of its tokens, whether each is the most likely one), from logits in float64."""
    found: dict[int, list] = {}
    for window, logits_SV in zip(windows, logits_BSV, strict=True):
        rows = logits_SV[window.inputs - window.scored : window.inputs]
        targets = np.array(window.tokens[len(window.tokens) - window.scored :])
        logp = rows - rows.max(-1, keepdims=True)
        logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
        values, best = found.setdefault(window.request, [[], []])
        values.extend(logp[np.arange(len(targets)), targets])
        best.extend(rows.argmax(-1) == targets)
    return found


@pytest.mark.parametrize("layout", ["one device", "a mesh"])
def test_scores_are_those_of_numpy_on_every_layout(model, layout):
    """Dense layers with windows also on data x context, experts on fsdp x tensor."""
    section, params, state, logits_BSV = model
    layout = layout if layout in LAYOUTS else "fsdp x tensor" if "moe" in section else "data x context"
    mesh_sizes = LAYOUTS[layout]
    config = tiny_config(model=section, mesh=mesh_sizes)
    mesh = build_mesh(config, jax.devices()[: int(np.prod(list(mesh_sizes.values())))])
    shardings = jax.tree.map(
        lambda spec: jax.sharding.NamedSharding(mesh, spec),
        parameter_specs(config.model, mesh),
        is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec),
    )
    placed, state = jax.device_put(params, shardings), jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    windows = drawn_windows()
    seen = []
    scorer = Scorer(config, mesh, context=CONTEXT, batch_tokens=256)
    scores = dict(scorer.score(placed, state, windows, lambda done, total: seen.append((done, total))))
    wanted = expected(windows, logits_BSV)
    assert scores.keys() == wanted.keys()
    assert len(wanted[40][0]) == 200
    for index, (values, best) in wanted.items():
        assert scores[index].logprob == pytest.approx(sum(values), rel=1e-5)
        assert scores[index].greedy == all(best)
    assert seen[-1] == (len(windows), len(windows))
    assert len(seen) > 1


def test_a_greedy_continuation_is_seen(model):
    """The argmax of the logits is greedy, and is not once a token of it is another."""
    section, params, state, logits_BSV = model
    window = drawn_windows()[0]
    config = tiny_config(model=section, mesh={"fsdp": 1})
    scorer = Scorer(config, build_mesh(config, jax.devices()[:1]), context=CONTEXT)
    best = int(logits_BSV[0, window.inputs - 1].argmax())
    windows = [Window((*window.tokens[:-1], token), 1, index, 0) for index, token in enumerate([best, (best + 1) % 128])]
    scores = dict(scorer.score(params, state, windows))
    assert (scores[0].greedy, scores[1].greedy) == (True, False)


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 4), (8, 1), (64, 32)])
def test_rolling_windows_score_each_token_once_with_as_much_context_as_fits(length, stride):
    tokens = tuple(range(100, 129))
    windows = rolling_windows((7,), tokens, length, stride)
    scored = [token for window in windows for token in window.tokens[len(window.tokens) - window.scored :]]
    assert tuple(scored) == tokens
    assert [window.offset for window in windows] == np.cumsum([0, *[window.scored for window in windows[:-1]]]).tolist()
    assert all(window.inputs == min(length, window.offset + window.scored) for window in windows)
    for window in windows[1:]:
        assert window.inputs - window.scored + 1 >= length - stride + 1
    assert windows[0].tokens[0] == 7


def test_a_long_context_is_cut_on_the_left_and_counted():
    window, cut = likelihood_window(Request(tuple(range(20)), (50, 51)), 10)
    assert (window.tokens, window.scored, cut) == ((*range(11, 20), 50, 51), 2, 11)
    assert likelihood_window(Request((1,), (2, 3)), 10) == (Window((1, 2, 3), 2, 0, 0), 0)
    with pytest.raises(UserError, match="11 tokens, above the context of 10"):
        likelihood_window(Request((1,), tuple(range(11))), 10)


def test_rows_hold_every_window_once_apart_from_the_others():
    windows = drawn_windows()
    length = row_length(windows, CONTEXT, 8)
    rows = rows_of(windows, length)
    assert length == CONTEXT
    assert sorted(window for row in rows for window in row) == sorted(windows)
    used = sum(window.inputs for window in windows)
    assert len(rows) <= 1.2 * used / length
    packed = pack(rows, len(rows) + 1, length)
    for window, row, place in packed.places:
        segment = packed.segment_ids_BS[row, place.stop - 1]
        inside = packed.segment_ids_BS[row] == segment
        assert packed.tokens_BS[row][inside].tolist() == list(window.tokens[:-1])
        assert packed.positions_BS[row][inside].tolist() == list(range(window.inputs))
        assert packed.targets_BS[row, place].tolist() == list(window.tokens[len(window.tokens) - window.scored :])
    assert not packed.segment_ids_BS[-1].any()


def test_what_has_no_likelihood_is_refused():
    config = tiny_config(model={"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "router": {"choice": "expert", "capacity": 1.0}}})
    with pytest.raises(UserError, match="choice = expert"):
        Scorer(config, build_mesh(config, jax.devices()[:1]))
    config = tiny_config(mesh={"fsdp": 1, "context": 4})
    with pytest.raises(UserError, match=r"a context of 7 tokens.*multiple of 8"):
        Scorer(config, build_mesh(config, jax.devices()[:4]), context=7)


def test_all_logits_never_exist_together():
    """No array of the traced computation has as many numbers as all logits."""
    B, S, V = 4, 64, 512
    arrays = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in (((B, S, 8), jnp.float32), ((V, 8), jnp.float32), ((B, S), jnp.int32))]
    traced = jax.make_jaxpr(partial(token_scores, chunks=4))(*arrays)
    assert max(sizes_of(traced.jaxpr)) == B * S * V // 4


def sizes_of(jaxpr):
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from sizes_of(inner)
