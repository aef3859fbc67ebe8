"""Batches that grow in the course of a run."""

from collections.abc import Callable

from maxlm.config.capability import Capability, Problems, Sizes
from maxlm.config.fields import Positive, Section, Tokens

Ramp = tuple["BatchStageConfig", ...]


class BatchStageConfig(Section):
    """Smaller batches, until some token of the run."""

    global_batch: Positive
    """Sequences in the batch of one update during this stage. Unit: sequences."""
    until_tokens: Tokens
    """Token of the run at which this stage ends, rounded up to whole updates. Unit: tokens."""


def _problems(
    ramp: Ramp,
    train_global_batch: int,
    total_tokens: int,
    diloco: object,
    memory_offload_state_on_nvme: bool | None,
    integrity_replay_every: int | None,
) -> Problems:
    """Batches that grow, and what has no place for batches of several sizes."""
    sizes = [*(stage.global_batch for stage in ramp), train_global_batch]
    for number, stage in enumerate(ramp):
        field, larger = f"train.batch_ramp.{number}", sizes[number + 1]
        if stage.global_batch >= larger:
            rule = f"is not below the {larger} sequences of the batches that follow"
            yield f"{field}.global_batch", stage.global_batch, rule, "list the sizes from the smallest on, without train.global_batch"
        before = ramp[number - 1].until_tokens if number else 0
        if stage.until_tokens <= before:
            rule = f"is not after token {before}, at which the size before it ends"
            yield f"{field}.until_tokens", stage.until_tokens, rule, "count the tokens from the beginning of the run"
        if stage.until_tokens >= total_tokens:
            yield f"{field}.until_tokens", stage.until_tokens, f"is not before the end of the run, {total_tokens} tokens", "lower it"
    others = {
        "diloco": (diloco, "has workers with a share of every batch, all of one size"),
        "memory.offload_state": (memory_offload_state_on_nvme, "keeps files open for one compiled program"),
        "integrity.replay_every": (integrity_replay_every, "repeats work by a program for one size"),
    }
    for name, (value, rule) in others.items():
        if value:
            yield name, "set", f"{rule}, and train.batch_ramp changes it", "remove one of them"


def _on_mesh(
    ramp: Ramp,
    sizes: Sizes,
    model_balances_microbatches: bool,
    train_global_batch: int,
    train_microbatches: int,
    train_noise_scale: object,
    microbatches_of: Callable[[int, Sizes], int | None],
) -> Problems:
    """Sizes of batches that a mesh does not divide."""
    shards, staged = sizes["data"] * sizes["fsdp"] * sizes["expert"], sizes["stage"] > 1
    for number, stage in enumerate(ramp):
        size = stage.global_batch
        if microbatches_of(size, sizes) is not None:
            continue
        if model_balances_microbatches:
            rule = f"does not split over the {shards} shards of mesh data x fsdp x expert in the microbatches of any mesh, each of which"
            found = (f"use {n}" for n in range(size + 1, train_global_batch) if microbatches_of(n, sizes) is not None)
            fix = f"{next(found, 'use fewer shards')}, or model.moe.router.balance_over=sequence"
            yield f"train.batch_ramp.{number}.global_batch", size, f"{rule} model.moe.router.balance_over = batch balances", fix
        else:
            least = train_microbatches if staged else 1 if train_noise_scale is None else 2
            multiple = shards * least
            parts = f"{least} microbatches of {'the pipeline' if staged else 'train.noise_scale'} times " if least > 1 else ""
            rule = f"is not a multiple of {multiple}: {parts}the {shards} shards of mesh data x fsdp x expert"
            fix = f"use {-(-size // multiple) * multiple}, or fewer shards"
            yield f"train.batch_ramp.{number}.global_batch", size, rule, fix


CAPABILITY = Capability(
    key="train.batch_ramp",
    rules=(_problems,),
    mesh_rules=(_on_mesh,),
    identity=lambda ramp: {"train.batch_ramp": ", ".join(f"{stage.global_batch} until {stage.until_tokens}" for stage in ramp)},
)
