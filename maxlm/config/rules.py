"""Rules that join several settings. Each problem says field, value, rule and fix."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from maxlm.config import (
    axes,
    inert,
    integrity_rules,
    mixture_rules,
    offload_rules,
    parametrization_rules,
    paths,
    precision_rules,
    rope_rules,
    schedule_free_rules,
    schedule_rules,
)
from maxlm.config.errors import ConfigError, Problem
from maxlm.config.schema import AXES, Config, MeshConfig, ModelConfig, MoeConfig, PipelineConfig
from maxlm.hardware import topologies
from maxlm.hardware.topologies import Topology, TopologyError, either

MOST_STEPS = 2**31 - 1
BELOW_ONE = 1 - 2**-25  # larger numbers round to 1 in float32
GENERATED = 8  # times data.seq_len: the longest text that is generated with RoPE
NAME_BYTES = 200  # file systems allow 255; names derived from a run's name are longer
NAME_FIX = "use letters, digits, `-`, `_` and `.`, as in `llama-8b.2`"


def check(config: Config, sources: Mapping[str, str] | None = None, *, any_mesh: bool = False) -> None:
    """Raise ConfigError for the first rule that `config` breaks. Needs no device: a `cluster` section says how many there will be.

    `any_mesh`: do not check the mesh against that cluster. `sources`: a person has written the settings, so that one without effect, a
    router that nothing trains and an accelerator of another name are refused, too.
    """
    origins = sources or {}
    core = (_model, _moe, _lora, _data, _train, _objective, _optimizer, _ema, _diloco, _mesh, _memory, _checkpoint)
    files = (rope_rules, precision_rules, mixture_rules, schedule_rules, parametrization_rules, schedule_free_rules, offload_rules)
    further = (_samples, _state, _profile, _health, _elastic, _compression, *(file.problems for file in files))
    _refuse((problem for problems in (*core, *further) for problem in problems(config)), origins)
    check_run_name(config.run.name, origins.get("run.name", ""))
    if config.cluster is not None:
        topology = topology_of(config, origins.get("cluster.topology", ""))
        devices = topology.devices
        precision_rules.check_chip(config, topology.chip.name, origins.get("precision.matmul.format", ""))
        _refuse(integrity_rules.on_platform(config, gpu=not topology.is_tpu), origins)
        if not any_mesh:
            _refuse(integrity_rules.on_mesh(config, check_devices(config, devices, origins)), origins)
    if sources is not None:  # a program may set what only a later change of the config will read
        _refuse((*inert.problems(config), *_accelerator(config), *_untrained_router(config), *_adapted_at_random(config)), origins)


def _refuse(problems: Iterable[Problem], sources: Mapping[str, str]) -> None:
    for field, value, rule, fix in problems:
        raise ConfigError(field, value, rule, fix, sources.get(field, ""))


def check_run_name(name: str, source: str = "") -> None:
    """Raise ConfigError unless `name` is one plain folder name, which cannot lead out of its directory on any system."""
    rule = ""
    if not name:
        rule = "is empty"
    elif not name.isprintable() or name != name.strip():
        rule = "holds a control character, or a space at an end"
    elif any(bad in name for bad in ("/", "\\", "..")) or name.startswith((".", "-")):
        rule = "must be one folder name, without `/`, `\\` or `..`, and not start with `.` or `-`"
    elif len(name.encode()) > NAME_BYTES:
        rule = f"is {len(name.encode())} bytes long, and {NAME_BYTES} are allowed"
    if rule:
        raise ConfigError("run.name", name, rule, NAME_FIX, source)


def topology_of(config: Config, source: str = "") -> Topology:
    """The machine of the `cluster` section, all slices. Raises ConfigError for a topology that does not exist."""
    assert config.cluster is not None, "asked about a cluster that the config does not name"
    try:
        topology = topologies.parse(config.cluster.topology, config.mesh.slices)
    except TopologyError as error:
        raise ConfigError("cluster.topology", config.cluster.topology, error.rule, error.fix, source) from None
    network = config.cluster.network_gbit_per_s
    if network is None:
        return topology
    return replace(topology, chip=replace(topology.chip, dcn_bytes_per_s=network * 1e9 / 8))


def resolve_mesh(mesh: MeshConfig, n_devices: int) -> dict[str, int]:
    """Axis name -> size with -1 filled in. Raises ConfigError unless the product is `n_devices`."""
    sizes = mesh.sizes()
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if free and n_devices % fixed == 0:
        sizes[free[0]] = n_devices // fixed
    if math.prod(sizes.values()) != n_devices:
        product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "1"
        rule = f"the product of the axes must be the number of devices, {n_devices}"
        fix = "set one axis to -1 for whatever is left, and let the others divide the devices"
        fix += f", or try it on a CPU with --devices {fixed}" if n_devices == 1 and not free else ""
        raise ConfigError("mesh", product, rule, fix)
    crossing = sizes[mesh.across_slices]
    if crossing % mesh.slices:
        rule = f"must divide mesh.{mesh.across_slices} = {crossing}, the axis that crosses slices"
        raise ConfigError("mesh.slices", mesh.slices, rule, "change one of them")
    return sizes


def check_devices(config: Config, n_devices: int, sources: Mapping[str, str] | None = None) -> dict[str, int]:
    """Mesh axis -> size for `n_devices`. Raises ConfigError where a size does not divide what it splits."""
    sizes = resolve_mesh(config.mesh, n_devices)
    _refuse(_divides(config, sizes), sources or {})
    return sizes


def _divides(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Sizes of mesh axes that do not divide what they split, by the table of axes."""
    if config.model.moe is None and sizes["expert"] > 1:
        yield "mesh.expert", sizes["expert"], "the model has no experts to split", "use 1, or set model.moe"
    yield from _batch(config, sizes)
    yield from schedule_rules.on_mesh(config, sizes)
    yield from _context(config, sizes["context"], sizes["tensor"])
    yield from _stages(config, sizes)
    yield from _compressed_links(config, sizes)
    for field, size, logical in axes.dims(config):
        before: list[str] = []
        for axis in logical.mesh:
            if size % math.prod(sizes[name] for name in (*before, axis)):
                others = " x ".join(f"mesh.{name} = {sizes[name]}" for name in before if sizes[name] > 1)
                reason = f" ({logical.reason})" if logical.reason else ""
                rule = f"{f'times {others} ' if others else ''}does not divide {field} = {size}{reason}"
                yield f"mesh.{axis}", sizes[axis], rule, f"use {divisors_text(axes.largest(config, axis, sizes))}"
                break
            before.append(axis)


def _batch(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Rows of a microbatch, which workers that train apart share first."""
    train, diloco = config.train, config.diloco
    apart, by = (sizes["data"], "mesh data") if diloco is None else (diloco.workers, "diloco.workers")
    shards = apart * sizes["fsdp"] * sizes["expert"]
    if train.global_batch // train.microbatches % shards:
        good = math.ceil(train.global_batch // train.microbatches / shards) * shards * train.microbatches
        parts = f"each of its {train.microbatches} microbatches" if train.microbatches > 1 else "it"
        rule = f"{parts} must split over the {shards} shards of {by} x fsdp x expert"
        yield "train.global_batch", train.global_batch, rule, f"use {good}, or fewer shards"


def _stages(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Stages of a pipeline, or its section without one."""
    model, train, stage = config.model, config.train, sizes["stage"]
    if stage == 1:
        if config.pipeline is not None:
            yield "pipeline", "set", "mesh.stage = 1 makes no pipeline", "remove it, or raise mesh.stage"
        return
    chunks = (config.pipeline or PipelineConfig()).chunks
    period = len(model.layer_pattern)
    periods = math.ceil((model.n_layers - model.n_dense) / period)
    held = f"{periods} periods of {period} layers" if period > 1 else f"{periods} layers"
    held += f" after model.moe.n_dense = {model.n_dense}" if model.n_dense else ""
    if stage > periods:
        rule = f"is more than the {held} of the model, and a stage without any would only wait"
        yield "mesh.stage", stage, rule, f"use {periods} at most"
    elif stage * chunks > periods:
        rule = f"makes {stage * chunks} parts with mesh.stage = {stage}, of {held}"
        yield "pipeline.chunks", chunks, rule, f"use {periods // stage} at most"
    if chunks > 1 and train.microbatches % stage:
        rule = f"is not a multiple of mesh.stage = {stage}, and pipeline.chunks > 1 takes them in rounds of as many"
        yield "train.microbatches", train.microbatches, rule, f"use {math.ceil(train.microbatches / stage) * stage}"
    if model.lora is not None and not set(model.lora.matrices or adaptable(model)) & set(adaptable(_of_pattern(model))):
        rule = f"divides layers of which model.lora.matrices = {list(model.lora.matrices or ())} adapts none"
        yield "mesh.stage", stage, rule, "adapt matrices of attention, too, or use 1"
    if config.memory.offload:
        rule = f"does not work with mesh.stage = {stage}: what waits for its backward pass stays on the device"
        yield "memory.offload", list(config.memory.offload), rule, "use [], and recompute (memory.remat) instead"


def _of_pattern(model: ModelConfig) -> ModelConfig:
    """The model without the dense layers before its pattern."""
    return model if model.moe is None else model.model_copy(update={"moe": model.moe.model_copy(update={"n_dense": 0})})


def _context(config: Config, context: int, tensor: int) -> Iterator[Problem]:
    if context == 1:
        return
    seq_len, groups, ulysses = config.data.seq_len, config.model.n_kv_heads, config.mesh.context_attention == "ulysses"
    if ulysses and groups % (context * tensor):
        most = max((n for n in range(1, context) if groups % (n * tensor) == 0), default=1)
        rule = f"ulysses splits key/value heads: context x tensor = {context * tensor} does not divide model.n_kv_heads = {groups}"
        yield "mesh.context", context, rule, f"use mesh.context={most}, or mesh.context_attention=ring, which splits none"
    parts = context * tensor if ulysses else math.lcm(2 * context, context * tensor)
    own = seq_len // context
    if seq_len % parts:
        chunks = "" if ulysses else ": each device has two chunks of the sequence"
        rule = f"needs data.seq_len = {seq_len} to be a multiple of {parts}{chunks}"
        yield "mesh.context", context, rule, f"use data.seq_len={-(-seq_len // parts) * parts}, or a smaller axis"
    elif own % config.train.loss_chunks:
        rule = f"does not divide the {own} tokens of a sequence that each of mesh.context = {context} devices has"
        yield "train.loss_chunks", config.train.loss_chunks, rule, f"use {divisors_text(own)}"


def _model(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.head_dim == 0:
        yield "model.d_model", model.d_model, f"is not a multiple of model.n_heads = {model.n_heads}", "change one, or set model.head_dim"
    for name, rows in (("vocab_size", model.vocab_size), ("learned_positions.max_seq_len", model.max_seq_len or 0)):
        if rows >= 2**31:
            yield f"model.{name}", rows, "is above 2147483647, the most rows of a table that 32-bit ids and positions find", "lower it"
    if model.n_heads % model.n_kv_heads:
        rule = f"does not divide model.n_heads = {model.n_heads}"
        yield "model.n_kv_heads", model.n_kv_heads, rule, f"use {divisors_text(model.n_heads)}"
    if model.latent is None and model.learned_positions is None and model.head_dim % 2:
        yield "model.head_dim", model.head_dim, "must be even, since RoPE turns pairs", "use an even head_dim"
    yield from _latent(model)
    yield from _windows(model)
    if model.clamp is not None and model.activation != "swiglu_clamped":
        rule = f"is read by swiglu_clamped alone, and model.activation = {model.activation}"
        yield "model.clamp", "set", rule, "remove it, or use model.activation=swiglu_clamped"
    if len(model.layer_pattern) > model.n_layers:
        yield "model.layer_pattern", list(model.layer_pattern), f"is longer than model.n_layers = {model.n_layers}", "shorten it"


def _latent(model: ModelConfig) -> Iterator[Problem]:
    """Multi-head latent attention, which has its own norms and head dims, and no biases."""
    latent = model.latent
    if latent is None:
        return
    if latent.rope_dim % 2:
        yield "model.latent.rope_dim", latent.rope_dim, "must be even, since RoPE turns pairs", "use an even rope_dim"
    dim = latent.nope_dim + latent.rope_dim
    if latent.value_dim > dim:
        rule = f"is above nope_dim + rope_dim = {dim}, and no attention kernel takes values that are wider than keys"
        yield "model.latent.value_dim", latent.value_dim, rule, f"use {dim} at most, or a larger nope_dim"
    wanted = {
        "head_dim": (dim, f"model.latent has heads of nope_dim + rope_dim = {dim}"),
        "n_kv_heads": (model.n_heads, f"model.latent gives each of model.n_heads = {model.n_heads} its own keys and values"),
        "learned_positions": (None, "model.latent rotates a part of its queries and keys"),
        "qk_norm": (False, "model.latent has norms of its own, before its keys and values are widened"),
        "bias": ("none", "model.latent has no biases"),
    }
    for name, (value, rule) in wanted.items():
        if getattr(model, name) != value:
            fix = "remove it" if value is None else f"remove it, or use {value}"
            yield f"model.{name}", "set" if value is None else getattr(model, name), rule, fix


def _moe(config: Config) -> Iterator[Problem]:
    """Settings of `model.moe` among themselves and with the model."""
    model, moe = config.model, config.model.moe
    if moe is None:
        return
    if moe.top_k > moe.n_experts:
        yield "model.moe.top_k", moe.top_k, f"is above model.moe.n_experts = {moe.n_experts}", f"use {moe.n_experts} at most"
    if moe.n_dense >= model.n_layers:
        rule = f"leaves none of model.n_layers = {model.n_layers} with experts"
        yield "model.moe.n_dense", moe.n_dense, rule, "lower it, or remove model.moe"
    if not model.gated:
        yield "model.activation", model.activation, "experts are gated (model.moe)", "use swiglu, geglu, geglu_exact or swiglu_clamped"
    yield from _router(moe)


def _router(moe: MoeConfig) -> Iterator[Problem]:
    router, name = moe.router, "model.moe.router"
    if router.capacity is not None and router.capacity < 1:
        rule = "is below 1: experts could not hold their even share"
        yield f"{name}.capacity", router.capacity, rule, "use null (dropless: no token is ever dropped), or 1 to 2"
    if moe.n_experts % router.groups:
        rule = f"does not divide model.moe.n_experts = {moe.n_experts}"
        yield f"{name}.groups", router.groups, rule, f"use {divisors_text(moe.n_experts)}"
    elif router.top_groups > router.groups:
        yield f"{name}.top_groups", router.top_groups, f"is above {name}.groups = {router.groups}", f"use {router.groups} at most"
    elif moe.top_k > (within := router.top_groups * moe.n_experts // router.groups):
        rule = f"is above the {within} experts in {name}.top_groups = {router.top_groups} of {router.groups} groups"
        yield "model.moe.top_k", moe.top_k, rule, f"use {within} at most, or raise top_groups"
    if router.group_score is not None and router.groups == 1:
        yield f"{name}.group_score", router.group_score, f"{name}.groups = 1 makes no groups to score", "remove it, or raise groups"
    if router.choice == "expert":
        others = {"balance_loss": router.balance_loss, "bias_rate": router.bias_rate, "groups": router.groups - 1}
        for field, value in others.items():
            if value:
                rule = f"has no meaning with {name}.choice = expert, where every expert takes as many tokens"
                yield f"{name}.{field}", getattr(router, field), rule, "remove it"
    if router.balance_over == "sequence" and not router.balance_loss:
        yield f"{name}.balance_over", "sequence", f"{name}.balance_loss = 0 computes no shares", "remove it, or raise balance_loss"


def _untrained_router(config: Config) -> Iterator[Problem]:
    """A router that only its auxiliary losses would train."""
    moe = config.model.moe
    if moe is not None and moe.top_k == 1 < moe.n_experts and moe.router.normalize and moe.router.choice == "token":
        rule = "gives the one expert of a token (model.moe.top_k = 1) a weight of 1, so no gradient of the loss reaches the router"
        yield "model.moe.router.normalize", True, rule, "use false, as Switch Transformers do, or a larger top_k"


def _windows(model: ModelConfig) -> Iterator[Problem]:
    local = "local" in model.layer_pattern
    if local and model.window is None:
        yield "model.window", None, "local layers in model.layer_pattern need a window in tokens", "set model.window"
    unused = {"window": model.window, "rope_local": None if model.rope_local is None else "set"} if not local else {}
    for name, value in unused.items():
        if value is not None:
            rule = "no layer in model.layer_pattern is local, so no layer would use it"
            yield f"model.{name}", value, rule, "add `local` layers or remove it"


def adaptable(model: ModelConfig) -> tuple[str, ...]:
    """Matrices that `model.lora` may adapt, by their names in `model.lora.matrices`."""
    latent, moe = model.latent, model.moe
    compressed = ("query_down",) if latent is not None and latent.q_rank is not None else ()
    attention = ("query", "key", "value", "out") if latent is None else ("query", "out", *compressed, "kv_down", "kv")
    dense = moe is None or moe.n_dense or moe.n_shared
    return *attention, *(("gate",) if dense and model.gated else ()), *(("up", "down") if dense else ())


def _lora(config: Config) -> Iterator[Problem]:
    """Settings of `model.lora`, and what does not go together with a frozen model."""
    model, lora = config.model, config.model.lora
    if lora is None:
        return
    names = adaptable(model)
    if other := [name for name in lora.matrices or () if name not in names]:
        experts = " (experts are not adapted)" if model.moe is not None else ""
        yield "model.lora.matrices", list(lora.matrices or ()), f"this model has no `{other[0]}`{experts}", f"it has {', '.join(names)}"
    if lora.rank > model.d_model:
        yield "model.lora.rank", lora.rank, f"is above model.d_model = {model.d_model}, the rank of a whole matrix", "use 4 to 64"
    if config.optimizer.name in ("muon", "soap"):
        yield "optimizer.name", config.optimizer.name, "is for whole matrices, and model.lora trains none", "use adamw"
    if config.diloco is not None:
        rule = "gives every worker a state of its own, with the frozen model of model.lora"
        yield "diloco", "set", rule, "remove one of them: adapters are small, so reductions cost little"


def _adapted_at_random(config: Config) -> Iterator[Problem]:
    if config.model.lora is not None and config.train.start_from is None:
        rule = "model.lora freezes the model that training starts from, and without one frozen weights would be random"
        yield "train.start_from", None, rule, "set train.start_from.path to a run or an imported model"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if (data.store is None) == (data.mixture is None):
        fix = (
            "set one of them" if data.store is None else "write data.mixture=null to train on the store, or data.store=null on the mixture"
        )
        yield "data.store", data.store, "exactly one of data.store and data.mixture must be set", fix
    if data.prepare is not None and data.store is None:
        yield "data.prepare", "set", "prepares data.store, which is not set", "set data.store"
    if data.prepare is not None and data.prepare.conversations is not None and data.prepare.tokenizer.path is None:
        rule = "conversations are read with the tokenizer of the model that is fine-tuned"
        yield "data.prepare.tokenizer.path", None, rule, "name its tokenizer.json, as in runs/NAME/tokenizer/tokenizer.json"
    written = {"run.dir": f"{config.run.dir.rstrip('/')}/{config.run.name}", "checkpoint.dir": config.checkpoint.dir}
    for field, place in written.items():
        store = next((store for store in data.stores if place and paths.is_inside(place, store)), None)
        if store is not None:
            yield field, place, f"is inside the token store {store}, where nothing else is written", "name another folder"
    for store in data.stores:
        if config.checkpoint.dir and paths.is_inside(store, config.checkpoint.dir):
            rule = f"is inside checkpoint.dir = {config.checkpoint.dir}, which holds checkpoints only"
            yield "data.store", store, rule, "name another folder"
    limit = config.model.max_seq_len
    if limit is not None and data.seq_len > limit:
        yield "data.seq_len", data.seq_len, f"is above model.learned_positions.max_seq_len = {limit}", "shorten it or lengthen the table"


def _train(config: Config) -> Iterator[Problem]:
    train, seq_len = config.train, config.data.seq_len
    if train.steps is None and train.tokens is None:
        yield "train.steps", None, "exactly one of train.steps and train.tokens must be set", "set one of them"
    if train.steps is not None and train.tokens is not None:
        rule = f"train.tokens = {train.tokens} is set, too, and exactly one of them must be"
        yield "train.steps", train.steps, rule, "write train.tokens=null to keep the steps, or train.steps=null to keep the tokens"
    if train.global_batch % train.microbatches:
        rule = f"is not a multiple of train.microbatches = {train.microbatches}"
        yield "train.global_batch", train.global_batch, rule, "change one of them"
    if seq_len % train.loss_chunks:
        yield "train.loss_chunks", train.loss_chunks, f"does not divide data.seq_len = {seq_len}", f"use {divisors_text(seq_len)}"
    if train.eval_every is not None and train.eval_batches == 0:
        yield "train.eval_every", train.eval_every, "train.eval_batches = 0 turns evaluation off", "remove it, or raise eval_batches"
    if config.data.eval is not None and train.eval_batches == 0:
        yield "data.eval", config.data.eval.stores, "train.eval_batches = 0 turns evaluation off", "remove it, or raise eval_batches"


def _objective(config: Config) -> Iterator[Problem]:
    """Fine-tuning on conversations, whose rows are packed and whose loss is a mean over responses or pairs."""
    objective, moe = config.objective, config.model.moe
    yield from _objective_of_store(config)
    if objective is None or objective.kind == "next_token":
        return
    kind = f"objective.kind = {objective.kind}"
    yield from _packed_router(moe, objective.kind)
    if not config.data.mask_documents:
        yield "data.mask_documents", False, f"{kind} packs conversations, and attention stays inside each", "use true"
    for name in ("balance_loss", "z_loss") if moe is not None else ():
        if value := getattr(moe.router if moe else None, name):
            rule = f"is a mean over all tokens, and {kind} divides by responses or pairs"
            yield f"model.moe.router.{name}", value, rule, "use 0, which may differ from the source's"
    if objective.kind != "dpo":
        return
    if config.train.start_from is None:
        yield "train.start_from", None, f"{kind} needs the model that is its reference and its beginning", "set train.start_from.path"
    if config.train.z_loss:
        yield "train.z_loss", config.train.z_loss, f"{kind} compares log-probabilities, and adds nothing to them", "use 0"
    if config.model.mtp is not None:
        yield "model.mtp", "set", f"{kind} has no loss of tokens further ahead", "fine-tune with objective.kind=sft"


def _objective_of_store(config: Config) -> Iterator[Problem]:
    """An objective that would refuse the store once it is prepared, which may take hours."""
    prepare, kind = config.data.prepare, config.objective.kind if config.objective is not None else "next_token"
    if prepare is None:
        return
    name, made = "data.prepare.conversations", prepare.conversations.kind if prepare.conversations is not None else None
    read: dict[str, tuple[str | None, ...]] = {"next_token": (None,), "sft": ("prompt_response", "chat"), "dpo": ("preferences",)}
    if made not in read[kind]:
        kinds = [one for one in read[kind] if one is not None]
        fix = f"set {name}.kind to {either(kinds)}" if kinds else f"remove {name}"
        store = f"data.prepare makes without {name}" if made is None else f"{name}.kind = {made} makes"
        reader = next(one for one in read if made in read[one])
        yield "objective.kind", kind, f"does not read the store that {store}", f"use {reader}, or {fix}"


def _packed_router(moe: MoeConfig | None, kind: str) -> Iterator[Problem]:
    """Routers that look beyond a segment of a packed row, or that route a text in another way than the reference did."""
    if moe is None:
        return
    router, name = moe.router, "model.moe.router"
    if router.choice == "expert":
        rule = f"compares the tokens of a whole row, and objective.kind = {kind} packs conversations that must not see each other"
        yield f"{name}.choice", "expert", rule, "fine-tune a model whose tokens choose"
    if kind == "dpo" and router.capacity is not None:
        rule = "drops a token by what comes before it in the row, so one text has other log-probabilities in another row"
        yield f"{name}.capacity", router.capacity, rule, "use null, which may differ from the source's"
    if kind == "dpo" and router.jitter:
        rule = "changes log-probabilities in training, and the reference's are computed without it"
        yield f"{name}.jitter", router.jitter, rule, "use 0, which may differ from the source's"


def _optimizer(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    for name in ("warmup", "decay"):
        steps, tokens = getattr(optimizer, f"{name}_steps"), getattr(optimizer, f"{name}_tokens")
        if steps is not None and tokens is not None:
            fix = f"write optimizer.{name}_steps=null to keep it, or optimizer.{name}_tokens=null to keep the steps"
            yield f"optimizer.{name}_tokens", tokens, f"optimizer.{name}_steps = {steps} is set too", fix
        if name == "decay" and (steps or tokens) and optimizer.schedule != "wsd":
            rule = f"the {optimizer.schedule} schedule has no decay of its own"
            yield f"optimizer.decay_{'steps' if steps else 'tokens'}", steps or tokens, rule, "use optimizer.schedule=wsd, or remove it"
    averages = {"beta1": optimizer.beta1, "beta2": optimizer.beta2}
    if optimizer.muon is not None:
        averages["muon.momentum"] = optimizer.muon.momentum
    if optimizer.ademamix is not None:
        averages["ademamix.beta3"] = optimizer.ademamix.beta3
    for field, value in averages.items():
        if value >= BELOW_ONE:
            yield f"optimizer.{field}", value, "must be below 1 in float32, or the average never moves", "use 0.9 to 0.999"
    if optimizer.name == "ademamix" and optimizer.ademamix is not None and optimizer.ademamix.beta3 <= optimizer.beta1:
        rule = f"is not above optimizer.beta1 = {optimizer.beta1:g}, so the slow average would be the faster one"
        yield "optimizer.ademamix.beta3", optimizer.ademamix.beta3, rule, "use 0.999 to 0.9999"
    total = config.total_steps
    warmup = config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0)
    decay = config.decay_steps
    if total > MOST_STEPS:
        field = "steps" if config.train.steps is not None else "tokens"
        yield f"train.{field}", getattr(config.train, field), f"makes {total} steps, above {MOST_STEPS}, what the counter holds", "lower it"
    if warmup and warmup >= total:
        field = "warmup_steps" if optimizer.warmup_steps is not None else "warmup_tokens"
        yield f"optimizer.{field}", getattr(optimizer, field), f"warm-up must end before the run does, at step {total}", "shorten it"
    if warmup + decay > total:
        field = "decay_tokens" if optimizer.decay_tokens is not None else "decay_steps"
        rule = f"warm-up of {warmup} steps and decay of {decay} do not fit in the {total} of the run"
        yield f"optimizer.{field}", getattr(optimizer, field), rule, "shorten one of them"


def _state(config: Config) -> Iterator[Problem]:
    """Formats of the optimizer's state that contradict the optimizer, and masters that contradict what reads them."""
    name, state = config.optimizer.name, config.optimizer.state
    if state is None:
        return
    field = "optimizer.state"
    if name == "adafactor" and state.moments != "float32":
        yield f"{field}.moments", state.moments, "optimizer.name = adafactor has no first moment", "remove it, or use optimizer.name=adamw"
    if name == "adafactor" and state.second_moment is not None:
        rule = "the second moment of optimizer.name = adafactor is always factored"
        yield f"{field}.second_moment", state.second_moment, rule, "remove it, or use optimizer.name=adamw"
    if name == "lion" and state.second_moment is not None:
        yield f"{field}.second_moment", state.second_moment, "optimizer.name = lion has no second moment", "remove it"
    elif name not in ("adamw", "adafactor") and state.second_moment == "factored":
        which = " of matrices" if name == "muon" else " that is factored"
        rule = f"optimizer.name = {name} has no second moment{which}"
        yield f"{field}.second_moment", "factored", rule, "use bfloat16 or int8, or optimizer.name=adamw"
    if state.masters != "float32":
        if config.precision.compute != "bfloat16":
            rule = f"stores the bfloat16 half that matmuls read, and precision.compute = {config.precision.compute}"
            yield f"{field}.masters", state.masters, rule, "use float32, or precision.compute=bfloat16"
        if config.diloco is not None:
            rule = "keeps no float32 weights whose mean over workers diloco could take"
            yield f"{field}.masters", state.masters, rule, "use float32, or remove diloco"
        if config.model.lora is not None:
            rule = "is for weights that are trained, and model.lora trains few numbers"
            yield f"{field}.masters", state.masters, rule, "use float32"


def _ema(config: Config) -> Iterator[Problem]:
    if config.ema is None:
        return
    if config.ema.decay >= BELOW_ONE:
        yield "ema.decay", config.ema.decay, "must be below 1 in float32, or the average never moves", "use 0.99 to 0.9999"
    if config.diloco is not None:
        rule = "averages parameters after every update, and with diloco they move once in diloco.every"
        yield "ema", "set", rule, "remove one of them, or average checkpoints (`maxlm average`)"


def _diloco(config: Config) -> Iterator[Problem]:
    diloco, train = config.diloco, config.train
    if diloco is None:
        return
    if train.global_batch % (diloco.workers * train.microbatches):
        parts = f"diloco.workers = {diloco.workers} times train.microbatches = {train.microbatches}"
        yield "train.global_batch", train.global_batch, f"is not a multiple of {parts}", "change one of them"
    if diloco.momentum >= BELOW_ONE:
        yield "diloco.momentum", diloco.momentum, "must be below 1 in float32, or the average never moves", "use 0.9"


def _compression(config: Config) -> Iterator[Problem]:
    """Settings of `compression`, and what does not go together with it."""
    settings, optimizer = config.compression, config.optimizer
    if settings is None:
        return
    if config.diloco is None and config.mesh.slices == 1:
        rule = "is for links between slices or between workers of local updates, and here are neither (mesh.slices = 1, no diloco)"
        yield "compression", "set", rule, "remove it, or set mesh.slices or diloco"
    elif config.diloco is None and config.mesh.across_slices != "data":
        rule = "sends more than gradients between slices, and compression is of gradients"
        yield "mesh.across_slices", config.mesh.across_slices, rule, "use data, or remove compression"
    beside = {
        "model.lora": (config.model.lora, "trains adapters, whose gradients are small"),
        "elastic": (config.elastic, "changes the number of devices along mesh.data, each of which has feedback of its own"),
    }
    for field, (section, rule) in beside.items():
        if section is not None:
            yield field, "set", f"{rule}, and compression is set", "remove one of them"
    if config.health is not None and config.health.layers is not None:
        rule = "compares the gradients of layers, which are not summed before they are compressed"
        yield "health.layers", config.health.layers, rule, "remove it, or compression"
    frozen = settings.kind != "int8" and config.diloco is None
    if frozen and optimizer.name != "adamw":
        rule = f"has no second moments that compression.kind = {settings.kind} could keep as they are after its warm-up"
        yield "optimizer.name", optimizer.name, rule, "use adamw, or compression.kind=int8"
    formats = {} if optimizer.state is None else {"moments": optimizer.state.moments, "second_moment": optimizer.state.second}
    for name, value in formats.items():
        if frozen and value != "float32":
            rule = f"is not float32, in which compression.kind = {settings.kind} reads and keeps the moments of Adam"
            yield f"optimizer.state.{name}", value, rule, "remove it, or use compression.kind=int8"
    yield from _phases(config, frozen)


def _phases(config: Config, frozen: bool) -> Iterator[Problem]:
    """Warm-up and ramp of `compression`. `frozen`: Adam's second moments are, after the warm-up."""
    settings, optimizer = config.compression, config.optimizer
    assert settings is not None, "asked about its phases"
    warmup = config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0)
    field, steps = "compression.warmup_steps", settings.warmup_steps
    if steps >= config.total_steps:
        yield field, steps, f"leaves none of the {config.total_steps} updates of the run to compress", "lower it, or remove compression"
    elif frozen and steps < warmup:
        rule = f"is below the {warmup} updates in which the learning rate rises, and second moments are kept as they are then"
        yield field, steps, rule, f"use {warmup} or more; a fifth of the run is usual"
    if settings.kind == "top_k" and steps + settings.ramp_steps > config.total_steps:
        rule = f"and compression.warmup_steps = {steps} do not fit in the {config.total_steps} updates of the run"
        yield "compression.ramp_steps", settings.ramp_steps, rule, "shorten one of them"


def _compressed_links(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """Devices along `data`, between which gradients or changes are compressed."""
    data, slices = sizes["data"], config.mesh.slices
    if config.compression is None:
        return
    if config.diloco is not None and data == 1:
        yield "compression", "set", "has no link to compress: all workers are on the same devices (mesh.data = 1)", "raise mesh.data"
    elif config.diloco is None and slices > 1 and data != slices:
        rule = f"must be mesh.slices = {slices} with compression: a slice is one replica, which fsdp splits"
        yield "mesh.data", data, rule, f"use {slices}, and a larger mesh.fsdp (mesh.zero=1 keeps weights whole)"


def _mesh(config: Config) -> Iterator[Problem]:
    sizes = config.mesh.sizes()
    for axis, size in sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}", size, "must be 1 or more, or -1 for the devices that are left", "use 1 to leave the axis out"
    free = [axis for axis in AXES if sizes[axis] == -1]
    if len(free) > 1:
        yield f"mesh.{free[1]}", -1, f"only one axis may be -1, and mesh.{free[0]} is", "give one of them a size"


def _memory(config: Config) -> Iterator[Problem]:
    memory = config.memory
    if memory.offload and isinstance(memory.remat, str) and memory.remat != "full":
        rule = f"contradicts memory.remat = {memory.remat}, which keeps tensors on the device"
        yield "memory.offload", list(memory.offload), rule, "use remat: full or a list of names"
    named = {"remat": () if isinstance(memory.remat, str) else memory.remat, "offload": memory.offload}
    for field, names in named.items():
        if "gate" in names and not config.model.gated:
            yield f"memory.{field}", list(names), f"model.activation = {config.model.activation} has no gate to keep", "take `gate` out"
    both = set(named["offload"]) & set(named["remat"])
    if both:
        yield "memory.offload", sorted(both), "these names are in memory.remat too", "keep a tensor on the device or on the host, not both"


def _checkpoint(config: Config) -> Iterator[Problem]:
    saved = config.checkpoint
    if saved.keep_every is not None and saved.keep_every % saved.every_steps:
        rule = f"is not a multiple of checkpoint.every_steps = {saved.every_steps}, so it would keep nothing"
        yield "checkpoint.keep_every", saved.keep_every, rule, "use a multiple"


def most_generated(config: Config) -> int:
    """Tokens of a prompt and its continuation at most."""
    limit = config.model.max_seq_len
    return limit if limit is not None else max(GENERATED * config.data.seq_len, 4096)


def _samples(config: Config) -> Iterator[Problem]:
    limit = most_generated(config)
    if config.samples is not None and config.samples.tokens >= limit:
        of = "model.learned_positions.max_seq_len" if config.model.max_seq_len else f"{GENERATED} times data.seq_len, or 4096"
        rule = f"leaves nothing for a prompt of the {limit} tokens that are allowed ({of})"
        yield "samples.tokens", config.samples.tokens, rule, f"use for example {limit // 2}"


def _profile(config: Config) -> Iterator[Problem]:
    settings = config.run.profile
    if settings is not None and settings.at[-1] + settings.steps >= config.total_steps:
        rule = f"with {settings.steps} steps a trace must end before the run does, at step {config.total_steps}"
        yield "run.profile.at", list(settings.at), rule, "trace earlier steps, or fewer"


def _elastic(config: Config) -> Iterator[Problem]:
    """Problems of `elastic`: what would change the losses, or make no smaller mesh possible, when hosts are lost."""
    if config.elastic is None:
        return
    if config.model.balances_microbatches:
        rule = "is a loss of a whole microbatch, and with elastic there are more and smaller ones while hosts are absent"
        yield "model.moe.router.balance_over", "batch", rule, "use sequence, or remove elastic"
    if config.mesh.slices > 1 and config.mesh.across_slices == "stage":
        rule = "leaves no part of the model to do without, so the loss of a slice ends the run as without elastic"
        yield "mesh.across_slices", "stage", rule, "use data or fsdp, or remove elastic"


def _accelerator(config: Config) -> Iterator[Problem]:
    if config.cluster is None or config.cluster.accelerator is None:
        return
    name, topology = config.cluster.accelerator, topology_of(config)
    try:
        machine = topologies.parse(name)
    except TopologyError as error:
        yield "cluster.accelerator", name, error.rule, f"{error.fix}, or null"
        return
    same = machine.chip.name == topology.chip.name and machine.sides[-1] == topology.sides[-1]  # of GPUs: the nodes are alike
    if not (machine.name == topology.name if topology.is_tpu else same):
        rule = f"is {machine.name}, and cluster.topology = {config.cluster.topology}"
        right = topologies.accelerator(topology)
        yield "cluster.accelerator", name, rule, f"use {right}, or null" if right is not None else "use null"


def divisors_text(number: int) -> str:
    """The largest divisors of `number`, as a choice in words."""
    all_of_them = [d for d in range(1, min(number, 4096) + 1) if number % d == 0]
    return either([str(d) for d in all_of_them[-8:]])


def _health(config: Config) -> Iterator[Problem]:
    if config.health is None:
        return
    if config.diloco is not None and config.health.layers is not None:
        rule = "compares parameters before and after every update, and with diloco they move once in diloco.every"
        yield "health.layers", config.health.layers, rule, "remove one of them"
    if len(set(config.health.leave_out)) < len(config.health.leave_out):
        yield "health.leave_out", list(config.health.leave_out), "names a batch twice", "name it once"
