"""Parts of the model and phases of the step, from the op_name that XLA keeps of every operation.

An op_name is a path, such as `jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/mlp/BSD,DF->BSF`.
The scopes in it are set by `jax.named_scope` in maxlm.models, and around microbatches in maxlm.training; they change a program's metadata
only.
"""

import re
from functools import lru_cache
from typing import Literal

Phase = Literal["forward", "backward", "recomputed", "update"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "recomputed", "update")

# scope -> title; the outermost scope of a path counts, so that norms of queries and keys are attention's
SCOPES = {
    "embed": "embedding",
    "norm": "norms",
    "attn": "attention",
    "mlp": "feed-forward (mlp)",
    "moe": "experts (moe)",
    "unembed": "unembedding and loss",
}
LAYERS, MODEL, ACCUMULATION, OPTIMIZER, COLLECTIVES, COPIES = "layers", "model", "accumulate", "optimizer", "collectives", "copies"
OTHER_PROGRAMS, UNKNOWN = "other programs", "unknown"
TITLES = {
    **SCOPES,
    LAYERS: "loop over layers, residual sums",
    MODEL: "rest of the model",
    ACCUMULATION: "loop over microbatches, sum of gradients",
    OPTIMIZER: "optimizer: clipping, update, guard",
    COLLECTIVES: "collectives",
    COPIES: "copies of no known origin",
    OTHER_PROGRAMS: "other programs",
    UNKNOWN: "not attributed",
}

_WORD = re.compile(r"\w+")
_COLLECTIVE = re.compile(
    r"^(?:all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|send|recv"
    r"|async-collective|psum|ppermute|megascale)|nccl|rccl",
    re.IGNORECASE,
)


def is_collective(name: str, opcode: str = "") -> bool:
    """True for an operation that moves data between devices, by the name of its instruction or kernel, or its opcode."""
    return bool(_COLLECTIVE.search(opcode) or _COLLECTIVE.search(name.replace("_", "-")))


@lru_cache(maxsize=1 << 16)
def scope_of(where: str) -> str:
    """The part of the model, or of the step, that an op_name belongs to; UNKNOWN without one."""
    path = where.partition(";")[0].split("/")
    for part in path:
        for word in _WORD.findall(part.partition(".")[0]) if "(" in part else (part,):
            if word in SCOPES:
                return word
    if not where or len(path) < 2:
        return UNKNOWN
    if not _differentiated(where):
        return ACCUMULATION if ACCUMULATION in path else OPTIMIZER
    gradient = next((i for i, part in enumerate(path) if part.startswith(("jvp(", "transpose("))), 0)
    return LAYERS if "while" in path[gradient:] else MODEL  # a loop around the gradient is that over microbatches


@lru_cache(maxsize=1 << 16)
def phase_of(where: str) -> Phase:
    """The phase of the step. Recomputed: the forward pass of a block again, for its gradient (remat)."""
    if "rematted_computation" in where:
        return "recomputed"
    if "transpose(" in where:
        return "backward"
    return "forward" if _differentiated(where) or scope_of(where) in SCOPES else "update"


def _differentiated(where: str) -> bool:
    return any(mark in where for mark in ("jvp(", "transpose(", "checkpoint/"))
