"""Log-likelihoods of windows on any mesh, with the weights where they lie."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxlm.base.errors import UserError
from maxlm.config.schema import Config
from maxlm.evaluation.requests import Packed, Score, Window, pack, row_length, rows_of
from maxlm.hardware.xla_flags import options_of_device
from maxlm.kernels.linear_cross_entropy import Layout
from maxlm.models import Parameters, bind, cast_matrices
from maxlm.models.decoder import unembedding_layout, unembedding_scores
from maxlm.parallel import mesh_axes, partition_spec
from maxlm.parallel.context import in_sequence
from maxlm.training.gradients import cast_frozen

# B rows, S positions, V vocabulary

BATCH_TOKENS = 4096  # of one device, at least one row
LOGITS = 2**23  # float32 numbers that a device holds at a time; a chunk has one position of a row at least
IN_FLIGHT = 2  # batches dispatched before the first of them has finished

Progress = Callable[[int, int], None]  # (windows done, of so many)


class Scorer:
    """Scores windows with the model of `config` on `mesh`. A program is compiled for each length of rows."""

    def __init__(self, config: Config, mesh: Mesh, *, context: int | None = None, batch_tokens: int = BATCH_TOKENS) -> None:
        """`context`: tokens that a window may have, default `data.seq_len`, or the learned positions if they are fewer; rounded down to
        what the mesh splits. `batch_tokens`: of a device.

        Raises UserError for a router that reads the whole sequence, and a context that is too long or too short.
        """
        self.config = config.model_copy(update={"model": config.model.dropless})  # dropped choices depend on the other tokens of a row
        self.mesh, self._batch_tokens = mesh, batch_tokens
        model, most = config.model, config.model.max_seq_len
        if model.looks_ahead:
            raise UserError(f"{model.looks_ahead}: it reads the whole sequence, so that a token has no likelihood of its own.")
        if context is not None and most is not None and context > most:
            raise UserError(f"a context of {context:,} tokens is above model.learned_positions.max_seq_len = {most:,}: use at most that.")
        wanted = context or min(config.data.seq_len, most or config.data.seq_len)
        parts = math.prod(mesh.shape.get(axis, 1) for axis in ("context", "tensor", "stage"))
        self._unit = math.lcm(2 * mesh.shape.get("context", 1), parts)
        self.context = wanted // self._unit * self._unit
        if self.context == 0:
            raise UserError(f"a context of {wanted:,} tokens cannot be split over this mesh, which needs a multiple of {self._unit}.")
        self.shards = math.prod(mesh.shape[axis] for axis in mesh_axes("batch", mesh))

    def score(
        self, params: Parameters, model_state: Parameters, windows: Sequence[Window], progress: Progress = lambda done, total: None
    ) -> Iterator[tuple[int, Score]]:
        """Yield (index of the request, its score) as requests are finished, in any order; every process of the mesh takes the same part."""
        parts = _Parts(windows)
        length = row_length(windows, self.context, self._unit)
        rows = rows_of(windows, length)
        height = self.shards  # times a power of two, so that few shapes are compiled
        while 2 * height * length <= self._batch_tokens * self.shards and height < len(rows):
            height *= 2
        done, waiting = 0, deque[tuple[Packed, Any]]()
        for start in range(0, len(rows) + IN_FLIGHT * height, height):
            if start < len(rows):
                packed = pack(rows[start : start + height], height, length)
                waiting.append((packed, self._run(params, model_state, packed)))
            if waiting and (len(waiting) > IN_FLIGHT or start >= len(rows)):
                packed, result = waiting.popleft()
                logprobs_BS, greedy_BS = jax.device_get(result)
                for window, row, place in packed.places:
                    yield from parts.add(window, logprobs_BS[row, place], bool(greedy_BS[row, place].all()))
                done += len(packed.places)
                progress(done, len(windows))

    def _run(self, params: Parameters, model_state: Parameters, packed: Packed) -> Any:
        shape = packed.tokens_BS.shape
        sharding = NamedSharding(self.mesh, partition_spec(("batch", "seq"), shape, self.mesh, "batch"))
        arrays = [jax.make_array_from_callback(shape, sharding, array.__getitem__) for array in packed[:4]]
        with jax.set_mesh(self.mesh):
            return self._compiled(params, model_state, *arrays)

    @cached_property
    def _compiled(self) -> jax.stages.Wrapped:
        whole, options = NamedSharding(self.mesh, PartitionSpec()), options_of_device(self.mesh.devices.flat[0])
        scores = cast_frozen(self.config.model, self.config.precision.compute, partial(_scores, self.config))
        return jax.jit(scores, out_shardings=whole, compiler_options=options)


class _Parts:
    """Scores of requests, put together from scores of windows."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._missing: dict[int, int] = {}
        for window in windows:
            self._missing[window.request] = self._missing.get(window.request, 0) + 1
        self._found: dict[int, list[tuple[int, np.ndarray, bool]]] = {}

    def add(self, window: Window, logprobs: np.ndarray, greedy: bool) -> Iterator[tuple[int, Score]]:
        """Yield the score of the window's request if this was the last that it lacked."""
        found = self._found.setdefault(window.request, [])
        found.append((window.offset, logprobs, greedy))
        self._missing[window.request] -= 1
        if not self._missing[window.request]:
            parts = sorted(self._found.pop(window.request), key=lambda part: part[0])
            values = np.concatenate([part for _, part, _ in parts])
            yield window.request, Score(float(values.sum(dtype=np.float64)), all(part[2] for part in parts))


def _scores(
    config: Config,
    params: Parameters,
    model_state: Parameters,
    tokens_BS: Int[Array, "B S"],
    targets_BS: Int[Array, "B S"],
    segment_ids_BS: Int[Array, "B S"],
    positions_BS: Int[Array, "B S"],
) -> tuple[Float[Array, "B S"], Bool[Array, "B S"]]:
    """(log-probability of each target, whether none is more likely)."""
    strategy = config.mesh.context_attention
    inputs = (in_sequence(x_BS, strategy, back=True) for x_BS in (tokens_BS, targets_BS, segment_ids_BS, positions_BS))
    tokens_BS, targets_BS, segment_ids_BS, positions_BS = inputs
    sizes = jax.sharding.get_abstract_mesh().shape
    model = bind(config.model, cast_matrices(config.model, config.precision.compute, params), model_state)
    with jax.default_matmul_precision(config.precision.float32_matmul):
        output = model(tokens_BS, positions_BS, segment_ids_BS, strategy=strategy, precision=config.precision)
        chunks = _chunks(tokens_BS.shape, config.model.vocab_size, unembedding_layout(), sizes)
        options: dict[str, Any] = {"softcap": config.model.logits_softcap, "chunks": chunks}
        scores = unembedding_scores(config.precision, output.x_BSD, model.unembedding_VD, targets_BS, **options)
    nll_BS, greedy_BS = (in_sequence(x_BS, strategy) for x_BS in scores)
    return -nll_BS, greedy_BS


def _chunks(shape: tuple[int, ...], vocab_size: int, layout: Layout, sizes: Any) -> int:
    """Parts into which a device's share of the sequence is cut, so that its logits are LOGITS numbers at most and never all of them."""
    rows, own, words = (
        size // math.prod(sizes[axis] for axis in axes)
        for size, axes in ((shape[0], layout.batch), (shape[1], layout.seq), (vocab_size, layout.vocab))
    )
    divisors = [n for n in range(1, own + 1) if own % n == 0]
    return next((n for n in divisors if n > 1 and rows * (own // n) * words <= LOGITS), own)
