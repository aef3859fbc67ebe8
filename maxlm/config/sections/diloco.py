"""Local updates: workers that train on their own, and share their changes now and then."""

from maxlm.config.capability import FLOAT32, Capability, Problems, Sizes, keeps
from maxlm.config.fields import BELOW_ONE, Fraction, Positive, PositiveFloat, Section


class DilocoConfig(Section):
    """Local updates (DiLoCo, arXiv 2311.08105): each worker trains on its own, and every `every` updates the mean of their changes is the
    gradient of a step of Nesterov's SGD on the shared weights, with which all continue. Only then is anything large sent along `mesh.data`.
    """

    workers: Positive
    """Workers that train on their own, a multiple of mesh.data. The losses depend on this number, and not on the mesh. Unit: workers."""
    every: Positive
    """Updates of each worker between two synchronizations; the last update of the run is followed by one as well. Unit: updates."""
    lr: PositiveFloat = 0.7
    """Learning rate of the outer step, which applies the mean of the workers' changes. Unit: factor."""
    momentum: Fraction = 0.9
    """Nesterov momentum of the outer step. Unit: share."""


def shards_of(diloco: DilocoConfig | None, sizes: Sizes) -> int:
    """Parts of a microbatch on a mesh: workers of local updates, which may be computed one after another, or devices along `data`."""
    return (sizes["data"] if diloco is None else diloco.workers) * sizes["fsdp"] * sizes["expert"]


def _problems(diloco: DilocoConfig, train_global_batch: int, train_microbatches: int) -> Problems:
    if train_global_batch % (diloco.workers * train_microbatches):
        parts = f"diloco.workers = {diloco.workers} times train.microbatches = {train_microbatches}"
        yield "train.global_batch", train_global_batch, f"is not a multiple of {parts}", "change one of them"
    if diloco.momentum >= BELOW_ONE:
        yield "diloco.momentum", diloco.momentum, "must be below 1 in float32, or the average never moves", "use 0.9"


CAPABILITY = Capability(
    key="diloco",
    rules=(_problems,),
    identity=keeps("diloco.workers"),
    # A state for each worker of the device, the shared weights and their momentum.
    state=lambda one, state, sizes: state.times(-(-one.workers // sizes["data"])).add("shared weights and momentum", 2 * FLOAT32),
    unplanned="local updates (diloco)",
    update=("maxlm.training.diloco:LocalUpdates",),
)
