"""Rules of `train.branch_from`, `train.batch_ramp` and `train.noise_scale`; warm-up and decay of a run that was made shorter."""

from collections.abc import Collection, Iterator, Mapping

from maxlm.config.errors import Problem
from maxlm.config.schema import Config


def problems(config: Config) -> Iterator[Problem]:
    """Settings of these sections that contradict the others."""
    yield from _branch(config)
    yield from _ramp(config)
    yield from _noise_scale(config)


def fit_schedule(config: Config, shorter: Collection[str]) -> tuple[Config, dict[str, str]]:
    """Shorten warm-up and decay to the length of a run, for a smoke test of a long run's config. `shorter`: settings that came after the
    schedule, on the command line; nothing is changed unless the length is among them and the warm-up or decay is not. Returns the config
    and a sentence for each setting that was changed, by its dotted key.
    """
    if (config.train.steps is None) == (config.train.tokens is None):  # which the rules refuse
        return config, {}
    total, optimizer, decay = config.total_steps, config.optimizer, config.decay_steps
    lengths = {"warmup": config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0), "decay": decay}
    fits = lengths["warmup"] < total and sum(lengths.values()) <= total
    if fits or not {"train.steps", "train.tokens"} & set(shorter) or config.train.branch_from is not None:
        return config, {}
    if decay and not any(key.startswith("optimizer.decay_") for key in shorter):
        decay = min(decay, max(total // 10, 1))
    wanted = {"decay": decay, "warmup": max(min(lengths["warmup"], total - max(decay, 1)), 0)}
    changed: dict[str, int | None] = {}
    sentences = {}
    for name, steps in wanted.items():
        given = next((unit for unit in ("steps", "tokens") if getattr(optimizer, f"{name}_{unit}") is not None), None)
        if given is None or steps == lengths[name] or f"optimizer.{name}_{given}" in shorter:
            continue
        changed |= {f"{name}_tokens": None, f"{name}_steps": steps}
        before = f"optimizer.{name}_{given} = {getattr(optimizer, f'{name}_{given}')}"
        rule = f"is longer than a run of {total} updates leaves room for"
        sentences[f"optimizer.{name}_steps"] = f"{before} {rule}: optimizer.{name}_steps={steps} is used."
    return config.model_copy(update={"optimizer": optimizer.model_copy(update=changed)}), sentences


def _branch(config: Config) -> Iterator[Problem]:
    """A run that continues another's checkpoint, and its decay."""
    branch, total = config.train.branch_from, config.total_steps
    if branch is None:
        return
    if branch.step >= total:
        rule = f"is not before the end of this run, step {total}, which counts the updates before the branch too"
        yield "train.branch_from.step", branch.step, rule, f"use train.steps={branch.step} plus the updates of the branch"
    decay = config.decay_steps
    if decay and total - decay < branch.step < total:
        rule = f"is after step {total - decay}, at which a decay of {decay} updates begins in a run of {total}: the rate would jump"
        fix = f"use optimizer.decay_steps={total - branch.step} at most, or an earlier checkpoint"
        yield "train.branch_from.step", branch.step, rule, fix
    rises = config.optimizer.ademamix is None or config.optimizer.ademamix.warmup_steps is None
    if config.optimizer.name == "ademamix" and rises:
        rule = "is not set, so that beta3 and alpha rise over the whole run, and a branch has another length"
        fix = "set it in the stable run and in the branch, to the same number"
        yield "optimizer.ademamix.warmup_steps", None, rule, fix
    if config.objective is not None and config.objective.kind == "dpo":
        rule = "has no reference of its own: that of objective.kind = dpo is the model which a run starts from"
        yield "train.branch_from", "set", rule, "use train.start_from"


def _ramp(config: Config) -> Iterator[Problem]:
    """Batches that grow, and what has no place for batches of several sizes."""
    ramp, train = config.train.batch_ramp or (), config.train
    sizes = [*(stage.global_batch for stage in ramp), train.global_batch]
    total = None if train.steps is None and train.tokens is None else config.total_tokens
    for number, stage in enumerate(ramp):
        field, larger = f"train.batch_ramp.{number}", sizes[number + 1]
        if stage.global_batch >= larger:
            rule = f"is not below the {larger} sequences of the batches that follow"
            yield f"{field}.global_batch", stage.global_batch, rule, "list the sizes from the smallest on, without train.global_batch"
        before = ramp[number - 1].until_tokens if number else 0
        if stage.until_tokens <= before:
            rule = f"is not after token {before}, at which the size before it ends"
            yield f"{field}.until_tokens", stage.until_tokens, rule, "count the tokens from the beginning of the run"
        if total is not None and stage.until_tokens >= total:
            yield f"{field}.until_tokens", stage.until_tokens, f"is not before the end of the run, {total} tokens", "lower it"
    offload = config.memory.offload_state
    beside = {
        "diloco": (config.diloco is not None, "has workers with a share of every batch, all of one size"),
        "memory.offload_state": (offload is not None and offload.on_nvme, "keeps files open for one compiled program"),
        "integrity.replay_every": (
            config.integrity is not None and config.integrity.replay_every is not None,
            "repeats work by a program for one size",
        ),
    }
    for field, (used, rule) in beside.items():
        if ramp and used:
            yield field, "set", f"{rule}, and train.batch_ramp changes it", "remove one of them"


def _noise_scale(config: Config) -> Iterator[Problem]:
    """A measurement that compares the parts of a batch with the whole."""
    if config.train.noise_scale is None:
        return
    if config.train.microbatches == 1:
        rule = "compares microbatches with the whole batch, and train.microbatches = 1"
        yield "train.noise_scale", "set", rule, "use 2 microbatches or more"
    beside = {
        "diloco": (config.diloco, "has a gradient for each worker, and none of the whole batch"),
        "compression": (config.compression, "changes the gradient of the whole batch"),
        "precision.loss_scale": (config.precision.scaling, "multiplies gradients"),
    }
    for field, (section, rule) in beside.items():
        if section is not None:
            yield "train.noise_scale", "set", f"does not go together with {field}, which {rule}", "remove one of them"


def on_mesh(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Problems of these sections on a mesh of these `sizes`."""
    yield from _ramp_on(config, sizes)
    if config.train.noise_scale is not None and sizes["stage"] > 1:
        rule = f"needs the gradient of each microbatch, and the pipeline of mesh.stage = {sizes['stage']} forms their sum"
        yield "train.noise_scale", "set", rule, "remove it, or use mesh.stage=1"


def _ramp_on(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Sizes of batches that a mesh does not divide."""
    train, shards, staged = config.train, sizes["data"] * sizes["fsdp"] * sizes["expert"], sizes["stage"] > 1
    for number, stage in enumerate(train.batch_ramp or ()):
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
            yield (
                f"train.batch_ramp.{number}.global_batch",
                size,
                rule,
                f"use {-(-size // multiple) * multiple}, or fewer shards",
            )
