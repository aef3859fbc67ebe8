"""Sizes that no machine holds: refused in a line before anything is built, whatever the field, and never a size that fits."""

import math
import time
from pathlib import Path
from typing import Any, get_args

import fork_server
import jax
import pytest
from small_run import command, environment, make_workspace
from tiny import tiny_config, tiny_program

from maxlm.config import UserError, load
from maxlm.config.choices import names
from maxlm.config.fields import Section
from maxlm.config.schema import Config
from maxlm.config.sections.mtp import MtpConfig
from maxlm.config.sections.prepare import PrepareConfig, TokenizerConfig
from maxlm.data.prepare import prepare
from maxlm.models import count_parameters
from maxlm.models.parameters import abstract_parameters
from maxlm.parallel import build_mesh
from maxlm.training import fits

HUGE = (10**6, 10**9, 2**63 - 1)
GIB = 2**30
ARRAYS = 5  # of a batch, each of int32 or float32

# Fields that may be as large as they like, and why. A test below trains with all of them at once.
HARMLESS = {
    "train.eval_every": "nothing is evaluated before the end",
    "train.eval_batches": "held-out batches are counted, and no more are read",
    "diloco.every": "workers meet once, at the end",
    "evaluation.every": "tasks are run at the end",
    "checkpoint.every_steps": "the state is saved at the end",
    "checkpoint.keep": "all checkpoints are kept",
    "checkpoint.keep_every": "no checkpoint is kept for ever",
    "memory_checkpoints.every_steps": "no copy is made",
    "integrity.every_steps": "copies are compared at the end",
    "integrity.repeat_every": "no update is computed twice",
    "health.roll_backs": "training does not go back so often",
    "health.recent_roll_backs": "nor in so many steps",
    "health.recent_steps": "the run has fewer",
    "run.alerts.per_hour": "there are fewer alerts",
    "run.log_every": "the last step is logged",
    "data.skip_bad_chunks.at_most": "no store has more chunks",
    "data.prepare.tokenizer.train_bytes": "there is no more text than there is",
    "model.window": "a local layer sees all tokens",
}
MOSTLY = {  # up to a limit that a rule or the memory sets, here above the first or second of HUGE
    "train.steps": 2,
    "train.seed": 2,
    "model.vocab_size": 1,
    "model.head_dim": 1,  # the compiled step is refused
    "model.d_ff": 1,
    "model.moe.d_ff": 1,
    "model.learned_positions.max_seq_len": 1,
    "model.latent.q_rank": 1,
    "model.latent.kv_rank": 1,
    "model.latent.nope_dim": 1,
    "model.latent.rope_dim": 1,
    "model.latent.value_dim": 1,
    "data.seq_len": 1,  # the compiled step is refused
    "samples.tokens": 1,
    "integrity.replay_every": 3,  # of no concern to one device, which is refused later
    "data.prepare.tokenizer.vocab_size": 1,
}
NEEDED = {  # what a field needs beside itself
    "model.moe.": ["model.moe={n_experts: 4, top_k: 2, d_ff: 32, n_shared: 1}"],
    "model.latent.": ["model.latent={kv_rank: 16, nope_dim: 8, rope_dim: 8, value_dim: 8, q_rank: 8}", "model.n_kv_heads=4"],
    "diloco.": ["diloco={workers: 1, every: 2}"],
    "integrity.": ["integrity={}"],
    "precision.matmul.": ["precision.matmul={format: int8}"],
    "elastic.": ["elastic={min_hosts: 1}"],
    "run.alerts.": ["run.alerts.command=['true']"],
    "evaluation.": ["evaluation={tasks: [prose]}"],
    "model.window": ["model.layer_pattern=[local]"],
    "checkpoint.keep_every": ["checkpoint.every_steps=1"],
}


def numeric_fields(section: type[Section], prefix: str) -> list[str]:
    fields = []
    for name, field in section.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)} | {
            get_args(kind)[0] for kind in get_args(field.annotation) if get_args(kind)
        }
        if int in kinds and bool not in kinds:
            fields.append(prefix + name)
        fields += [
            one
            for kind in kinds
            if isinstance(kind, type) and issubclass(kind, Section)
            for one in numeric_fields(kind, f"{prefix}{name}.")
        ]
    return fields


FIELDS = [field for field in numeric_fields(Config, "") if ".scaling." not in field]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("sizes"))


def refusal(workspace: Path, *overrides: str) -> str | None:
    """Return the error for a config before anything of size is built; None if it is accepted."""
    try:
        config = load(str(workspace / "small.yml"), list(overrides)).config
        devices = jax.devices()[:1]
        fits.check(config, dict(build_mesh(config, devices).shape), devices)
        if config.data.prepare is not None:
            unread = config.data.prepare.model_copy(update={"sources": ("nowhere",)})
            prepare(config.data.model_copy(update={"prepare": unread}))
    except UserError as error:
        return None if "nowhere" in str(error) else str(error)
    raise AssertionError("there is nothing to prepare from")


def test_the_fields_are_all_numbers_of_the_schema():
    assert {"model.d_ff", "model.moe.router.groups", "model.latent.q_rank", "data.prepare.workers", "diloco.every"} <= set(FIELDS)
    assert set(HARMLESS) | set(MOSTLY) <= set(FIELDS)
    assert len(FIELDS) >= 50


@pytest.mark.parametrize("field", FIELDS)
def test_a_size_that_cannot_be_is_refused_at_once(field, workspace, monkeypatch):
    monkeypatch.setattr(fits, "host_memory", lambda: 24 * GIB)
    monkeypatch.setattr("maxlm.data.prepare.host_memory", lambda: 24 * GIB)
    beside = next((needed for prefix, needed in NEEDED.items() if field.startswith(prefix)), [])
    for number, size in enumerate(HUGE):
        began = time.monotonic()
        said = refusal(workspace, *beside, f"{field}={size}", "samples.prompts=[a]")
        assert time.monotonic() - began < 20
        if field in HARMLESS or number < MOSTLY.get(field, 0) or (field == "checkpoint.keep_every" and size % 2):
            continue
        assert said is not None, f"{field} = {size} is accepted, and no reason says why it may be"
        assert "\n" not in said and len(said) < 500


def test_a_size_that_is_refused_is_named_with_what_it_needs(workspace, monkeypatch):
    monkeypatch.setattr(fits, "host_memory", lambda: 24 * GIB)
    said = refusal(workspace, "model.d_ff=1000000000000")
    assert said is not None and "3.1 PB" in said and "CPU devices has 3.2 GB" in said and "lower model.d_ff = 1000000000000" in said
    said = refusal(workspace, "train.global_batch=100000000")
    assert said is not None and "logits" in said and "train.microbatches" in said


@pytest.mark.parametrize(
    "overrides",
    [["model.n_layers=1000000000"], ["train.global_batch=100000000"], ["train.global_batch=1000000"]],
)
def test_train_refuses_them_in_a_line(overrides, workspace):
    done = fork_server.run(
        command("train", "small.yml", *overrides), cwd=workspace, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr + done.stdout
    assert "Traceback" not in done.stderr and "this machine has" in done.stderr
    assert not (workspace / "runs").exists()


@pytest.mark.soak
def test_harmless_sizes_train(workspace):
    huge = [f"{field}={HUGE[-1]}" for field in HARMLESS if field != "checkpoint.keep_every"]
    beside = [
        "diloco={workers: 1, every: 2}",
        "evaluation={tasks: [prose]}",
        "integrity={}",
        "run.alerts.command=['true']",
        "model.layer_pattern=[local]",
        "run.name=harmless",
        "data.store=other",
    ]
    done = fork_server.run(
        command("train", "small.yml", *beside, *huge), cwd=workspace, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


BOUNDED: list[dict[str, Any]] = [
    {"train": {"microbatches": 4}, "memory": {"remat": "dots"}, "precision": {"compute": "bfloat16"}},
    {"optimizer": {"name": "muon"}, "diloco": {"workers": 2, "every": 2}},
    {"model": {"moe": {"n_experts": 4, "top_k": 2, "d_ff": 32}, "mtp": {"depth": 1}}, "memory": {"remat": "none"}},
    {"model": {"n_layers": 6, "vocab_size": 4096}, "train": {"loss_chunks": 1}},
]


OPTIMIZERS = names("optimizer")
COMPRESSED: list[dict[str, Any]] = [
    {"mesh": {"data": 2, "slices": 2}, "compression": {"kind": "int8"}},
    *({"mesh": {"data": 2, "slices": 2}, "compression": {"kind": kind, "warmup_steps": 2}} for kind in ("sign", "top_k")),
    *(
        {"mesh": {"data": 2}, "diloco": {"workers": 2, "every": 2}, "compression": {"kind": kind, "warmup_steps": 2}}
        for kind in ("int8", "sign", "top_k")
    ),
    {"mesh": {"data": 2, "slices": 2, "fsdp": 2, "tensor": 2}, "compression": {"kind": "int8"}},
]
BALANCED = {"model": {"moe": {"n_experts": 64, "top_k": 2, "d_ff": 2, "router": {"bias_rate": 0.01}}}}
STORED: list[dict[str, Any]] = [
    *COMPRESSED,
    *({"optimizer": {"name": name}} for name in OPTIMIZERS if name != "schedule_free"),
    {"optimizer": {"name": "schedule_free", "schedule": "constant"}},
    {"optimizer": {"state": {"second_moment": "factored", "masters": "split24"}}, "precision": {"compute": "bfloat16"}},
    {"ema": {"decay": 0.99}},
    {**BALANCED, "mesh": {"expert": 2}},
    {**BALANCED, "model": {"moe": {**BALANCED["model"]["moe"], "n_dense": 1}, "mtp": {"depth": 1}}},
]


def devices_of(sections):
    return math.prod(size for axis, size in sections.get("mesh", {}).items() if axis != "slices")


@pytest.mark.parametrize("sections", STORED, ids=str)
def test_the_bound_of_the_state_is_below_the_state(sections):
    """For every optimizer, format and compression: without activations beside it, which would hide what is counted too high."""
    program = tiny_program(devices_of(sections), **sections)
    leaves = jax.tree.leaves(program.abstract_state)
    state = sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    bound = fits.least(program.config, dict(program.mesh.shape))[0].bytes
    assert (0.5 if program.config.optimizer.name != "soap" else 0.4) * state <= bound <= state  # SOAP's covariances are not counted


@pytest.mark.parametrize("sections", [{}, *(pytest.param(one, marks=pytest.mark.soak) for one in (*BOUNDED, *STORED))], ids=str)
def test_the_bound_is_below_what_the_compiled_step_needs(sections):
    """Else a run that fits would be refused."""
    program = tiny_program(devices_of(sections), **sections)
    bound = sum(part.bytes for part in fits.least(program.config, dict(program.mesh.shape)))
    one_batch = ARRAYS * 4 * program.config.tokens_per_step // program.mesh.size
    batches = (1 + min(program.config.data.prefetch, program.config.total_steps)) * one_batch
    found = program.lower().compile().memory_analysis()
    needed = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    assert bound - batches <= needed - one_batch
    assert bound - batches >= 0.5 * (found.argument_size_in_bytes - one_batch), "a bound so low refuses little"


@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "fsdp": 4}, {"context": 2, "fsdp": 4}], ids=str
)
def test_the_bound_counts_what_a_mesh_splits(mesh):
    sections = {"train": {"microbatches": 2}} if "stage" in mesh else {}
    program = tiny_program(8, mesh=mesh, **sections)
    state = sum(
        leaf.dtype.itemsize * int(jax.numpy.prod(jax.numpy.array(leaf.sharding.shard_shape(leaf.shape))))
        for leaf in jax.tree.leaves(program.abstract_state)
    )
    bound = fits.least(program.config, dict(program.mesh.shape))[0]
    assert 0.5 * state <= bound.bytes <= state


def test_a_compiled_step_beyond_the_memory_is_refused(monkeypatch):
    program = tiny_program(1)
    monkeypatch.setattr(fits, "host_memory", lambda: 10**6)
    with pytest.raises(UserError, match=r"a step as it is compiled needs at least .* has 125\.0 KB; .*: "):
        fits.check_compiled(program.step, jax.devices()[0])
    monkeypatch.setattr(fits, "host_memory", lambda: 24 * GIB)
    fits.check_compiled(program.step, jax.devices()[0])


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Out of memory allocating 32000006984 bytes.",
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.3GiB.",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm.",
    ],
)
def test_out_of_memory_is_one_line(text, caplog):
    with (
        pytest.raises(UserError, match="ran out of memory while training") as told,
        fits.explain_out_of_memory("training"),
        caplog.at_level("INFO"),
    ):
        raise jax.errors.JaxRuntimeError(text)
    line = str(told.value)
    assert "train.microbatches" in line and any(
        figure in line for figure in ("asked for 32.0 GB", "12.3GiB", "24.50GB of hbm, which has 15.75GB")
    )
    assert told.value.exit_code == 2


def test_an_array_beyond_memory_is_one_line():
    with pytest.raises(UserError, match="out of memory"), fits.explain_out_of_memory("generating"):
        jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros((2**45,), "int8"))())
    with pytest.raises(UserError, match="out of memory"), fits.explain_out_of_memory("generating"):
        raise MemoryError


def test_other_errors_of_xla_are_not_taken_for_it():
    with pytest.raises(jax.errors.JaxRuntimeError, match="DotThunk"), fits.explain_out_of_memory("training"):
        raise jax.errors.JaxRuntimeError("INTERNAL: Unsupported element type for DotThunk::Execute")


def test_counting_takes_no_longer_for_a_deep_model():
    shallow = tiny_config(model={"mtp": {"depth": 3}, "n_layers": 7, "moe": {"n_experts": 4, "top_k": 2, "d_ff": 32, "n_dense": 4}}).model
    assert count_parameters(shallow) == sum(leaf.size for leaf in jax.tree.leaves(abstract_parameters(shallow)))
    assert shallow.moe is not None
    began = time.monotonic()
    changed = {
        "n_layers": 2 * 10**12,
        "mtp": MtpConfig().model_copy(update={"depth": 10**12}),
        "moe": shallow.moe.model_copy(update={"n_dense": 10**12}),
    }
    assert count_parameters(shallow.model_copy(update=changed)) > 10**16
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("sizes", [{"workers": 1000}, {"tokenizer": TokenizerConfig(vocab_size=10**12)}], ids=str)
def test_prepare_refuses_what_memory_cannot_hold(sizes, workspace, monkeypatch):
    monkeypatch.setattr("maxlm.data.prepare.host_memory", lambda: 2**30)
    config = load(str(workspace / "small.yml")).config.data
    with pytest.raises(UserError, match=r"data\.prepare\..* this machine has"):
        prepare(config.model_copy(update={"prepare": PrepareConfig(sources=("nowhere",), **sizes)}))


def test_generation_is_counted():
    config = tiny_config().model
    fits.check_generation(config, fits.Slots(16, 0, 1000))
    with pytest.raises(UserError, match=r"keys and values of 1,000,000,000,000 positions"):
        fits.check_generation(config, fits.Slots(16, 0, 10**12))


def test_generation_counts_what_is_there_together(monkeypatch):
    """Caches before and after they grow; a block of scores while prompts are read; the state of training beside a copy of the weights."""
    config = tiny_config().model
    copies = 2 * 4 * count_parameters(config)
    caches = 4 * 2 * config.n_layers * config.n_kv_heads * config.d_model // config.n_heads  # a position
    cases = [
        (fits.Slots(16, 64, 96), {}, copies + caches * (64 + 96)),
        (fits.Slots(2048, 0, 3072), {}, copies + 4 * config.n_heads * 1024 * 2048 + caches * 2048),
        (fits.Slots(16, 0, 64), {"held": fits.Part("state", 10**8, "")}, 10**8 + copies // 2 + caches * 64),
    ]
    for slots, options, wanted in cases:
        monkeypatch.setattr(fits, "memory_of_a_device", lambda device, processes, limit=wanted: limit)
        fits.check_generation(config, slots, **options)
        monkeypatch.setattr(fits, "memory_of_a_device", lambda device, processes, limit=wanted - 1: limit)
        with pytest.raises(UserError, match="at least"):
            fits.check_generation(config, slots, **options)
