"""Configs merge in the order they say, every value remembers who set it, and what is written reads back the same."""

import contextlib
import io
import itertools
import json
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from maxlm import __version__, cli
from maxlm.config import UserError, load, loader
from maxlm.config.fields import flatten
from maxlm.config.loader import COMMAND_LINE, RUN_CONFIG, SHIPPED, dump, load_saved, saved_text
from maxlm.config.rules import check_devices, topology_of
from maxlm.config.schema import Config, MemoryConfig, SamplesConfig
from maxlm.config.show import answer

RUNS = sorted(str(path.relative_to(SHIPPED)) for path in (SHIPPED / "runs").glob("*.yml"))
BASE = """
model: {vocab_size: 300, d_model: 16, n_layers: 2, n_heads: 4, d_ff: 32}
data: {store: tokens, seq_len: 8}
train: {steps: 10, global_batch: 8}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files below an empty folder that is the current one: write(base=..., sizes__big=...)."""
    monkeypatch.chdir(tmp_path)

    def write(**texts: str) -> None:
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/')}.yml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    return write


def test_later_configs_win_then_the_file_itself_then_the_command_line(write):
    write(
        base=BASE,
        first="optimizer: {peak_lr: 1, warmup_steps: 1, weight_decay: 1, clip_norm: 1}",
        second="optimizer: {warmup_steps: 2, weight_decay: 2, clip_norm: 2}",
        own="extends: [base, first, second]\noptimizer: {weight_decay: 3, clip_norm: 3}",
    )
    optimizer = load("own", ["optimizer.clip_norm=4", "optimizer.beta1=0.5", "optimizer.beta1=0.6"]).config.optimizer
    assert (optimizer.peak_lr, optimizer.warmup_steps, optimizer.weight_decay, optimizer.clip_norm) == (1, 2, 3, 4)
    assert optimizer.beta1 == 0.6  # the last override wins


def test_what_a_parent_extends_comes_before_the_parent(write):
    write(grand=BASE + "optimizer: {peak_lr: 1, warmup_steps: 1}", parent="extends: grand\noptimizer: {peak_lr: 2}", own="extends: parent")
    assert load("own").config.optimizer.peak_lr == 2
    assert load("own").config.optimizer.warmup_steps == 1


def test_two_ways_to_one_parent_are_no_circle(write):
    write(base=BASE, left="extends: base\ntrain: {seed: 1}", right="extends: base\ntrain: {seed: 2}", own="extends: [left, right]")
    assert load("own").config.train.seed == 2


def test_a_file_is_read_once_however_often_it_is_extended(write, monkeypatch):
    """A fork in each of 30 files is 2 ** 30 ways to the last."""
    forks = {f"f{n}": f"extends: [f{n + 1}, f{n + 1}]" for n in range(30)}
    write(**forks, f30=BASE)
    read = []
    whole = loader.open_regular
    monkeypatch.setattr(loader, "open_regular", lambda path: read.append(path.name) or whole(path))
    assert load("f0").config.train.steps == 10
    assert sorted(read) == sorted({f"f{n}.yml" for n in range(31)})


def test_a_chain_of_configs_has_an_end(write):
    write(**{f"f{n}": f"extends: f{n + 1}" for n in range(2000)}, f2000=BASE)
    with pytest.raises(UserError, match="more than 32 files"):
        load("f0")


def test_a_parent_is_merged_as_it_is_alone(write):
    """What `left` says over `base` holds until another parent says otherwise, and the last to say it is named."""
    write(base=BASE, left="extends: base\ntrain: {steps: 20, seed: 1}", right="train: {seed: 2}", own="extends: [left, right]")
    loaded = load("own")
    assert (loaded.config.train.steps, loaded.config.train.seed) == (20, 2)
    assert (loaded.source("train.steps"), loaded.source("train.seed"), loaded.source("model.d_model")) == (
        "left.yml",
        "right.yml",
        "base.yml",
    )


def test_home_is_written_out_in_every_path(write, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(home__base=BASE, own="extends: ~/base")
    prepare = "data.prepare={sources: [~/texts], tokenizer: {path: ~/t.json}}"
    config = load("own", ["data.store=~/store", prepare, "run.dir=~/runs", "checkpoint.dir=~/saved"]).config
    assert config == load("~/base", ["data.store=~/store", prepare, "run.dir=~/runs", "checkpoint.dir=~/saved", "run.name=own"]).config
    said = (config.data.store, config.data.prepare.sources[0], config.data.prepare.tokenizer.path, config.run.dir, config.checkpoint.dir)
    assert said == tuple(str(tmp_path / "home" / name) for name in ("store", "texts", "t.json", "runs", "saved"))


def test_a_number_on_the_command_line_is_text_where_text_is_wanted(write):
    """The shell takes the quotes of run.name='5'."""
    write(base=BASE)
    config = load("base", ["run.name=5", "run.dir=1e3", "data.store=2024-01-01", "checkpoint.dir=null"]).config
    assert (config.run.name, config.run.dir, config.data.store, config.checkpoint.dir) == ("5", "1e3", "2024-01-01", None)


def test_a_number_of_tokens_may_have_an_exponent_and_no_fraction(write):
    write(base=BASE)
    train = load("base", ["train.steps=null", "train.tokens=1e4"]).config.train
    assert train.tokens == 10_000 and isinstance(train.tokens, int)
    with pytest.raises(UserError, match=r"train\.tokens = 1\.5 .*must be a whole number"):
        load("base", ["train.steps=null", "train.tokens=1.5"])


def test_a_default_that_does_nothing_may_be_written(write):
    """So that what `dump` writes can be read: only another value than the default would mislead."""
    write(base=BASE + "optimizer: {muon: null}\nmesh: {zero: 3}\nprecision: {float32_matmul: default}")
    assert load("base").config.optimizer.muon is None


@pytest.mark.parametrize("circle", [["own"], ["other", "own"], ["other", "third", "other"]])
def test_a_circle_is_refused_by_name(write, circle):
    files = {"own": "extends: " + circle[0]} | {a: f"extends: {b}" for a, b in itertools.pairwise(circle)}
    write(**files)
    with pytest.raises(UserError, match="circle") as caught:
        load("own")
    assert f"{circle[-1]} -> " in str(caught.value)


def test_a_name_means_the_neighbour_before_the_shipped_one(write):
    """A copy of a size beside the config that extends it is the one that counts."""
    write(mine__models__llama3_8b=BASE)
    Path("mine/models/llama3_8b.yml").rename("mine/models/llama3-8b.yml")
    write(mine__run="extends: models/llama3-8b", run=BASE + "extends: models/llama3-8b")
    assert load("mine/run").config.model.n_layers == 2
    assert load("run", ["model.n_kv_heads=4"]).config.model.rope.theta == 500000  # of the shipped one


def test_names_and_paths_find_the_same_config(write):
    write(deep__er__base=BASE)
    spellings = ["deep/er/base", "deep/er/base.yml", str(Path("deep/er/base.yml").resolve()), "./deep/er/base"]
    assert len({load(spelling).config for spelling in spellings}) == 1
    assert load("runs/quickstart").config == load("runs/quickstart.yml").config


def test_sections_merge_and_lists_are_replaced(write):
    write(
        base=BASE + "samples: {prompts: [a, b], tokens: 9}",
        own="extends: base\nsamples: {prompts: [c]}",
    )
    samples = load("own").config.samples
    assert samples is not None
    assert (samples.prompts, samples.tokens) == (("c",), 9)


def test_an_empty_section_is_its_defaults_on_the_command_line_alone(write):
    write(base=BASE + "memory: {remat: [attention], unroll: true}", own="extends: base\nmemory: {}")
    assert load("own").config.memory == load("base").config.memory != MemoryConfig()
    reset = load("own", ["memory={}", "memory.remat=dots"])
    assert reset.config.memory == MemoryConfig(remat="dots")
    assert reset.config.data == load("own").config.data
    assert {key for key in reset.sources if key.startswith("memory")} == {"memory.remat"}


SCALED = "model: {rope: {theta: 5e5, scaling: {kind: llama3, factor: 8, low_freq_factor: 2, original_seq_len: 64}}}"


def test_the_same_kind_merges_and_another_kind_starts_afresh(write):
    """No setting of a kind that is gone may linger: `low_freq_factor` means nothing to `linear`."""
    scaling = "extends: [base, size]\nmodel: {{rope: {{scaling: {}}}}}"
    write(base=BASE, size=SCALED, same=scaling.format("{factor: 4}"), other=scaling.format("{kind: linear, factor: 4}"))
    write(none=scaling.format("null"))
    same = load("same")
    assert same.config.model.rope.scaling.model_dump() == {
        "kind": "llama3",
        "factor": 4,
        "low_freq_factor": 2,
        "high_freq_factor": 4,
        "original_seq_len": 64,
    }
    other = load("other")
    assert other.config.model.rope.scaling.model_dump() == {"kind": "linear", "factor": 4}
    assert not [key for key, source in other.sources.items() if key.startswith("model.rope.scaling.") and source == "size.yml"]
    assert load("none").config.model.rope.scaling is None
    assert load("none").config.model.rope.theta == 5e5
    assert load("none", ["model.rope.scaling={kind: linear, factor: 2}"]).config.model.rope.scaling.factor == 2


def test_every_value_names_who_set_it_last(write):
    write(base=BASE, mid="optimizer: {peak_lr: 1, beta1: 0.5}", own="extends: [base, mid]\noptimizer: {peak_lr: 2}\nrun: {dir: there}")
    loaded = load("own", ["train.steps=20", "mesh={data: 8, fsdp: 1}"])
    expected = {
        "model.d_model": "base.yml",
        "optimizer.beta1": "mid.yml",
        "optimizer.peak_lr": "own.yml",
        "run.dir": "own.yml",
        "train.steps": COMMAND_LINE,
        "mesh.data": COMMAND_LINE,
        "mesh.fsdp": COMMAND_LINE,
        "mesh.tensor": "default",
        "run.name": "the name of own.yml",
    }
    assert {key: loaded.source(key) for key in expected} == expected


@pytest.mark.parametrize("name", RUNS)
def test_sources_and_values_agree(name):
    """A setting without a source has its default; one with a source is a setting that exists."""
    loaded = load(name)
    values = dict(flatten(loaded.config.model_dump(mode="json")))
    bare = Config.model_validate({part: loaded.config.model_dump()[part] for part in ("model", "data", "train")})
    defaults = dict(flatten(bare.model_dump(mode="json")))
    for key, value in values.items():
        without = key.split(".")[0] in ("model", "data", "train", "cluster", "samples") or key.startswith(
            ("precision.matmul.", "memory.offload_state.")
        )
        if loaded.source(key) == "default" and not without:
            assert defaults[key] == value, key
    assert set(loaded.sources) <= set(values) | {key for key in loaded.sources if values.get(key.rpartition(".")[0], 0) is None}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_dumped_loads_to_an_equal_config(name, write):
    config = load(name).config
    write(again=dump(config))
    assert load("again").config == config


ODD = [
    "1e-3",
    "null",
    "true",
    "~",
    " x ",
    "a: b",
    "# no comment",
    "- a",
    "tab\there",
    "two\nlines\n",
    "日本 'quoted' \"twice\"",
    "0x10",
    "x " * 200,
]


def test_odd_texts_and_numbers_survive_a_dump(write):
    write(base=BASE)
    config = load("base", ["optimizer.eps=1e-30", "optimizer.peak_lr=1e22", "train.seed=4294967295"]).config
    run = config.run.model_copy(update={"name": "1e-3"})
    odd = config.model_copy(update={"run": run, "samples": SamplesConfig(prompts=tuple(ODD))})
    write(again=dump(odd))
    assert load("again").config == odd


def test_yaml_means_what_it_says(write):
    """YAML 1.2: `on`, `010` and `12:30:45` are no traps, and 3e-4 is a number."""
    write(base=BASE + "optimizer: {peak_lr: 3e-4, warmup_steps: 010}\nsamples: {prompts: [on, no, 12:30:45]}")
    config = load("base", ["train.steps=20"]).config
    assert (config.optimizer.peak_lr, config.optimizer.warmup_steps) == (3e-4, 10)
    assert config.samples.prompts == ("on", "no", "12:30:45")


@pytest.mark.parametrize("text", ["train: {seed: 1, seed: 2}", "run: {dir: a}\nrun: {name: b}", "model: {rope: {theta: 2, theta: 2}}"])
def test_a_key_given_twice_is_refused(write, text):
    write(base=BASE, own=f"extends: base\n{text}")
    with pytest.raises(UserError, match="duplicate key"):
        load("own")


@pytest.mark.parametrize("override", ["samples.prompts=!!set {a}", "samples={prompts: !!set {a}}"])
def test_a_set_is_refused(write, override):
    """It has no order, and a list is meant."""
    write(base=BASE)
    with pytest.raises(UserError, match=r"is a set .* write a list"):
        load("base", [override])


@pytest.mark.parametrize("text", ["a: &x {b: 1}\nc: *x", "model: &m {rope: *m}", "samples: {prompts: &p [*p]}"])
def test_an_alias_is_refused(write, text):
    write(own=text)
    with pytest.raises(UserError, match="alias"):
        load("own")


def test_derived_sizes_follow_what_they_derive_from(write):
    write(base=BASE)
    model = load("base").config.model
    assert (model.n_kv_heads, model.head_dim) == (4, 4)
    wider = load("base", ["model.d_model=32", "model.n_kv_heads=null"]).config.model
    assert (wider.n_kv_heads, wider.head_dim) == (4, 8)


@pytest.mark.parametrize(
    ("topology", "slices", "devices"),
    [("v5p:4x4x4", 1, 64), ("v5e:4x8", 2, 64), ("tpu7x:2x2x1", 1, 8), ("H200:1x8", 1, 8), ("v6e:2x4", 1, 8)],
)
def test_a_cluster_promises_devices_and_the_mesh_is_held_to_them(write, topology, slices, devices):
    write(base=BASE)
    said = [f"cluster.topology={topology}", f"mesh.slices={slices}", "train.global_batch=64", "mesh.fsdp=4", "mesh.data=-1"]
    config = load("base", said).config
    assert topology_of(config).devices == devices
    assert check_devices(config, devices)["data"] == devices // 4
    with pytest.raises(UserError, match=f"number of devices, {devices}"):
        load("base", [*said, "mesh.data=3"])


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (["mesh.fsdp=5"], "train.global_batch = 8"),
        (["mesh.fsdp=1", "mesh.tensor=3"], "mesh.tensor = 3"),
        (["mesh.tensor=3"], "mesh.tensor = 3"),  # and fsdp = -1
        (["mesh.fsdp=4"], ""),
        (["mesh.tensor=2"], ""),
    ],
)
def test_a_mesh_that_no_number_of_devices_makes_right_is_refused_without_a_cluster(write, sizes, said):
    write(base=BASE)
    config = load("base", sizes).config  # generation uses no batch of the training: only `maxlm config` and the trainer refuse it
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        check_devices(config, None)
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        answer(lambda *_: {}, "base", sizes, None, print, as_json=False)


def test_a_misspelt_folder_of_a_run_is_answered_with_the_run(write):
    write(base=BASE, runs__mine__config=BASE, runs__mind__other=BASE)
    with pytest.raises(UserError, match=r"runs/mien does not exist: .* such as runs/mine\.$"):
        load("runs/mien")


def config_command(*arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(io.StringIO()) as out:
        patched.setattr(sys, "argv", ["maxlm", "config", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert not ended.value.code
    return out.getvalue()


def test_the_shown_config_is_the_resolved_one(write):
    write(base=BASE)
    shown = json.loads(config_command("base", "train.seed=7", "--json"))
    assert shown["train.seed"] == [7, COMMAND_LINE]
    counted = {key: shown.pop(key) for key in list(shown) if key.startswith("counted.")}
    assert {key: value for key, (value, _) in shown.items()} == dict(flatten(load("base", ["train.seed=7"]).config.model_dump(mode="json")))
    lines = {line.split()[0]: line.split()[1] for line in config_command("base", "train.seed=7").splitlines()}
    off = {
        "model.moe",
        "model.sinks",
        "data.mixture",
        "diloco",
        "mesh.across_slices",
    }  # off, or read by nothing: of no interest to a person
    assert off < set(shown)
    assert set(lines) < {*shown, *counted} - off
    assert {key for key, (_, source) in shown.items() if source != "default"} < set(lines)
    assert lines["train.seed"] == "7"
    assert {key: int(lines[key].replace(",", "")) for key in counted} == {key: value for key, (value, _) in counted.items()}


def test_a_diff_shows_what_differs_and_nothing_else(write):
    write(base=BASE, other="extends: base\ntrain: {steps: 99}\nrun: {name: base}")
    shown = json.loads(config_command("base", "--diff", "other", "--json"))
    assert shown == {"train.steps": [10, "base.yml", 99, "other.yml"]}
    (line,) = config_command("base", "--diff", "other").splitlines()
    assert line.split() == ["train.steps", "10", "base.yml", "99", "other.yml"]
    assert config_command("base", "--diff", "base").strip() == "no difference"


def run_folder(path, config, version=__version__):
    path.mkdir(parents=True)
    (path / "config.yml").write_text(f"# Written by maxlm {version}\n{config}")
    return str(path)


def test_two_runs_are_compared_side_by_side_with_the_versions_that_wrote_them(write, tmp_path):
    write(base=BASE)
    base = dump(load("base").config)
    first, second = run_folder(tmp_path / "one", base), run_folder(tmp_path / "two", base.replace("steps: 10", "steps: 99"))
    lines = config_command(first, "--diff", second).splitlines()
    assert [line.split() for line in lines[:2]] == [["one", "two"], ["train.steps", "10", "99"]]
    assert not [line for line in lines if line.startswith(("run.", "written by"))]
    assert json.loads(config_command(first, "--diff", second, "--json"))["train.steps"] == [10, first, 99, second]
    assert config_command(first, "--diff", first).strip() == "no difference"
    older = run_folder(tmp_path / "old" / "one", base + "gone: {away: 3}\n", "0.0.1")
    lines = config_command(second, "--diff", older).splitlines()
    assert lines[1].split("  ")[0] == "written by" and "maxlm 0.0.1" in lines[1]
    assert {tuple(line.split()) for line in lines} >= {("train.steps", "99", "10"), ("gone.away", "–", "3")}


@pytest.mark.parametrize("damaged", [b"", b"[", b"- a", b"\xff\xfe", b"a: &a [*a]", b"model: {"])
def test_a_damaged_run_is_compared_with_nothing(write, tmp_path, damaged, monkeypatch, capsys):
    write(base=BASE)
    whole, torn = run_folder(tmp_path / "one", dump(load("base").config)), run_folder(tmp_path / "two", "")
    (tmp_path / "two" / "config.yml").write_bytes(damaged)
    monkeypatch.setattr(sys, "argv", ["maxlm", "config", whole, "--diff", torn])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, len(printed.err.splitlines())) == (2, "", 1), printed.err
    assert "two/config.yml" in printed.err


def test_a_run_that_another_version_wrote_is_read_with_a_note(write, tmp_path):
    write(base=BASE)
    base = dump(load("base").config)
    (note,) = load(run_folder(tmp_path / "old", base, "0.0.1")).notes
    assert "was written by maxlm 0.0.1, and this is" in note
    assert load(run_folder(tmp_path / "new", base)).notes == ()
    assert load("base").writer is None


def test_the_quickstart_reads_as_a_person_reads_it():
    """The file's own words, key for key, are in the config that it loads to."""
    said = dict(flatten(YAML(typ="safe", pure=True).load((SHIPPED / "runs" / "quickstart.yml").read_text(encoding="utf-8"))))
    values = dict(flatten(load("runs/quickstart").config.model_dump(mode="json")))
    assert {key: values[key] for key in said} == said


def test_what_is_absent_is_written_to_no_file_and_shown_to_nobody():
    """A capability that a run does not use is not in its config.yml, and a null that somebody set is."""
    loaded = load("runs/quickstart", ["optimizer.clip_norm=null", "model.rope.scaling=null"])
    text = dump(loaded.config)
    assert {key for key, value in flatten(YAML(typ="safe", pure=True).load(text)) if value is None} == {"optimizer.clip_norm"}
    assert not any(f"{section}:" in text for section in ("moe", "mtp", "diloco", "pipeline", "wandb", "cluster"))
    lines = config_command("runs/quickstart").splitlines()
    assert len(lines) < 70
    assert not any(" null " in line for line in lines)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_smoke_test_of_any_run_needs_one_setting(name, steps):
    """Warm-up and decay of a file are shortened for the command line's `train.steps`, and that is said."""
    before = load(name).config
    loaded = load(name, [f"train.steps={steps}", *(["train.tokens=null"] if before.train.tokens else [])])
    optimizer = loaded.config.optimizer
    warmup = loaded.config.steps_of(optimizer.warmup_steps, optimizer.warmup_tokens, 0)
    assert warmup < steps and warmup + loaded.config.decay_steps <= steps
    assert bool(loaded.notes) == (before.optimizer != optimizer)
    assert not load(name).notes


@pytest.mark.parametrize(
    ("settings", "warmup", "decay"),
    [
        (["train.steps=5"], 4, 0),
        (["train.steps=5", "optimizer.schedule=wsd"], 4, 1),
        (["train.steps=500", "optimizer.schedule=wsd", "optimizer.decay_steps=485"], 15, 485),
        (["train.steps=1"], 0, 0),
        (["train.steps=21"], 20, 0),
    ],
)
def test_warm_up_and_decay_get_what_room_there_is(write, settings, warmup, decay):
    write(long=f"{BASE.replace('steps: 10', 'steps: 1000')}\noptimizer: {{warmup_steps: 20}}\n")
    loaded = load("long", settings)
    config = loaded.config
    assert (loaded.source("optimizer.warmup_steps") == "long.yml") == (warmup == 20)
    assert (config.optimizer.warmup_steps, config.decay_steps) == (warmup, decay)


def test_a_warm_up_that_the_same_hand_wrote_is_refused_and_not_shortened(write):
    write(short=f"{BASE}\noptimizer: {{warmup_steps: 20}}\n", long=BASE)
    for name, settings in (("short", []), ("long", ["train.steps=5", "optimizer.warmup_steps=20"])):
        with pytest.raises(UserError, match=r"optimizer\.warmup_steps = 20"):
            load(name, settings)


def test_the_folder_of_a_run_is_its_config_wherever_it_lies(write, tmp_path):
    write(elsewhere__mine__config=f"{BASE}\nrun: {{dir: runs, name: first}}\n", both=BASE, both__config=BASE, empty__other=BASE)
    for name, place in (("elsewhere/mine", ("elsewhere", "mine")), (f"{tmp_path}/elsewhere/mine/", (f"{tmp_path}/elsewhere", "mine"))):
        run = load(name).config.run
        assert (run.dir, run.name) == place
    assert load("elsewhere/mine", ["run.name=new"]).config.run.name == "new"
    assert load("elsewhere/mine/config.yml").config.run.dir == "runs", "a file is a config as any"
    assert load("both").config.run.name == "both", "a config of that name wins"
    with pytest.raises(UserError, match=r"empty is a folder without config\.yml"):
        load("empty")


def test_here_is_a_folder_of_a_run_too(write, tmp_path, monkeypatch):
    write(elsewhere__mine__config=BASE)
    monkeypatch.chdir(tmp_path / "elsewhere/mine")
    for name in (".", "../mine"):
        run = load(name).config.run
        assert (run.dir, run.name) == (str(tmp_path / "elsewhere"), "mine")


@pytest.mark.parametrize("line", ["# Written by maxlm 0.0.9\n", ""])
def test_a_saved_config_that_this_version_cannot_read_names_the_version_that_wrote_it(tmp_path, line):
    (tmp_path / RUN_CONFIG).write_text(f"{line}{BASE}future: {{setting: 1}}\n")
    with pytest.raises(UserError, match=r"future.*written by (maxlm 0\.0\.9|another version).* or export the run with that version"):
        load_saved(tmp_path)
    with pytest.raises(UserError, match=r"future.*written by .* or export the run with that version"):
        load(str(tmp_path))
    (tmp_path / RUN_CONFIG).write_text(f"# Written by maxlm {__version__}\n{BASE}future: {{setting: 1}}\n")
    with pytest.raises(UserError, match=r"future.*if an extension registers future, add it with --extension MODULE") as caught:
        load_saved(tmp_path)
    assert "export" not in str(caught.value), "a mistake of today"


def test_a_saved_config_reads_back(tmp_path):
    config = load("runs/quickstart").config
    (tmp_path / RUN_CONFIG).write_text(saved_text(config))
    assert load_saved(tmp_path) == config
