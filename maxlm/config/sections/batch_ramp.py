"""Batches that grow in the course of a run."""

from maxlm.config.capability import Capability, Config, Problems, Sizes, refuse
from maxlm.config.fields import Positive, Section, Tokens


class BatchStageConfig(Section):
    """Smaller batches, until some token of the run."""

    global_batch: Positive  # sequences an update
    until_tokens: Tokens  # of the whole run, rounded up to whole updates


def _problems(config: Config, ramp: tuple[BatchStageConfig, ...]) -> Problems:
    """Batches that grow, and what has no place for batches of several sizes."""
    train, total = config.train, config.total_tokens
    sizes = [*(stage.global_batch for stage in ramp), train.global_batch]
    for number, stage in enumerate(ramp):
        field, larger = f"train.batch_ramp.{number}", sizes[number + 1]
        if stage.global_batch >= larger:
            rule = f"is not below the {larger} sequences of the batches that follow"
            yield f"{field}.global_batch", stage.global_batch, rule, "list the sizes from the smallest on, without train.global_batch"
        before = ramp[number - 1].until_tokens if number else 0
        if stage.until_tokens <= before:
            rule = f"is not after token {before}, at which the size before it ends"
            yield f"{field}.until_tokens", stage.until_tokens, rule, "count the tokens from the beginning of the run"
        if stage.until_tokens >= total:
            yield f"{field}.until_tokens", stage.until_tokens, f"is not before the end of the run, {total} tokens", "lower it"
    offload = config.memory.offload_state
    others = {"diloco": "has workers with a share of every batch, all of one size"}
    others |= {"memory.offload_state": "keeps files open for one compiled program"} if offload is not None and offload.on_nvme else {}
    others |= {"integrity.replay_every": "repeats work by a program for one size"}
    yield from refuse(config, others, ", and train.batch_ramp changes it")


def _on_mesh(config: Config, ramp: tuple[BatchStageConfig, ...], sizes: Sizes) -> Problems:
    """Sizes of batches that a mesh does not divide."""
    train, shards, staged = config.train, sizes["data"] * sizes["fsdp"] * sizes["expert"], sizes["stage"] > 1
    for number, stage in enumerate(ramp):
        size = stage.global_batch
        if config.microbatches_of(size, sizes) is not None:
            continue
        if config.model.balances_microbatches:
            rule = f"does not split over the {shards} shards of mesh data x fsdp x expert in the microbatches of any mesh, each of which"
            found = (f"use {n}" for n in range(size + 1, train.global_batch) if config.microbatches_of(n, sizes) is not None)
            fix = f"{next(found, 'use fewer shards')}, or model.moe.router.balance_over=sequence"
            yield f"train.batch_ramp.{number}.global_batch", size, f"{rule} model.moe.router.balance_over = batch balances", fix
        else:
            least = train.microbatches if staged else 1 if train.noise_scale is None else 2
            multiple = shards * least
            parts = f"{least} microbatches of {'the pipeline' if staged else 'train.noise_scale'} times " if least > 1 else ""
            rule = f"is not a multiple of {multiple}: {parts}the {shards} shards of mesh data x fsdp x expert"
            fix = f"use {-(-size // multiple) * multiple}, or fewer shards"
            yield f"train.batch_ramp.{number}.global_batch", size, rule, fix


def _identity(config: Config, ramp: tuple[BatchStageConfig, ...]) -> dict[str, str]:
    return {"train.batch_ramp": ", ".join(f"{stage.global_batch} until {stage.until_tokens}" for stage in ramp)}


CAPABILITY = Capability(key="train.batch_ramp", rules=(_problems,), mesh_rules=(_on_mesh,), identity=_identity)
