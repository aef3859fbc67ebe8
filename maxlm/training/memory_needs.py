"""Memory that a section needs in addition to a step: lower bounds, compared with what devices and hosts have before anything is built."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax

from maxlm.config.capability import FLOAT32, State
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.offload_state import OffloadStateConfig
from maxlm.config.sections.samples import SamplesConfig
from maxlm.models import count_parameters
from maxlm.models.counts import count_matrices
from maxlm.training.fits import Part, cached

HALF = 2  # bytes
Sizes = Mapping[str, int]  # mesh axis -> size
Need = tuple[str, tuple[Part, ...]]  # the doing, in words, and its parts of the memory


class MemoryNeeds:
    """Lower bounds of a section (`Capability.needs`). A hook that a subclass leaves out needs nothing."""

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> "MemoryNeeds | None":
        """The bounds of a section; None if it has none. Gets the section, and the settings that the parameters name (`table.build`)."""
        raise NotImplementedError

    def of_a_device(self, sizes: Sizes) -> Iterator[Need]:
        """Needs of a device of a mesh of these sizes, each while it does nothing else."""
        yield from ()

    def of_a_host(self, state: State, sizes: Sizes) -> Iterator[Need]:
        """Needs of a process in its host's memory. `state`: of a number in a matrix."""
        yield from ()

    def elsewhere(self, sizes: Sizes) -> tuple[int, int]:
        """(weights, gradients) of the model that a device does not hold during a step: numbers."""
        return 0, 0


class Generation(MemoryNeeds):
    """Caches of the texts that the model writes at the end of a run."""

    def __init__(self, samples: SamplesConfig, model: ModelConfig) -> None:
        self._samples, self._model = samples, model

    @classmethod
    def from_config(cls, samples: SamplesConfig, model: ModelConfig) -> Self:
        return cls(samples, model)

    def of_a_device(self, sizes: Sizes) -> Iterator[Need]:
        yield "generating samples.tokens", cached(self._model, self._samples.tokens, len(self._samples.prompts), sizes)


class OffloadedState(MemoryNeeds):
    """State, weights and gradients in host memory; of state in files as much while it is saved."""

    def __init__(self, tiers: OffloadStateConfig, model: ModelConfig, number: int, microbatches: int) -> None:
        """`number`: bytes of a number in matmuls."""
        self._tiers, self._model, self._number, self._microbatches = tiers, model, number, microbatches

    @classmethod
    def from_config(cls, tiers: OffloadStateConfig, model: ModelConfig, precision_compute: str, train_microbatches: int) -> Self:
        return cls(tiers, model, FLOAT32 if precision_compute == "float32" else HALF, train_microbatches)

    def elsewhere(self, sizes: Sizes) -> tuple[int, int]:
        """(weights, gradients) of the layers in host memory."""
        if not self._tiers.layers_on_host:
            return 0, 0
        numbers = count_matrices(self._model, scanned=True) // math.prod(sizes[axis] for axis in ("fsdp", "expert", "tensor"))
        return numbers * (self._tiers.weights is not None), numbers * (self._tiers.gradients is not None)

    def of_a_host(self, state: State, sizes: Sizes) -> Iterator[Need]:
        copies = math.prod(sizes[axis] for axis in ("data", "context"))
        weights, gradients = self.elsewhere(dict.fromkeys(sizes, 1))
        layers = self._number * weights + (self._number + FLOAT32 * (self._microbatches > 1)) * gradients
        size = (state.bytes_in("host", "nvme") * count_parameters(self._model) + layers) * copies // jax.process_count()
        remedy = "use more hosts, or keep less of it there"
        yield "keeping state in host memory", (Part("state of memory.offload_state (in files as well: a save holds a copy)", size, remedy),)
