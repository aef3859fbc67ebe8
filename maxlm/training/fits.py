"""Check that a run fits in memory: by a lower bound before anything is built, and by the compiler's figures before the first step. Running
out of memory later is reported in one line.
"""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.base.host import host_memory, in_bytes
from maxlm.base.transient import is_out_of_memory
from maxlm.config import UserError
from maxlm.config.capability import FLOAT32, State
from maxlm.config.fields import Section
from maxlm.config.layer_parts import layer_parts, mixer_class
from maxlm.config.schema import Config, ModelConfig, TrainConfig
from maxlm.config.sections.mesh import BATCH_AXES
from maxlm.config.sections.optimizer_state import OptimizerStateConfig
from maxlm.config.table import build, state
from maxlm.hardware.chips import MOST_VMEM_BYTES, chip_of
from maxlm.kernels.attention.xla import QUERY_BLOCK
from maxlm.memory.spaces import peak_on_device
from maxlm.models import count_parameters
from maxlm.models.counts import count_matrices
from maxlm.objectives import ArraySpec, build_objective

INT32 = 4  # bytes
THREADS = 2**15  # of one process: Linux refuses more with its default settings

_log = logging.getLogger(__name__)


class TooLargeError(UserError):
    """A run does not fit in memory."""


@dataclass(frozen=True)
class Part:
    """A use of a device's memory: its bytes, at least, and how to make it smaller."""

    name: str
    bytes: int
    remedy: str | Callable[[], str]  # called only for a message: to find one may take long


class Slots(NamedTuple):
    """Positions of a sequence that generation has room for: of the prompts, and of the caches in the end and before they last grew, 0 if
    they never do.
    """

    prompt: int
    before: int
    last: int


def check(config: Config, sizes: dict[str, int], devices: Sequence[jax.Device], processes: int = 1) -> None:
    """Raise UserError if `config` cannot fit on a mesh of `sizes`, by a lower bound. Builds no array, however large the model.

    `processes`: of this run on this host, which share its memory where devices are CPUs.
    """
    threads = config.data.read_threads
    if threads > THREADS:
        raise UserError(f"data.read_threads = {threads}: a process cannot have so many threads; use 4 to 64.")
    parts, needs = least(config, sizes), build(config, "needs")
    limit = memory_of_a_device(devices[0], processes)
    if limit is not None:
        _compare("training", parts, limit, devices[0])
        for doing, parts in (need for one in needs for need in one.of_a_device(sizes)):
            _compare(doing, parts, limit, devices[0])
    host = host_memory()
    if host is not None:
        _compare("reading batches", _host_batch(config.train, config.data.seq_len, _batch_bytes(config)), host // processes, None)
        for doing, parts in (need for one in needs for need in one.of_a_host(_state(config, sizes), sizes)):
            _compare(doing, parts, host // processes, None)


def check_generation(
    model: ModelConfig,
    slots: Slots,
    rows: int = 1,
    sizes: Mapping[str, int] | None = None,
    dtype: str = "float32",
    held: Part | None = None,
) -> None:
    """Raise UserError if a device cannot hold its share of generation with `rows` sequences: what it holds already, a copy of the
    parameters in `dtype`, caches, and when they grow those before; or with a block of attention's scores, while prompts are read.

    `sizes`: of the mesh; none is one device. `held`: the parameters, if it is None.
    """
    device, number, split = jax.devices()[0], jnp.dtype(dtype).itemsize, sizes or {}
    limit = memory_of_a_device(device, 1)
    if limit is None:
        return
    numbers = count_parameters(model) // math.prod(split.get(axis, 1) for axis in ("fsdp", "expert", "stage", "tensor"))
    remedy = "use a device with more memory, or split them over more devices with mesh.fsdp"
    weights = held or Part("parameters", FLOAT32 * numbers, remedy), Part("a copy of the parameters by layers", number * numbers, remedy)
    before = cached(model, slots.before, rows, split, number) if slots.before else ()
    _compare("generating", (*weights, *cached(model, slots.last, rows, split, number), *before), limit, device)
    queries = min(slots.prompt, QUERY_BLOCK) // split.get("context", 1)
    share = -(-rows // math.prod(split.get(axis, 1) for axis in BATCH_AXES)) * -(-model.n_heads // split.get("tensor", 1))
    scores = Part("scores of attention", FLOAT32 * share * queries * slots.prompt, "shorten the prompts, or give fewer at a time")
    _compare("reading the prompts", (*weights, *cached(model, slots.prompt, rows, split, number), scores), limit, device)


def check_compiled(step: Any, device: jax.Device, processes: int = 1) -> None:
    """Raise UserError if the compiled `step` needs more memory than `device` has, by the compiler's own figures."""
    limit, memory = memory_of_a_device(device, processes), step.memory_analysis()
    if limit is None or memory is None:
        return
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporaries, peak = memory.temp_size_in_bytes, peak_on_device(memory)
    if memory.host_argument_size_in_bytes and peak:
        temporaries = min(temporaries, max(peak - arguments, 0))
    parts = (
        Part("the state and the batch", arguments, "split the state over more devices with mesh.fsdp, or make the model smaller"),
        Part("activations and gradients", temporaries, _FEWER_ACTIVATIONS),
    )
    _compare("a step as it is compiled", parts, limit, device)


def memory_of_a_device(device: jax.Device, processes: int) -> int | None:
    """Bytes that one device may hold; a CPU's share of the machine's memory. None if it is not known."""
    if device.platform == "cpu":
        host = host_memory()
        return None if host is None else host // (processes * jax.local_device_count())
    chip = chip_of(device.device_kind)
    stated = (device.memory_stats() or {}).get("bytes_limit")
    limit = stated or (None if chip is None else chip.hbm_bytes_per_device)
    return limit + MOST_VMEM_BYTES if limit is not None and device.platform == "tpu" else limit  # what XLA keeps in VMEM takes no HBM


_FEWER_ACTIVATIONS = "raise train.microbatches, or lower train.global_batch, data.seq_len or what memory.remat keeps"


def least(config: Config, sizes: dict[str, int]) -> tuple[Part, ...]:
    """Lower bound of what a device of a mesh of `sizes` holds during a step. In integers: no size is too large for it.

    State that stays on the device, without moments and gradients of what is frozen; either all gradients, or what the backward pass of a
    microbatch starts from, which is one tensor as wide as the model a layer and the logits of one part of the loss; a sum of gradients
    over microbatches comes on top of both. State is split evenly.
    """
    model, train = config.model, config.train
    number = FLOAT32 if config.precision.compute == "float32" else 2
    evenly = math.prod(sizes[axis] for axis in ("fsdp", "expert", "stage", "tensor"))
    biased = 0 if model.moe is None or not model.moe.router.bias_rate else model.moe.n_experts  # by routers, without moments or gradients
    numbers = (count_parameters(model) - biased * (model.n_layers - model.n_dense + model.mtp_depth)) // evenly
    updated = _state(config, sizes)
    tokens = config.tokens_per_step // math.prod(sizes[axis] for axis in ("data", "fsdp", "expert", "context"))
    rows, split = tokens // train.microbatches, sizes["tensor"] * sizes["stage"]
    kept = 0 if "layer_input" in config.memory.offload else number * rows * model.d_model * model.n_layers // split
    logits = number * rows // train.loss_chunks * model.vocab_size // split  # their exponentials
    gradient = updated.trained * (FLOAT32 if train.microbatches > 1 else number)
    smaller = functools.partial(_smaller_state, model)
    far_weights, far_gradients = map(sum, zip((0, 0), *(one.elsewhere(sizes) for one in build(config, "needs")), strict=True))
    of_matrices = updated.bytes_in(None, matrices=True) * count_matrices(model) // evenly
    held = Part("parameters and optimizer state", updated.bytes_in(None) * numbers + of_matrices - number * far_weights, smaller)
    activations = (
        Part("activations kept for the backward pass", kept, _FEWER_ACTIVATIONS),
        Part("logits of one part of the loss", logits, "raise train.loss_chunks or train.microbatches, or lower model.vocab_size"),
    )
    gradients = Part("gradients", gradient * (numbers - far_gradients), smaller)
    batch, ready = _batch_bytes(config) // math.prod(sizes.values()), min(config.data.prefetch, config.total_steps)
    batches = (
        Part("a batch", batch, f"lower {_longest(train, config.data.seq_len)}"),
        Part(f"{ready:,} batches ready", ready * batch, "lower data.prefetch"),
    )
    if train.microbatches > 1:
        return (held, gradients, *activations, *batches)
    either = (gradients,) if gradients.bytes > kept + logits else activations
    return (held, *either, *batches)


def _state(config: Config, sizes: dict[str, int]) -> State:
    """State of a number in a matrix, at least."""
    formats = config.optimizer.state or OptimizerStateConfig()
    return state(config, sizes, formats.moment_bytes(config.optimizer.facts))


def _batch_bytes(config: Config) -> int:
    """Bytes of all arrays of a global batch."""
    specs = jax.tree.leaves(build_objective(config).batch_spec(), is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    return sum(math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize for spec in specs)


def _host_batch(train: TrainConfig, seq_len: int, size: int) -> tuple[Part, ...]:
    """Host memory of a process while it makes a batch of `size` bytes: its rows, their windows, and the number of every row."""
    whole, rows = train.global_batch, -(-train.global_batch // jax.process_count())
    return (Part("a batch", size * rows // whole + INT32 * rows * seq_len + 8 * whole, f"lower {_longest(train, seq_len)}"),)


def cached(
    model: ModelConfig, length: int, rows: int = 1, sizes: Mapping[str, int] | None = None, number: int = FLOAT32
) -> tuple[Part, ...]:
    """A device's share of the keys and values of `rows` sequences of `length` positions, of `number` bytes each, in generation."""
    split = sizes or {}
    share, dims = -(-rows // math.prod(split.get(axis, 1) for axis in BATCH_AXES)), 0
    for depth in range(model.n_layers):
        heads, key_dim, value_dim = mixer_class(model, layer_parts(model, depth).mixer).cache_dims(model)
        dims += -(-heads // split.get("tensor", 1)) * (key_dim + value_dim)
    bytes_ = number * length * share * dims
    of = f"{length:,} positions" + (f" of {rows:,} sequences" if rows > 1 else "")
    return (Part(f"keys and values of {of}", bytes_, "ask for fewer tokens (samples.tokens, or --tokens), or for fewer prompts at a time"),)


def _longest(train: TrainConfig, seq_len: int) -> str:
    return f"train.global_batch = {train.global_batch}" if train.global_batch >= seq_len else f"data.seq_len = {seq_len}"


def _smaller_state(model: ModelConfig) -> str:
    return f"lower {_largest(model)}, or split the state over more devices with mesh.fsdp"


def _largest(model: ModelConfig) -> str:
    """The setting of the model that, set to 1, leaves the fewest parameters."""
    tried = {f"model.{field}": (size, model.model_copy(update={field: 1})) for field, size in _sizes(model)}
    for name, section in (("moe", model.moe), ("latent", model.latent)):
        for field, size in _sizes(section):
            assert section is not None, "a section that is absent has no sizes"
            tried[f"model.{name}.{field}"] = size, model.model_copy(update={name: section.model_copy(update={field: 1})})
    left = {field: count_parameters(smaller) for field, (_, smaller) in tried.items()}
    field = min(left, key=left.__getitem__)
    return f"{field} = {tried[field][0]}"


def _sizes(section: Section | None) -> Iterator[tuple[str, int]]:
    return ((field, value) for field, value in section or () if type(value) is int and value > 1)


def _compare(doing: str, parts: Sequence[Part], limit: int, device: jax.Device | None) -> None:
    """Raise UserError unless the sum of `parts` is within `limit`."""
    needed, most = sum(part.bytes for part in parts), max(parts, key=lambda part: part.bytes)
    if needed <= limit:
        return
    where = "this machine" if device is None or device.platform == "cpu" else f"a {device.device_kind}"
    if device is not None and device.platform == "cpu" and jax.local_device_count() > 1:
        where = f"each of this machine's {jax.local_device_count()} CPU devices"
    remedy = most.remedy if isinstance(most.remedy, str) else most.remedy()
    raise TooLargeError(
        f"{doing} needs at least {in_bytes(needed)} of memory, and {where} has {in_bytes(limit)}; "
        f"{in_bytes(most.bytes)} of it for {most.name}: {remedy}."
    )


_USED = re.compile(r"Used ([\d.]+\w?) of ([\d.]+\w?) (\w+)")  # a TPU's compiler
_ASKED = re.compile(r"allocat\w*\s+([\d.]+ ?[KMGTP]?i?(?:[Bb](?:ytes)?)?)\b")


@contextlib.contextmanager
def explain_out_of_memory(doing: str, remedy: str = _FEWER_ACTIVATIONS) -> Iterator[None]:
    """Turn running out of memory, of a device or of the host, into a UserError of one line; the traceback goes to the log."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error)
        if not is_out_of_memory(error):
            raise
        _log.info("out of memory while %s", doing, exc_info=error)
        used, asked = _USED.search(text), _ASKED.search(text)
        if used is not None:
            figures = f" (it needs {used[1]}B of {used[3]}, which has {used[2]}B)"
        else:
            figures = f" (it asked for {_readable(asked[1])} more)" if asked is not None else ""
        where = "this machine" if isinstance(error, MemoryError) or jax.default_backend() == "cpu" else f"a {jax.devices()[0].device_kind}"
        raise UserError(f"{where} ran out of memory while {doing}{figures}; {remedy}.") from None


def _readable(figure: str) -> str:
    return in_bytes(int(figure.removesuffix(" bytes"))) if figure.endswith(" bytes") else figure
