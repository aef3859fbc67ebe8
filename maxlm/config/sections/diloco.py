"""Local updates: workers that train on their own, and share their changes now and then."""

from maxlm.config.capability import FLOAT32, Capability, Config, Problems, Sizes, State, keeps
from maxlm.config.fields import BELOW_ONE, Fraction, Positive, PositiveFloat, Section


class DilocoConfig(Section):
    """Local updates (DiLoCo, arXiv 2311.08105): each worker trains on its own, and every `every` updates the mean of their changes is the
    gradient of a step of Nesterov's SGD on the shared weights, with which all continue. Only then is anything large sent along `mesh.data`.
    """

    workers: Positive  # a multiple of mesh.data; the losses depend on it, and not on the mesh
    every: Positive  # updates of a worker between two synchronizations; the last update of the run is followed by one, too
    lr: PositiveFloat = 0.7  # outer learning rate
    momentum: Fraction = 0.9  # outer momentum


def shards_of(diloco: DilocoConfig | None, sizes: Sizes) -> int:
    """Parts of a microbatch on a mesh: workers of local updates, which may be computed one after another, or devices along `data`."""
    return (sizes["data"] if diloco is None else diloco.workers) * sizes["fsdp"] * sizes["expert"]


def _problems(config: Config, diloco: DilocoConfig) -> Problems:
    train = config.train
    if train.global_batch % (diloco.workers * train.microbatches):
        parts = f"diloco.workers = {diloco.workers} times train.microbatches = {train.microbatches}"
        yield "train.global_batch", train.global_batch, f"is not a multiple of {parts}", "change one of them"
    if diloco.momentum >= BELOW_ONE:
        yield "diloco.momentum", diloco.momentum, "must be below 1 in float32, or the average never moves", "use 0.9"


def _state(config: Config, diloco: DilocoConfig, state: State, sizes: Sizes) -> State:
    """A state for each worker of the device, the shared weights and their momentum."""
    return state.times(-(-diloco.workers // sizes["data"])).add("shared weights and momentum", 2 * FLOAT32)


CAPABILITY = Capability(
    key="diloco",
    rules=(_problems,),
    identity=keeps("diloco.workers"),
    state=_state,
    unplanned="local updates (diloco)",
    update=("maxlm.training.diloco:LocalUpdates",),
)
