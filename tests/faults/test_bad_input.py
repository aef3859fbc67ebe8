"""Whatever is wrong with the input: one clear line that names it, exit code 2, nothing written and nothing lost."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from small_run import CONFIG, finish, make_workspace, start

from maxlm import cli
from maxlm.config import load
from maxlm.data import manifest, storage
from maxlm.data.prepare import prepare

LAYER = "model.n_layers=1"
RUN = ("train", "small.yml", LAYER, "mesh.data=8", "mesh.fsdp=1")  # a run goes on with it; it is compiled in half the time of `small.yml`


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A workspace with a prepared store and a run of two steps, saved."""
    folder = make_workspace(tmp_path_factory.mktemp("trained"))
    finish(start(folder, LAYER, "train.steps=2", "optimizer.warmup_steps=0", "train.eval_batches=0", "checkpoint.every_steps=2"))
    return folder


def copied(trained: Path, folder: Path) -> Path:
    """A copy of it, with a store that knows the new dates of the copied sources."""
    shutil.copytree(trained, folder)
    with contextlib.chdir(folder):
        prepare(load("small.yml").config.data, progress=False)
    return folder


@pytest.fixture
def workspace(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it that is the current folder."""
    monkeypatch.chdir(copied(trained, tmp_path / "work"))
    return tmp_path / "work"


@pytest.fixture(scope="module")
def shared(trained, tmp_path_factory) -> Path:
    return copied(trained, tmp_path_factory.mktemp("shared") / "work")


@pytest.fixture
def untouched(shared, monkeypatch) -> Path:
    """The current folder: one copy for all tests of inputs that are refused before anything is written, as `refuse` checks."""
    monkeypatch.chdir(shared)
    return shared


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file below `folder` with its bytes, and every folder."""
    found: dict[str, bytes | None] = {}
    for path, folders, files in os.walk(folder):
        found.update({os.path.join(path, name): None for name in folders})  # noqa: PTH118  # pathlib takes three times as long
        found.update({name: Path(name).read_bytes() for name in (os.path.join(path, file) for file in files)})  # noqa: PTH118
    return found


def refuse(folder: Path, capsys, monkeypatch, *arguments: str, code: int = 2) -> str:
    """The one line that `maxlm ARGUMENTS` ends with."""
    before = snapshot(folder)
    monkeypatch.setattr("sys.argv", ["maxlm", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == code, f"{out}{err}"
    assert err.startswith("maxlm: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert err[:-1].isprintable() and len(err) < 600, err
    assert "Traceback" not in out + err
    assert snapshot(folder) == before, "something was written or lost"
    return err


YAML = {  # the whole file -> words of the message
    "broken: [": ["small.yml, line", "not valid YAML"],
    "a: b: c": ["line 1", "not valid YAML"],
    "model:\n\tvocab_size: 3": ["line 2", "not valid YAML"],
    CONFIG + "train: {steps: 3, global_batch: 8}\n": ["train", "duplicate"],
    CONFIG.replace("{steps: 20,", "{steps: 20, steps: 30,"): ["steps", "duplicate"],
    "": ["holds nothing"],
    "- model\n- data": ["must hold sections"],
    "just text": ["must hold sections", "just text"],
    "model: !!python/object/apply:os.system ['touch pwned']": ["not valid YAML"],
    "model: &m {vocab_size: 3}\ndata: *m": ["alias"],
    "1: 2": ["key 1", "not text"],
    "extends: nowhere": ["nowhere", "does not exist"],
    "extends: small": ["circle", "small"],
    "extends: {models: llama}": ["extends", "list"],
    "extends: models/lama3-8b": ["models/llama3-8b"],
    "\0": ["small.yml", "not valid YAML"],
    "train: {steps: 20}": ["model is missing"],
    CONFIG.replace("seq_len: 32", ""): ["data.seq_len is missing", "data.seq_len=VALUE"],
    CONFIG.replace("model:", "modle:"): ["modle", "nearest is model"],
    CONFIG.replace("{vocab_size", "{foo: null, vocab_size"): ["model.foo = null", "no such setting"],
    CONFIG + '"train.steps": 5': ["train.steps = 5", "command line", "write train: {steps: 5}"],
    CONFIG.replace("steps: 20", "s" * 100_000 + ": 20"): ["small.yml", "at most 65,536 characters"],
    CONFIG.replace("steps: 20", "s" * 1000 + ": 20"): ["train.sss", "sss...sss", "no such setting"],
    CONFIG.replace("name: small", 'name: "\\ud800"'): ["run.name", "lone surrogate"],
    CONFIG.replace("name: small", "name: 5"): ["run.name = 5", "write it in quotes: '5'"],
    CONFIG.replace("seed: 1", "") + "mesh: " + "{a: " * 40 + "1" + "}" * 40: ["nested too deeply"],
    CONFIG + "mesh: " + "[" * 3000: ["nested too deeply"],
    "extends: ~nobody-at-all/x": ["~nobody-at-all", "home", "not known"],
    "extends: [" + "a, " * 40 + "a]": ["41 configs", "32 are allowed"],
    f"model: {{vocab_size: 0x{'f' * 5000}}}\ndata: {{seq_len: 8}}\ntrain: {{global_batch: 8}}": [
        "model.vocab_size = 0xffff",
        "at most 9223372036854775807",
    ],
    f"model: {{vocab_size: {'9' * 5000}}}": ["not valid YAML", "4300 digits"],
}


@pytest.mark.parametrize("text", YAML, ids=range(len(YAML)))
def test_a_file_that_is_no_config(untouched, capsys, monkeypatch, text):
    (untouched / "small.yml").write_text(text)
    try:
        line = refuse(untouched, capsys, monkeypatch, "train", "small.yml")
    finally:
        (untouched / "small.yml").write_text(CONFIG)
    assert all(word in line for word in YAML[text]), line


LATENT = "{kv_rank: 16, nope_dim: 8, rope_dim: 4, value_dim: 8}"
EXPERTS = "{n_experts: 6, top_k: 2, d_ff: 16}"
SLICED = "mesh.data=2 ; mesh.fsdp=4 ; mesh.slices=2"
SETTINGS = {  # overrides -> words of the message: field, value, rule, fix
    "train.stepz=5": ["train.stepz = 5", "no such setting", "nearest is train.steps"],
    "optimizer.learning_rate=1": ["optimizer.learning_rate", "it has name, peak_lr"],
    "quantize.bits=4": ["quantize", "no such setting"],
    "train.steps=ten": ["train.steps = ten", "whole number"],
    "train.steps=1.5": ["train.steps = 1.5", "whole number"],
    "train.steps=true": ["train.steps = true", "whole number"],
    "train.steps='5'": ["train.steps = '5'", "whole number"],
    "train.steps=0": ["train.steps = 0", "at least 1"],
    "train.steps=-3": ["train.steps = -3", "at least 1"],
    "train.steps=99999999999999999999": ["train.steps", "at most"],
    "train.steps=3000000000": ["train.steps", "2147483647"],
    "train.steps=[1, 2]": ["train.steps = [1, 2]", "whole number"],
    "train.steps=null": ["train.steps", "train.tokens", "set one"],
    "train.tokens=1000": ["train.steps = 20", "exactly one"],
    "train.global_batch=7 ; train.microbatches=2": ["train.global_batch = 7", "train.microbatches = 2"],
    "train.seed=-1": ["train.seed = -1", "at least 0"],
    "train.seed=4294967296": ["train.seed", "at most"],
    "train.loss_chunks=5": ["train.loss_chunks = 5", "data.seq_len = 32"],
    "train=3": ["train = 3", "section"],
    "optimizer.peak_lr=.nan": ["optimizer.peak_lr = .nan", "finite"],
    "optimizer.peak_lr=.inf": ["optimizer.peak_lr = .inf", "finite"],
    "optimizer.peak_lr=0": ["optimizer.peak_lr = 0", "above 0"],
    "optimizer.peak_lr=fast": ["optimizer.peak_lr = fast", "number"],
    "optimizer.name=adam": ["optimizer.name = adam", "adamw"],
    "optimizer.warmup_steps=20": ["optimizer.warmup_steps = 20", "step 20"],
    "optimizer.warmup_tokens=100": ["optimizer.warmup_tokens = 100", "optimizer.warmup_steps = 4"],
    "optimizer.decay_steps=5": ["optimizer.decay_steps = 5", "wsd"],
    "optimizer.schedule=wsd ; optimizer.decay_steps=19": ["optimizer.decay_steps = 19", "do not fit"],
    "optimizer.beta1=1.0": ["optimizer.beta1", "below 1"],
    "optimizer.beta2=0.99999999": ["optimizer.beta2 = 0.99999999", "below 1 in float32"],
    "optimizer.peak_lr=1e300": ["optimizer.peak_lr = 1e+300", "float32"],
    "optimizer.peak_lr=nan": ["optimizer.peak_lr = 'nan'", "number", "above 0"],
    "model.softcap.attention=1e-300": ["model.softcap.attention = 1e-300", "float32"],
    "model.foo=null": ["model.foo = null", "no such setting"],
    "model.latent=[]": ["model.latent = []", "section"],
    "model.moe=text": ["model.moe = text", "section"],
    f"model.vocab_size=0x{'f' * 5000}": ["model.vocab_size = 0xffff", "at most"],
    "mesh.zero=4": ["mesh.zero = 4", "1, 2, 3"],
    "mesh.zero=true": ["mesh.zero = true", "whole number"],
    "mesh.zero=[2]": ["mesh.zero = [2]", "whole number"],
    "a." * 300 + "b=1": ["301 parts"],
    "x" * 100_000 + "=1": ["xxx...xxx", "no such setting"],
    'run.name="\\ud800"': ["run.name", "lone surrogate"],
    "samples.prompts=[5]": ["samples.prompts.0 = 5", "in quotes"],
    "memory.remat=[none]": ["memory.remat", "write none without brackets"],
    "train.steps=30 ; train.tokens=1000": ["train.steps = 30", "write train.tokens=null", "train.steps=null"],
    "checkpoint.dir=s3://bucket/x": ["checkpoint.dir = s3://bucket/x", "gs://bucket/folder"],
    "checkpoint.dir=http://host/x": ["checkpoint.dir = http://host/x", "gs://bucket/folder"],
    "data.store=s3://bucket/x": ["data.store = s3://bucket/x", "gs://bucket/folder"],
    "data.store=gs:/bucket": ["data.store = gs:/bucket", "gs://corpus"],
    "data.store=null ; data.prepare=null ; data.mixture={sources: {x: {store: s3://b/x}}}": ["data.mixture.sources.x.store = s3://b/x"],
    "data.prepare.sources=[file:/texts]": ["data.prepare.sources.0 = file:/texts", "without file:"],
    "data.prepare.sources=[gs:/b/x]": ["data.prepare.sources.0 = gs:/b/x"],
    "data.prepare.tokenizer.path=s3:/b/x": ["data.prepare.tokenizer.path = s3:/b/x"],
    "run.dir=file:///x": ["run.dir = file:///x", "write the path alone"],
    "data.store=~nobody-at-all/x": ["data.store = ~nobody-at-all/x", "home"],
    "checkpoint.dir=store/in": ["checkpoint.dir = store/in", "inside the token store store"],
    "run.dir=./store": ["run.dir", "inside the token store store"],
    "checkpoint.dir=.": ["data.store = store", "inside checkpoint.dir"],
    "data.store=null ; data.prepare=null ; data.mixture={sources: {a: {store: a}, b: {store: a/}}}": ["sources.b.store = a/", "source a"],
    "data.prepare.eval_fraction=1": ["eval_fraction = 1", "below 1"],
    "data.prepare.workers=9223372036854775807": ["data.prepare.workers", "at most 1024"],
    "data.read_threads=1000000": ["data.read_threads", "at most 1024"],
    "optimizer.muon.momentum=0.9": ["optimizer.muon = {momentum: 0.9}", "does nothing", "optimizer.name=muon"],
    "optimizer.adafactor={clip: 2}": ["optimizer.adafactor = {clip: 2.0}", "does nothing", "optimizer.name=adafactor"],
    "optimizer.name=adafactor ; optimizer.adafactor.clip=0.5": ["optimizer.adafactor.clip = 0.5", "1"],
    "optimizer.name=adafactor ; optimizer.beta2=0.9": ["optimizer.beta2 = 0.9", "does nothing", "decay of its own"],
    "optimizer.name=adafactor ; optimizer.state.moments=int8": ["optimizer.state.moments = int8", "no first moment"],
    "optimizer.state.moments=int4": ["optimizer.state.moments = int4", "float32, bfloat16"],
    "optimizer.state.rounding=nearest": ["optimizer.state.rounding = nearest", "does nothing"],
    "optimizer.state.masters=split24": ["optimizer.state.masters = split24", "precision.compute = float32"],
    "optimizer.schedule=constant ; optimizer.end_lr_fraction=0.5": ["optimizer.end_lr_fraction = 0.5", "does nothing"],
    "precision.compute=bfloat16 ; precision.float32_matmul=highest": ["precision.float32_matmul = highest", "does nothing", "float32"],
    "precision.compute=float32 ; precision.loss_scale={initial: 8}": ["precision.loss_scale", "does nothing", "float16"],
    "precision.compute=float16 ; precision.loss_scale={initial: 1000}": ["loss_scale.initial = 1000", "power of two", "use 512"],
    "precision.compute=float16 ; precision.loss_scale={initial: 8, smallest: 16}": ["loss_scale.smallest = 16", "above", "use 8"],
    "precision.compute=float16 ; precision.loss_scale={initial: 0}": ["precision.loss_scale.initial = 0", "1"],
    "precision.compute=float16 ; cluster.topology=v5p:2x2x1": ["precision.compute = float16", "v5p multiplies in bfloat16"],
    "precision.compute=float16 ; memory.offload_state={optimizer: host}": ["memory.offload_state = set", "float16", "vanish"],
    "precision.compute=float16 ; diloco={workers: 1, every: 2}": ["diloco = set", "float16", "meeting"],
    "precision.compute=float16 ; precision.matmul={format: mxfp8}": ["precision.matmul = set", "tiles", "float16"],
    "precision.matmul={format: int8, tile: 32}": ["precision.matmul.tile = 32", "scaling = tile alone"],
    "precision.matmul={format: int8, scaling: tile, tile: 48}": ["precision.matmul.tile = 48", "`query`", "precision.matmul.skip"],
    "precision.matmul={format: mxfp8, scaling: channel}": ["precision.matmul.scaling = channel", "every 32 numbers"],
    "precision.matmul={format: int4}": ["precision.matmul.format = int4", "weights_only=true"],
    "precision.matmul={format: int8, gradients: e5m2}": ["precision.matmul.gradients = e5m2", "use int8 or bf16"],
    "precision.matmul={format: int8, weights_only: true, gradients: int8}": ["precision.matmul.gradients = int8", "weights_only"],
    "precision.matmul={format: int8, gradients: bf16, stochastic_rounding: true}": ["stochastic_rounding = true", "does nothing"],
    "precision.matmul={format: int8, unembedding: true, gradients: bf16}": ["unembedding = true", "gradients = bf16", "remove one"],
    "precision.matmul={format: int8, hadamard: 24}": ["precision.matmul.hadamard = 24", "no power of two", "use 16"],
    "precision.matmul={format: int8, hadamard: 1024}": ["precision.matmul.hadamard = 1024", "does not divide"],
    "precision.matmul={format: int8, skip: [kv]}": ["precision.matmul.skip = [kv]", "this model has no `kv`"],
    "precision.matmul={format: int8, skip: [up, up]}": ["precision.matmul.skip", "twice"],
    "precision.matmul={format: int8, skip: [query, key, value, out, gate, up, down]}": ["leaves no matrix to quantize"],
    "precision.matmul={format: int8, first_layers: 1, last_layers: 1}": ["precision.matmul.last_layers = 1", "leaves none"],
    "precision.matmul={format: fp8} ; cluster.topology=v5p:2x2x1": ["format = fp8", "0.97 times", "use int8", "force=true"],
    "precision.matmul={format: int8} ; cluster.topology=tpu7x:2x2x1": ["format = int8", "0.52 times", "use fp8"],
    "precision.matmul={format: mxfp8, skip: [key, value]} ; cluster.topology=v5p:2x2x1": ["format = mxfp8", "emulated in", "use int8"],
    "samples.tokens=5": ["samples.prompts is missing"],
    "mesh.across_slices=fsdp": ["mesh.across_slices = fsdp", "does nothing", "mesh.slices"],
    "mesh.context_attention=gather": ["mesh.context_attention = gather", "does nothing", "mesh.context"],
    "mesh.data=-1 ; mesh.fsdp=1 ; mesh.zero=1": ["mesh.zero = 1", "does nothing", "mesh.fsdp"],
    "data.prepare.tokenizer.path=t.json": ["data.prepare.tokenizer.vocab_size = 300", "does nothing", "remove the path"],
    "data.prepare.sources=[python-stdlib] ; data.prepare.text_field=body": ["text_field = body", "does nothing"],
    "model.learned_positions.max_seq_len=64 ; samples.prompts=[a]": ["samples.tokens = 64", "learned_positions.max_seq_len"],
    "samples={prompts: [a], tokens: 100000000}": ["samples.tokens = 100000000", "4096"],
    "model.layer_pattern=[local] ; model.window=8 ; model.rope.theta=5 ; model.rope_local={theta: 6}": ["model.rope", "no global layer"],
    "model.learned_positions.max_seq_len=64 ; model.layer_pattern=[local] ; model.window=8 ; model.rope_local={}": [
        "model.rope_local",
        "does nothing",
    ],
    f"model.moe={EXPERTS} ; model.moe.router={{groups: 3, top_groups: 3}}": ["model.moe.router.groups = 3", "does nothing"],
    "optimizer.beta2=1.5": ["optimizer.beta2 = 1.5", "at most 1"],
    "model.n_heads=5": ["model.d_model = 32", "n_heads = 5"],
    "model.n_kv_heads=3": ["model.n_kv_heads = 3", "model.n_heads = 4", "use 1, 2 or 4"],
    "model.head_dim=7": ["model.head_dim = 7", "even"],
    "model.activation=relu": ["model.activation = relu", "swiglu, geglu"],
    "model.vocab_size=2147483648": ["model.vocab_size = 2147483648", "2147483647"],
    "model.learned_positions.max_seq_len=2147483648": ["model.learned_positions.max_seq_len = 2147483648", "2147483647"],
    "model.learned_positions={}": ["model.learned_positions.max_seq_len is missing"],
    "model.learned_positions.max_seq_len=16": ["data.seq_len = 32", "model.learned_positions.max_seq_len = 16"],
    "model.learned_positions.max_seq_len=64 ; model.rope.theta=5": ["model.rope = set", "learned"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.learned_positions.max_seq_len=64": ["model.learned_positions = set", "remove it"],
    "model.layer_pattern=[local]": ["model.window", "local"],
    "model.layer_pattern=[]": ["model.layer_pattern", "not be empty"],
    "model.window=8": ["model.window = 8", "local"],
    f"model.latent={LATENT}": ["model.n_kv_heads = 2", "n_heads = 4", "use 4"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.head_dim=16": ["model.head_dim = 16", "rope_dim = 12", "use 12"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.latent.rope_dim=3": ["model.latent.rope_dim = 3", "even"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.latent.value_dim=16": ["model.latent.value_dim = 16", "rope_dim = 12", "use 12"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.qk_norm=true": ["model.qk_norm = true", "norms of its own"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.bias=qkv": ["model.bias = qkv", "no biases"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.latent.q_rank=20": ["mesh.fsdp = 8", "model.latent.q_rank = 20", "use 1, 2 or 4"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; mesh.stage=2 ; model.latent.kv_rank=12": ["mesh.stage = 2", "model.latent.kv_rank = 12"],
    "model.activation=gelu ; memory.remat=[gate]": ["memory.remat", "gate", "gelu"],
    "model.rope.scaling={factor: 2}": ["model.rope.scaling", "kind"],
    "model.rope.scaling={kind: magic}": ["model.rope.scaling", "llama3"],
    "model.rope.share=1": ["model.rope.share = 1", "below 1"],
    "model.rope.share=0": ["model.rope.share = 0", "above 0"],
    "model.rope.share=0.4": ["model.rope.share = 0.4", "turns 3 of model.head_dim = 8", "even"],
    f"model.latent={LATENT} ; model.n_kv_heads=4 ; model.rope.share=0.5": ["model.rope.share = 0.5", "model.latent", "remove it"],
    "model.rope.scaling={kind: yarn, factor: 2, original_seq_len: 8, attention_factor: 0}": ["attention_factor = 0", "above 0"],
    "model.clamp={limit: 5}": ["model.clamp = set", "model.activation = swiglu", "swiglu_clamped"],
    "model.activation=swiglu_clamped ; model.clamp.slope=-1": ["model.clamp.slope = -1", "above 0"],
    "model.mtp.reads=embeddings": ["model.mtp.reads = embeddings", "normed"],
    f"model.moe={EXPERTS} ; model.moe.router.group_score=best": ["router.group_score = best", "no groups to score"],
    f"model.moe={EXPERTS} ; model.moe.router.group_score=worst": ["router.group_score = worst", "best"],
    "model.vocab_size=200": ["model.vocab_size", "200"],
    "model.n_layers=2 ; model.layer_pattern=[global, global, global]": ["model.layer_pattern", "longer"],
    "mesh.data=3": ["mesh", "number of devices, 8"],
    "mesh.data=-1": ["mesh.fsdp = -1", "only one"],
    "mesh.tensor=0": ["mesh.tensor = 0", "1 or more"],
    "mesh.tensor=8": ["mesh.tensor = 8", "use 1 or 2"],
    "mesh.context=-1 ; mesh.fsdp=1 ; data.seq_len=40": ["mesh.context = 8", "data.seq_len = 40", "16", "data.seq_len=48"],
    "mesh.context=4 ; train.loss_chunks=16": ["train.loss_chunks = 16", "mesh.context = 4", "use 1, 2, 4 or 8"],
    "mesh.context=4 ; mesh.context_attention=ulysses": [
        "mesh.context = 4",
        "model.n_kv_heads = 2",
        "mesh.context=2",
        "context_attention=ring",
    ],
    "mesh.context=2 ; mesh.tensor=2 ; mesh.context_attention=ulysses": ["mesh.context = 2", "n_kv_heads = 2", "context_attention=ring"],
    "mesh.context_attention=rings": ["mesh.context_attention = rings", "ring, gather"],
    "mesh.expert=2": ["mesh.expert = 2", "the model has no experts to split", "set model.moe"],
    f"model.moe={EXPERTS} ; mesh.expert=4": ["mesh.expert = 4", "model.moe.n_experts = 6", "use 1 or 2"],
    f"model.moe={EXPERTS} ; mesh.tensor=2 ; model.moe.d_ff=15": ["mesh.tensor = 2", "model.moe.d_ff = 15"],
    f"model.moe={EXPERTS} ; model.moe.top_k=7": ["model.moe.top_k = 7", "n_experts = 6", "use 6 at most"],
    f"model.moe={EXPERTS} ; model.moe.n_dense=2": ["model.moe.n_dense = 2", "model.n_layers = 2", "lower it"],
    f"model.moe={EXPERTS} ; model.activation=gelu": ["model.activation = gelu", "experts are gated", "swiglu"],
    f"model.moe={EXPERTS} ; model.moe.router.capacity=0.5": ["router.capacity = 0.5", "below 1", "dropless"],
    f"model.moe={EXPERTS} ; model.moe.router.groups=4": ["router.groups = 4", "n_experts = 6", "use 1, 2, 3 or 6"],
    f"model.moe={EXPERTS} ; model.moe.router={{groups: 3, top_groups: 4}}": ["router.top_groups = 4", "router.groups = 3", "use 3 at most"],
    f"model.moe={EXPERTS} ; model.moe.router.groups=6": ["model.moe.top_k = 2", "top_groups = 1", "raise top_groups"],
    f"model.moe={EXPERTS} ; model.moe.router={{choice: expert, balance_loss: 0.1}}": ["router.balance_loss = 0.1", "choice = expert"],
    f"model.moe={EXPERTS} ; model.moe.router={{choice: expert, bias_rate: 0.1}}": ["router.bias_rate = 0.1", "choice = expert"],
    f"model.moe={EXPERTS} ; model.moe.router.balance_over=sequence": ["router.balance_over = sequence", "balance_loss = 0"],
    f"model.moe={EXPERTS} ; model.moe.top_k=1": ["model.moe.router.normalize = true", "no gradient", "use false"],
    "model.moe={n_experts: 6, top_k: 2}": ["model.moe.d_ff is missing"],
    "mesh.stage=4": ["mesh.stage = 4", "more than the 2 layers", "use 2 at most"],
    "mesh.stage=2 ; pipeline.chunks=2": ["pipeline.chunks = 2", "4 parts", "2 layers", "use 1 at most"],
    "mesh.stage=2 ; model.n_layers=4 ; pipeline.chunks=2": ["train.microbatches = 1", "mesh.stage = 2", "use 2"],
    "mesh.stage=2 ; model.vocab_size=321": ["mesh.stage = 2", "model.vocab_size = 321"],
    "mesh.stage=2 ; memory.remat=full ; memory.offload=[query]": ["memory.offload = [query]", "mesh.stage = 2"],
    "pipeline.schedule=gpipe": ["pipeline = set", "mesh.stage = 1"],
    "pipeline.schedule=dualpipe": ["pipeline.schedule = dualpipe", "1f1b"],
    "mesh.data=4 ; mesh.fsdp=2 ; diloco={workers: 2, every: 2}": ["mesh.data = 4", "diloco.workers = 2", "use 1 or 2"],
    "diloco={workers: 3, every: 2}": ["train.global_batch = 8", "diloco.workers = 3"],
    "mesh.data=2 ; mesh.fsdp=4 ; diloco={workers: 2, every: 2} ; train.microbatches=2": [
        "train.global_batch = 8",
        "the 8 shards of diloco.workers x fsdp x expert",
        "use 16",
    ],
    "diloco={workers: 2, every: 2, momentum: 1}": ["diloco.momentum = 1", "below 1"],
    "diloco={workers: 2}": ["diloco.every"],
    "model.lora={rank: 4}": ["train.start_from = null", "random", "set train.start_from.path"],
    "model.lora={rank: 4, matrices: [embedding]}": ["model.lora.matrices", "embedding", "query"],
    "model.lora={rank: 4} ; train.start_from.path=nowhere": ["train.start_from.path = nowhere", "no config.yml"],
    "ema={}  ; ema.decay=1": ["ema.decay = 1", "below 1"],
    "ema={decay: 0.9} ; diloco={workers: 1, every: 2}": ["ema = set", "diloco"],
    "memory.offload_state={}": ["memory.offload_state", "name a kind of state", "optimizer: host"],
    "memory.offload_state={optimizer: disk}": ["memory.offload_state.optimizer = disk", "host", "nvme"],
    "memory.offload_state={optimizer: nvme}": ["memory.offload_state", "nvme.dir", "local disk"],
    "memory.offload_state={optimizer: host, nvme: {dir: x}}": ["memory.offload_state", "no nvme section", "optimizer: nvme"],
    "memory.offload_state={optimizer: host} ; diloco={workers: 1, every: 2}": ["diloco = set", "memory.offload_state", "remove one"],
    "memory.offload_state={optimizer: host} ; health={layers: warn}": ["health.layers = set", "memory.offload_state"],
    "memory.offload_state={master: host, gradients: host}": ["memory.offload_state", "optimizer: host with gradients: host"],
    "memory.offload_state={optimizer: host, weights: host}": ["memory.offload_state", "master: host with weights: host"],
    "memory.offload_state={optimizer: host, gradients: nvme}": ["memory.offload_state.gradients = nvme", "host"],
    "memory.offload_state={optimizer: host, master: nvme, nvme: {dir: x}, gradients: host}": ["memory.offload_state", "no state in files"],
    **{
        f"memory.offload_state={{optimizer: host, master: host, weights: host}} ; {setting}": [said, "offload_state.weights"]
        for setting, said in {
            "memory.remat=dots": "memory.remat = dots",
            "memory.remat=full ; memory.offload=[query]": "memory.offload = [query]",
            "mesh.stage=2": "mesh.stage = 2",
            "mesh.zero=1": "mesh.zero = 1",
            "precision.matmul={format: int8}": "precision.matmul = set",
            "train.microbatches=2 ; train.noise_scale={}": "train.noise_scale = set",
            "memory.remat=full ; samples={prompts: [a]}": "samples = set",
            "memory.remat=full ; evaluation={tasks: [a]}": "evaluation = set",
        }.items()
    },
    "health={spike: roll_back, spreads: 0.5}": ["health.spreads = 0.5", "1"],
    "health={activations_every: -1, layers: warn}": ["health.activations_every = -1", "at least 0"],
    "health={activations_every: 10}": ["health.activations_every = 10", "does nothing", "health.layers"],
    "health={not_finite: warn}": ["health.not_finite = warn", "skip", "roll_back"],
    "health={leave_out: [3, 3]}": ["health.leave_out = [3, 3]", "twice"],
    "health={layers: warn} ; diloco={workers: 1, every: 2}": ["health.layers = warn", "diloco"],
    "compression={kind: int8}": ["compression = set", "neither", "mesh.slices = 1, no diloco"],
    "compression={kind: signs, warmup_steps: 5}": ["compression", "int8, sign, top_k"],
    "compression={warmup_steps: 5}": ["compression", "kind"],
    f"{SLICED} ; compression={{kind: sign}}": ["compression.warmup_steps is missing"],
    f"{SLICED} ; compression={{kind: sign, warmup_steps: 20}}": ["compression.warmup_steps = 20", "none of the 20 updates"],
    f"{SLICED} ; compression={{kind: sign, warmup_steps: 3}}": ["compression.warmup_steps = 3", "below the 4 updates", "use 4 or more"],
    f"{SLICED} ; compression={{kind: top_k, warmup_steps: 9, ramp_steps: 12}}": ["compression.ramp_steps = 12", "20 updates"],
    f"{SLICED} ; compression={{kind: top_k, warmup_steps: 9, density: 0.5}}": ["compression.density = 0.5", "at most 0.0625"],
    f"{SLICED} ; compression={{kind: sign, warmup_steps: 9}} ; optimizer.name=muon": ["optimizer.name = muon", "second moments", "int8"],
    f"{SLICED} ; compression={{kind: sign, warmup_steps: 9}} ; optimizer.state={{moments: int8}}": [
        "moments = int8",
        "not float32",
        "sign",
    ],
    f"{SLICED} ; compression={{kind: top_k, warmup_steps: 9}} ; optimizer.state={{second_moment: factored}}": ["second_moment = factored"],
    f"{SLICED} ; compression={{kind: int8}} ; mesh.across_slices=fsdp": ["mesh.across_slices = fsdp", "use data"],
    f"{SLICED} ; compression={{kind: int8}} ; mesh.data=4 ; mesh.fsdp=2": ["mesh.data = 4", "mesh.slices = 2", "use 2"],
    f"{SLICED} ; compression={{kind: int8}} ; health={{layers: warn}}": ["health.layers = warn", "compressed"],
    f"{SLICED} ; compression={{kind: int8}} ; elastic={{min_hosts: 1}}": ["elastic = set", "compression"],
    "mesh.fsdp=4 ; mesh.tensor=2 ; diloco={workers: 2, every: 2} ; compression={kind: int8}": [
        "compression = set",
        "mesh.data = 1",
        "raise mesh.data",
    ],
    "train.start_from={path: nowhere, weights: best}": ["train.start_from.weights = best", "raw", "ema"],
    "mesh.slices=3": ["mesh.slices = 3", "mesh.data"],
    "mesh.across_slices=tensor": ["mesh.across_slices = tensor", "data"],
    "train.global_batch=12": ["train.global_batch = 12", "8 shards", "use 16"],
    "memory.remat=some": ["memory.remat = some", "none, full, dots"],
    "memory.remat=[nothing]": ["memory.remat", "layer_input"],
    "memory.offload=[query]": ["memory.offload", "memory.remat = none"],
    "precision.compute=float8": ["precision.compute = float8", "bfloat16"],
    "checkpoint.keep_every=7": ["checkpoint.keep_every = 7", "every_steps = 5"],
    "checkpoint.keep=0": ["checkpoint.keep = 0", "at least 1"],
    "data.mixture={sources: {a: {store: a}}}": ["data.store", "exactly one"],
    "data.store=null": ["data.store", "exactly one"],
    "cluster.topology=v9z:4x4": ["cluster.topology = v9z:4x4", "no chip"],
    "cluster.topology=v5e:4x4": ["train.global_batch", "16 shards"],
    "cluster={topology: 'v5e:2x4', accelerator: banana}": ["cluster.accelerator = banana", "no chip 'banana' is known"],
    "cluster={topology: 'v5p:2x2x2', accelerator: v5p-8}": ["cluster.accelerator = v5p-8", "use v5p-16"],
    "cluster={topology: 'h100:1x8', accelerator: v5p-8}": ["cluster.accelerator = v5p-8", "is v5p:2x2x1, and cluster.topology = h100:1x8"],
    "cluster={topology: v5p-129}": ["cluster.topology = v5p-129", "no v5p-129 is rented", "v5p-128"],
    "cluster={topology: 'h100:1x8', accelerator: a4-highgpu-8g}": ["cluster.accelerator = a4-highgpu-8g", "is b200:1x8"],
    "cluster.topology=h100:99999999x8": ["cluster.topology", "131,072"],
    "run.name=a/b": ["run.name = a/b", "one folder name"],
    "run.name=..": ["run.name = ..", "one folder name"],
    "run.name=../../up": ["run.name", "one folder name"],
    "run.name=.hidden": ["run.name", "one folder name"],
    'run.name="a\\0b"': ["run.name", "NUL"],
    'run.name="a\\nb"': ["run.name", "control character"],
    "run.name=''": ["run.name", "empty"],
    "run.dir=gs://bucket/runs": ["run.dir = gs://bucket/runs", "gcsfuse"],
    "train.steps": ["key=value"],
    "=5": ["key=value"],
    "train.steps=[1": ["train.steps", "not valid YAML"],
}


@pytest.mark.parametrize("overrides", SETTINGS)
def test_a_setting_that_cannot_be_honoured(untouched, capsys, monkeypatch, overrides):
    line = refuse(untouched, capsys, monkeypatch, "train", "small.yml", "run.name=other", *overrides.split(" ; "))
    assert all(word in line for word in SETTINGS[overrides]), line


def truncate(path: Path) -> None:
    """Keep the first half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def other_tokenizer(folder: Path) -> None:
    """A store of the same words under another tokenizer, in place of the first."""
    shutil.rmtree(folder / "store")
    text = CONFIG.replace("vocab_size: 300", "vocab_size: 290")
    (folder / "other.yml").write_text(text)
    prepare(load("other.yml").config.data)
    (folder / "other.yml").unlink()
    (folder / "small.yml").write_text(text)


def rewritten_store(folder: Path) -> None:
    """Another token in the place of the first one, with all checksums and digests up to those in store.json."""
    store = str(folder / "store")
    tokens = storage.open_array(f"{store}/train/tokens", write=True)
    tokens[0].write(tokens[0].read().result() ^ 1).result()
    digests = storage.chunk_digests(tokens.read().result(), storage.TOKENS)
    storage.write_bytes(f"{store}/train/tokens", "digests/0", digests)
    storage.write_bytes(f"{store}/train", "tokens.shards", storage.digest(digests))
    manifest.save(store, manifest.load(store))


def edit(path: str, change) -> object:
    """A change to one JSON file of the workspace."""

    def apply(folder: Path) -> None:
        values = json.loads((folder / path).read_text())
        change(values)
        (folder / path).write_text(json.dumps(values))

    return apply


NEW_RUN = ["run.name=other"]
DATA = {  # name -> (what is done to the workspace, overrides, words of the message)
    "no store": (lambda f: shutil.rmtree(f / "store"), [*NEW_RUN, "data.prepare=null"], ["store", "maxlm data prepare"]),
    "empty folder": (
        lambda f: [shutil.rmtree(f / "store"), (f / "store").mkdir()],
        [*NEW_RUN, "data.prepare=null"],
        ["store", "maxlm data prepare"],
    ),
    "foreign folder": (lambda f: None, [*NEW_RUN, "data.store=texts", "data.prepare=null"], ["texts", "maxlm data prepare"]),
    "store is a file": (lambda f: None, [*NEW_RUN, "data.store=small.yml", "data.prepare=null"], ["small.yml"]),
    "truncated manifest": (lambda f: truncate(f / "store" / "store.json"), [*NEW_RUN, "data.prepare=null"], ["store.json"]),
    "truncated tokens": (lambda f: truncate(largest(f / "store" / "train")), [*NEW_RUN, "data.prepare=null"], ["store"]),
    "missing tokens": (lambda f: largest(f / "store" / "train").unlink(), [*NEW_RUN, "data.prepare=null"], ["store"]),
    "no such sources": (lambda f: None, [*NEW_RUN, "data.store=new", "data.prepare.sources=[nowhere/]"], ["nowhere"]),
    "empty sources": (lambda f: (f / "empty").mkdir(), [*NEW_RUN, "data.store=new", "data.prepare.sources=[empty]"], ["empty"]),
    "settings of another store": (lambda f: None, [*NEW_RUN, "data.prepare.eval_fraction=0.5"], ["eval_fraction", "0.5"]),
    "no calibration": (lambda f: None, [*NEW_RUN, "cost.calibration=none.json"], ["cost.calibration none.json", "maxlm plan --calibrate"]),
    "small vocabulary": (lambda f: None, [*NEW_RUN, "model.vocab_size=296"], ["model.vocab_size", "296", "300"]),
    "run folder is a file": (lambda f: (f / "runs" / "other").write_text("mine"), NEW_RUN, ["run.dir", "is a file"]),
    "runs is a file": (lambda f: (f / "afile").write_text("mine"), [*NEW_RUN, "run.dir=afile"], ["run.dir", "is a file"]),
    "rewritten store, resumed": (rewritten_store, [], ["data.store", "holds other tokens", "step 2"]),
    "other model's checkpoint": (lambda f: None, ["model.d_ff=48"], ["model.d_ff", "48", "64"]),
    "other seed's checkpoint": (lambda f: None, ["train.seed=1"], ["train.seed"]),
    "other batch's checkpoint": (lambda f: None, ["train.global_batch=16"], ["train.global_batch"]),
    "other optimizer's checkpoint": (lambda f: None, ["optimizer.name=muon"], ["optimizer.name"]),
    "other tokenizer's checkpoint": (other_tokenizer, [], ["tokenizer"]),
}


@pytest.mark.parametrize("name", DATA)
def test_data_or_checkpoints_that_do_not_fit(workspace, capsys, monkeypatch, name):
    spoil, overrides, said = DATA[name]
    spoil(workspace)
    capsys.readouterr()
    line = refuse(workspace, capsys, monkeypatch, *RUN, *overrides)
    assert all(word in line for word in said), line


@pytest.mark.parametrize(
    "arguments",
    [[*RUN], [*RUN, "run.name=other"], ["eval", "runs/small", "--tasks", "task.yml"]],
    ids=["resumed", "new", "eval"],
)
def test_a_chunk_that_was_rewritten_with_valid_checksums_ends_the_run(workspace, capsys, monkeypatch, arguments):
    """One line names shard and chunk; no checkpoint is written from what was read."""
    (workspace / "task.yml").write_text("{name: held, kind: perplexity, store: store}")
    for split in ("train", "eval"):
        tokens = storage.open_array(str(workspace / "store" / split / "tokens"), write=True)
        for chunk in range(0, tokens.shape[0], storage.TOKENS.chunk):
            tokens[chunk].write(tokens[chunk].read().result() ^ 1).result()
    saved = sorted(path for path in workspace.glob("runs/*/checkpoints/*"))
    monkeypatch.setattr("sys.argv", ["maxlm", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    split = "eval" if "eval" in arguments else "train"
    assert f"store/{split}/tokens/c/0, chunk " in line and "is not what was written" in line and len(line) < 600, line
    assert sorted(path for path in workspace.glob("runs/*/checkpoints/*")) == saved


@pytest.mark.parametrize("field", ["run.dir", "checkpoint.dir"])
def test_a_place_that_cannot_be_written(workspace, capsys, monkeypatch, field):
    line = refuse(workspace, capsys, monkeypatch, "train", "small.yml", "run.name=other", f"{field}=/proc/no/such")
    assert f"{field} = /proc/no/such" in line and "cannot be written" in line, line


def test_a_full_disk(workspace, capsys, monkeypatch):
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    line = refuse(workspace, capsys, monkeypatch, *RUN, "run.name=other", code=7)  # it may have room later
    assert "run.dir = runs" in line and "full disk" in line, line


COMMANDS = {
    ("train",): ["CONFIG"],
    ("train", "nowhere.yml"): ["nowhere.yml", "does not exist"],
    ("train", "runs"): ["runs", "is a folder"],
    ("train", "a\0b"): ["not a file name"],
    ("train", "small.yml", "--fast"): ["--fast"],
    ("trian",): ["trian"],
    ("config", "small.yml", "--diff", "nowhere"): ["nowhere", "does not exist"],
    ("data", "inspect", "nowhere"): ["nowhere"],
    ("data", "inspect", "texts"): ["texts"],
    ("data", "prepare", "models/llama3-8b"): ["data"],
    ("data", "prepare", "small.yml", "data.prepare=null"): ["data.prepare"],
    ("generate", "nowhere", "a"): ["nowhere"],
    ("generate", "texts", "a"): ["texts"],
    ("generate", "runs/small", "a", "--step", "7"): ["checkpoint 7", "2"],
    ("generate", "runs/small", "a", "--tokens", "1000000000"): ["1,000,00", "4,096", "--tokens"],
    ("generate", "runs/small", "a " * 50_000): ["4,096", "shorten"],
    ("generate", "runs/small", "a", "--temperature", "inf"): ["--temperature inf"],
    ("generate", "runs/small", "a", "--top-p", "1.5"): ["top_p = 1.5", "from 1e-30 to 1"],
    ("generate", "runs/small", "a", "--min-p", "nan"): ["min_p = nan"],
    ("generate", "runs/small", "a", "--repetition-penalty", "0"): ["repetition_penalty = 0"],
    ("generate", "runs/small", "a", "--stop", ""): ["stop"],
    ("generate", "runs/small", "a", "--dtype", "float16"): ["--dtype float16"],
    ("generate", "runs/small"): ["no prompt"],
    ("generate", "runs/small", ""): ["prompt is empty"],
    ("generate", "runs/small", "--prompts", "nowhere.txt"): ["nowhere.txt"],
    ("generate", "runs/small", "--prompts", "texts"): ["texts"],
    ("generate", "runs/small", "a", "mesh.fspd=2"): ["mesh.fspd"],
    ("generate", "runs/small", "a", "mesh.data=3"): ["mesh"],
    ("data", "inspect", "s3://bucket/x"): ["s3://bucket/x", "gs://bucket/folder"],
    ("launch", "--backoff", "inf", "train", "small.yml"): ["--backoff inf"],
    ("generate", "runs/small", "a", "--tokens", "0"): ["--tokens", "greater than or equal to 1"],
    ("generate", "runs/small", "a", "--weights", "ema"): ["runs/small", "no moving average"],
    ("generate", "runs/small", "a", "--weights", "best"): ["--weights best", "raw", "ema"],
    ("export", "runs/small", "--adapter", "--out", "new"): ["runs/small", "model.lora", "--adapter"],
    ("export", "runs/small", "--adapter", "--dtype", "bfloat16", "--out", "new"): ["--adapter", "--dtype"],
    ("average", "runs/small", "--last", "9", "--out", "new"): ["--last 9", "checkpoint.keep"],
    ("average", "runs/small", "--steps", "1,x", "--out", "new"): ["--steps", "'x'"],
    ("average", "texts", "--out", "new"): ["texts", "config.yml"],
    ("average", "runs/small"): ["--out"],
    ("report", "nowhere"): ["nowhere"],
    ("report", "texts"): ["texts"],
    ("report", "runs/small", "--out", "nowhere/deep/x.html"): ["nowhere"],
}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_that_cannot_be_done(untouched, capsys, monkeypatch, arguments):
    line = refuse(untouched, capsys, monkeypatch, *arguments)
    assert all(word in line for word in COMMANDS[arguments]), line
