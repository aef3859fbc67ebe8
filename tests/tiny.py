"""The tiny experiment that many tests share, so that its programs are compiled once."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config import rules
from maxlm.config.schema import Config, ModelConfig
from maxlm.config.table import config_class
from maxlm.data.batch import Batch
from maxlm.models import Parameters, abstract_parameters, init_model_state, init_parameters
from maxlm.parallel import build_mesh
from maxlm.training.program import Program, build_program
from maxlm.training.step import TrainState

SEQ_LEN, GLOBAL_BATCH, VOCAB = 32, 16, 128
_weights: dict[str, tuple[Parameters, Parameters]] = {}  # parameters and model states on the host
_drawn: dict[str, TrainState] = {}  # first states on the host


def tiny_config(**sections) -> Config:
    """A 2-layer model in float32 on one device; `sections` change it, e.g. mesh={"fsdp": 8}."""
    defaults = {
        "model": {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "d_ff": 128},
        "data": {"store": "unused", "seq_len": SEQ_LEN},
        "train": {"steps": 10, "global_batch": GLOBAL_BATCH, "loss_chunks": 2, "z_loss": 1e-3},
        "optimizer": {"peak_lr": 1e-2, "warmup_steps": 2},
        "mesh": {},
        "memory": {"remat": "full"},
        "precision": {"compute": "float32"},
    }
    config = config_class()(**{name: {**defaults.get(name, {}), **sections.get(name, {})} for name in {**defaults, **sections}})
    rules.check(config)
    return config


def tiny_program(devices: int, **sections) -> Program:
    config = tiny_config(**sections)
    return build_program(config, build_mesh(config, jax.devices()[:devices]))


def tiny_batch(seed: int = 0) -> Batch:
    """Two documents a row, the target between them silent; one row half padding, so rows count for different numbers of tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1)).astype(np.int32)
    cut = rng.integers(4, SEQ_LEN - 4, GLOBAL_BATCH)
    places = np.arange(SEQ_LEN, dtype=np.int32)[None].repeat(GLOBAL_BATCH, 0)
    second = places >= cut[:, None]
    segments = np.where(second, 2, 1).astype(np.int32)
    positions = np.where(second, places - cut[:, None], places).astype(np.int32)
    weights = (places != cut[:, None] - 1).astype(np.float32)
    for array in (weights, segments, positions):
        array[3, SEQ_LEN // 2 :] = 0
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, segments, positions)


def first_state(program: Program) -> TrainState:
    """`program.init()`, drawn once a model for all meshes and settings: its compilation takes a third of the time of a small program.

    That a mesh draws what one device does is what tests with `Program.init` show: `test_layouts`, and the soak of `test_matrix`.
    """
    if not program.placement.on_device:
        return _from_weights(program)
    config = program.config
    leaves, structure = jax.tree.flatten(program.abstract_state)
    settings = (config.model, config.optimizer, config.precision, config.diloco, config.ema, config.compression, config.train.seed)
    key = repr((settings, structure, [(leaf.shape, leaf.dtype) for leaf in leaves]))
    if key not in _drawn:
        _drawn[key] = jax.device_get(_from_weights(program))
    return jax.device_put(jax.tree.map(np.array, _drawn[key]), program.state_shardings)  # a copy: a step overwrites its state


def _from_weights(program: Program) -> TrainState:
    model, seed, shardings = program.config.model, program.config.train.seed, program.state_shardings
    key = repr((model, seed))
    if key not in _weights:
        _weights[key] = jax.device_get(jax.jit(lambda: (init_parameters(model, seed), init_model_state(model, seed)))())
    copied = jax.tree.map(np.array, _weights[key])  # a copy: it is donated
    return program.begin_with(*jax.device_put(copied, (shardings.params, shardings.model_state)))


def copy_of(state: TrainState) -> TrainState:
    """A copy on the same devices, which a step may overwrite; `jnp.copy` is compiled for every shape."""
    return jax.device_put(jax.tree.map(np.array, jax.device_get(state)), jax.tree.map(lambda leaf: leaf.sharding, state))


def drawn_parameters(config: ModelConfig) -> Parameters:
    """Random parameters, about as large as at first: `init_parameters` must be compiled, one by one or together."""
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal("scale" in jax.tree_util.keystr(path), 0.05, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract_parameters(config))


def drawn_on(program: Program) -> Parameters:
    """`drawn_parameters` as a program holds them."""
    return jax.device_put(drawn_parameters(program.config.model), program.state_shardings.params)


def states_of_steps(program: Program, steps: int) -> tuple[list[TrainState], TrainState]:
    """(States from the first on, after each of so many steps, as numpy; the last one on its devices)."""
    state = first_state(program)
    states = [jax.device_get(state)]
    with jax.set_mesh(program.mesh):
        for number in range(steps):
            state, _ = program.step(state, jax.device_put(tiny_batch(number), program.batch_sharding))
            states.append(jax.device_get(state))
    return states, state


def gradients_of(program: Program):
    """(parameters, model state, batch) -> (figures of the batch, gradient of its mean loss)."""
    return lambda params, model_state, batch: program.gradients(params, model_state, batch, program.objective.denominator(batch))


def sums_and_gradients(program: Program):
    """(figures of a batch, gradient of its mean loss) with `drawn_parameters`, as numpy; of models without state."""
    with jax.set_mesh(program.mesh):
        run = jax.jit(gradients_of(program), out_shardings=(None, program.state_shardings.params))
        return jax.device_get(run(drawn_on(program), {}, jax.device_put(tiny_batch(), program.batch_sharding)))


def run_steps(program: Program, steps: int, batches=tiny_batch, first: Callable[[Program], TrainState] = first_state):
    """(final state, [metrics of each step as numpy])."""
    state, seen = first(program), []
    with jax.set_mesh(program.mesh):
        for n in range(steps):
            state, metrics = program.step(state, jax.device_put(batches(n), program.batch_sharding))
            seen.append(jax.device_get(metrics))
    return state, seen


def steps_of(program: Program, steps: int, first: Callable[[Program], TrainState] = first_state):
    """([(metrics, Adam's first moment: every gradient so far) of each step], (parameters, model state) at the end), all as numpy."""
    state, seen = first(program), []
    with jax.set_mesh(program.mesh):
        for n in range(steps):
            state, metrics = program.step(state, jax.device_put(tiny_batch(n), program.batch_sharding))
            seen.append(jax.device_get((metrics, state.opt_state[0].mu)))
    return seen, jax.device_get((state.params, state.model_state))


def steps_on(mesh: dict[str, int], steps: int, **sections):
    """`steps_of` the tiny program on a mesh, from the first state that is drawn there."""
    return steps_of(tiny_program(math.prod(mesh.values()), mesh={"fsdp": 1, **mesh}, **sections), steps, Program.init)
