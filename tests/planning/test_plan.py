"""`maxlm plan` from the command line: what it writes is what it chose, Ctrl-C costs nothing, and what cannot be is said in a line."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest

from maxlm import cli
from maxlm.base.errors import UserError
from maxlm.compiler import aot
from maxlm.config.loader import find, load
from maxlm.config.sections.mesh import AXES
from maxlm.cost import expected
from maxlm.cost.verify import Compiler, Verdict, _verdict, step_of
from maxlm.hardware.published_runs import Correction
from maxlm.hardware.topologies import parse
from maxlm.planning import explore, plan as planning
from maxlm.planning.layouts import Layout, LayoutSpace
from maxlm.planning.plan import analytic_model
from maxlm.planning.plan_command import as_yaml

TINY = """
model: {vocab_size: 1024, d_model: 256, n_layers: 4, n_heads: 2, d_ff: 512}
data: {store: unused, seq_len: 512}
train: {steps: 10, global_batch: 8}
"""
# The less a device computes, the sooner the TPU's compiler is done
SMALL = ("model.vocab_size=256", "model.n_layers=2", "model.d_ff=256", "data.seq_len=256")
SAID = ("tiny", "--topology", "v5e:2x2", "train.global_batch=16", "model.rope.theta=5e5", *SMALL)

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu, which holds the TPU compiler: pip install -e '.[tpu]'"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(autouse=True)
def place(folder, monkeypatch):
    """An empty folder with the config `tiny`, and a cache of its own that these tests share."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(explore, "MOST_COMPILES", 2)
    monkeypatch.setattr(explore, "MOST_UNROLLED", 1)
    monkeypatch.setenv("MAXLM_CACHE_DIR", str(folder / "cache"))
    for path in folder.glob("*-planned.*"):
        path.unlink()
    (folder / "tiny.yml").write_text(TINY, encoding="utf-8")


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `maxlm plan`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["maxlm", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
    out, err = capfd.readouterr()
    return end.value.code or 0, out, err


def settings(config, keys) -> dict:
    values = config.model_dump()
    return {key: values[key.partition(".")[0]][key.partition(".")[2]] for key in keys}


@needs_libtpu
def test_the_choice_is_written_and_compiles_to_what_was_promised(capfd, folder, monkeypatch):
    monkeypatch.setattr(explore, "MOST_UNROLLED", 0)
    code, out, _ = run(capfd, *SAID, "--json")
    plan = json.loads(out)
    chosen = plan["chosen"]
    assert code == 0
    assert plan["layouts"]["compiled"] == sum(row["compiled"] for row in plan["frontier"]) <= 2
    assert plan["own"]["step_s"] >= chosen["step_s"]
    loaded = load(plan["config"])
    assert (loaded.config.train.global_batch, loaded.config.model.rope.theta) == (16, 5e5)
    assert loaded.config.cluster.topology == "v5e:2x2"
    assert json.loads(json.dumps(settings(loaded.config, chosen["settings"]))) == chosen["settings"]
    assert set(loaded.sources) - {"run.name"} <= set(load("tiny").sources) | set(chosen["settings"]) | {
        "train.global_batch", "model.rope.theta", "cluster.topology", "cluster.accelerator", "memory.unroll",
    }  # fmt: skip
    topology = parse("v5e:2x2")
    program = aot.build(loaded.config, topology)
    verdict = _verdict(program, topology, step_of(program, topology))
    assert verdict.cached
    assert (verdict.step_s, verdict.needed) == (chosen["step_s"], chosen["needed_bytes"])
    picture = Path(plan["chart"]).read_bytes()
    assert picture.startswith(b"\x89PNG")


@pytest.mark.soak
@needs_libtpu
def test_a_second_run_is_quick_says_the_same_and_overwrites_nothing(capfd, folder):
    first = run(capfd, *SAID, "--json")
    written = Path("tiny-planned.yml").read_text(encoding="utf-8")
    started = time.monotonic()
    second = run(capfd, *SAID, "--json")
    assert time.monotonic() - started < 30
    assert first[:2] == second[:2]
    Path("tiny-planned.yml").write_text("mine: 1\n", encoding="utf-8")
    code, _, err = run(capfd, *SAID)
    assert (code, "tiny-planned.png exists and is not of a plan" in err) == (2, True)
    Path("tiny-planned.png").unlink()
    code, page, err = run(capfd, *SAID)
    assert (code, Path("tiny-planned.yml").read_text(encoding="utf-8")) == (2, "mine: 1\n")
    assert "--out tiny-planned.yml" in err.splitlines()[-1]
    assert "Chosen: " in page
    code, page, _ = run(capfd, *SAID, "--out", "tiny-planned.yml")
    assert (code, Path("tiny-planned.yml").read_text(encoding="utf-8")) == (0, written)
    assert "maxlm train tiny-planned.yml" in page
    assert max(map(len, page.splitlines())) < 200


@needs_libtpu
@pytest.mark.soak
def test_ctrl_c_prints_and_writes_what_was_found(folder):
    """The terminal sends the signal to the compiler's process as well, which must not answer it."""
    command = [sys.executable, "-m", "maxlm", "plan", "tiny", "--topology", "v5e:2x2", "model.d_ff=768"]
    process = fork_server.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines = []
    while not any("(2 of" in line for line in lines):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert "1 compiled; stopped." in out
    assert "Traceback" not in err
    assert load(str(folder / "tiny-planned.yml")).config.model.d_ff == 768


class Careless:
    """Python drops what is raised while it is taken away."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_heard_even_where_python_drops_it():
    with Compiler() as compiler:
        Careless()
        with pytest.raises(KeyboardInterrupt):
            compiler(load("runs/quickstart").config, parse("v5e:2x2"))


@needs_libtpu
def test_a_second_ctrl_c_loses_nothing():
    """The first ends the search; what it found is still to be printed and written."""
    with Compiler():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def answers(monkeypatch):
    """Names of the topologies for which a stand-in for the compiler was asked; it finds a fifth more than is predicted."""
    asked = []

    def stand_in(self, config, topology):
        own = LayoutSpace(config, topology.devices).own()
        said = analytic_model(config, topology).estimate(own)
        asked.append(topology.name)
        return Verdict(said.least_bytes, 2**34, tuple(1.2 * part for part in said.parts), 1.0, cached=False)

    monkeypatch.setattr("maxlm.cost.verify.Compiler.__call__", stand_in)
    return asked


WIDE = ("tiny", "--topology", "v5p:2x2x1", "model.d_model=4096", "model.d_ff=14336", "model.n_heads=32", "data.seq_len=4096")


def test_the_format_is_chosen_where_that_is_allowed(capfd, answers):
    plain, free = (json.loads(run(capfd, *WIDE, *more, "--out", "out.yml", "--json")[1]) for more in ((), ("--any-format",)))
    assert "matmul" not in str(plain["chosen"]["settings"]) and set(plain["quantized"]) == {"int8"}
    assert load("out.yml").config.precision.matmul.format == "int8"
    assert free["mfu_peak"] == "int8" and free["formats"] == {"bf16": plain["chosen"]["step_s"]}
    assert free["chosen"]["step_s"] < plain["chosen"]["step_s"]
    code, page, _ = run(capfd, *WIDE, "--any-format", "--out", "out.yml")
    assert code == 0 and "The fastest layout in bf16: " in page and "MFU" in page
    assert "--any-format" not in page
    assert "published runs took 1." in page and "The schedule alone says " in page


@pytest.mark.parametrize(
    ("error", "said"), [(UserError("Compiler's process ended."), "Compiler's process ended."), (KeyboardInterrupt(), "stopped")]
)
def test_a_plan_outlives_the_search_in_another_format(capfd, answers, monkeypatch, error, said):
    made = iter([planning.make_plan])

    def once(*arguments, **options):
        make = next(made, None)
        if make is None:
            raise error
        return make(*arguments, **options)

    monkeypatch.setattr(planning, "make_plan", once)
    code, page, _ = run(capfd, *WIDE, "--any-format", "--out", "out.yml")
    assert code == 0 and f"--any-format has found nothing, int8: {said}" in page
    assert load("out.yml").config.precision.matmul is None


def test_a_format_that_is_not_faster_is_not_chosen(capfd, answers):
    code, page, _ = run(capfd, *WIDE, "precision.compute=float32", "--any-format", "--out", "plain.yml")
    assert code == 0 and "int8" not in page
    assert load("plain.yml").config.precision.matmul is None


def test_formats_are_compared_by_what_published_runs_in_them_took(capfd, answers, monkeypatch):
    """Were int8 runs to take three times their estimates, bf16 would be the faster."""

    def slow_int8(chip, format, *, experts):
        return Correction(chip.name, "TPUs", (1.0,), 1, middle=3.0 if format == "int8" else 1.0)

    monkeypatch.setattr(expected, "correction", slow_int8)
    plan = json.loads(run(capfd, *WIDE, "--any-format", "--out", "out.yml", "--json")[1])
    assert plan["mfu_peak"] == "bf16"
    assert plan["formats"]["int8"] < plan["chosen"]["step_s"] < 3 * plan["formats"]["int8"] == plan["expected_in"]["int8"]


def test_topologies_are_compared(capfd, answers):
    arguments = ("tiny", "--chips-at-most", "8", "--tokens", "1e12", "train.global_batch=16", "--json")
    code, out, _ = run(capfd, *arguments, "--topology", "v5e:2x2")
    rows = json.loads(out)["machines"]
    assert code == 0
    assert {row["topology"] for row in rows} == {"v5e:1x1", "v5e:2x2", "v5e:2x4"}
    assert [row["run_s"] for row in rows] == sorted(row["run_s"] for row in rows)
    assert all(row["chip_hours"] == pytest.approx(row["run_s"] / 3600 * row["chips"]) for row in rows)
    assert all(row["run_s"] == pytest.approx(1e12 / (16 * 512) * row["expected_step_s"]["middle"]) for row in rows)
    assert all(row["expected_step_s"]["middle"] == pytest.approx(row["correction"]["middle"] * row["step_s"]) for row in rows)
    assert {row["topology"] for row in rows if row["compiled"]} == set(answers)
    for row in rows:
        cost = row["cost"]
        assert cost["wall_s"] == pytest.approx(row["run_s"] / cost["goodput"])
        assert cost["cost"] == pytest.approx(cost["price_per_chip_hour"] * cost["wall_s"] / 3600 * row["chips"])
        assert cost["kwh"] > 0 < cost["kg_co2"]
    assert rows[0]["time_cost_frontier"], "the fastest"
    days = 1.01 * rows[-1]["cost"]["days"]
    limited = json.loads(run(capfd, *arguments, "--topology", "v5e:2x2", "--days-at-most", f"{days}")[1])
    assert limited["cheapest"] == min(rows, key=lambda row: row["cost"]["cost"])["topology"]
    none = run(capfd, *arguments, "--topology", "v5e:2x2", "--dollars-at-most", "0.01")
    assert (none[0], json.loads(none[1])["fastest"]) == (2, None)
    assert not list(Path().glob("*-planned.*"))


@pytest.mark.soak
def test_every_kind_of_chip_is_compared(capfd, answers):
    everything = json.loads(run(capfd, "tiny", "--chips-at-most", "8", "--tokens", "1e12", "train.global_batch=16", "--json")[1])
    assert {row["topology"].partition(":")[0] for row in everything["machines"]} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}


@needs_libtpu
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v5p:3x5x7"], ["v5p:3x5x7", "v5p:4x4x4"]),
        ([], ["names no cluster", "--topology, such as v5p-128 (TPUs) or h100x8 (GPUs)"]),
        (["--topology", "h100:1x2x8"], ["h100:1x2x8", "write it as in h100:2x8"]),
        (["--topology", "v5e:2x2", "--calibration", "absent.json"], ["--calibration absent.json cannot be read"]),
        (["--calibrate"], ["--calibrate measures this machine"]),
        (["--topology", "v5e:8x16", "train.global_batch=7", "data.seq_len=8"], ["128 devices", "train.global_batch = 7"]),
        (["--topology", "v5e:2x2", "train.global_batch=7.5"], ["train.global_batch = 7.5"]),
        (["--topology", "v5e:2x2", "--out", "nowhere/x.yml"], ["nowhere/x.yml", "make it first"]),
        (["--topology", "v5e:2x2", "--out", "."], ["--out . is a folder", "plan.yml"]),
        (["--topology", "v5e:2x2", "diloco={workers: 2, every: 4}"], ["no cost model of local updates (diloco)"]),
        (["--topology", "v5e:2x2", "--out", "tiny.yml"], ["--out tiny.yml", "extends this file"]),
        (["--topology", "v5e:2x2", "--out", "x.png"], ["--out x.png", "ends in .yml"]),
        (["--out", "x.yml", "--chips-at-most", "2"], ["--out goes with one topology"]),
        (["--topology", "v5p:4x4x4", "--chips-at-most", "2"], ["--chips-at-most 2", "at least 4"]),
        (["--any-format", "--chips-at-most", "2"], ["--any-format goes with one topology"]),
        (["--topology", "v5e:2x2", "--days-at-most", "3"], ["--days-at-most", "--chips-at-most N"]),
        (["--topology", "v5e:2x2", "--dollars-at-most", "3"], ["--dollars-at-most", "--chips-at-most N"]),
        (["--topology", "v5e:2x2", "--buy", "auction"], ["--buy auction", "reserved-3y"]),
        (["--topology", "v5e:2x2", "--prices", "none.yml"], ["--prices none.yml: there is no such file; give the path of a file"]),
        (["--topology", "v5e:2x2", "--prices", "tiny.yml"], ["model", "offers"]),
        (["--topology", "v5e:2x2", "model.d_model=16384", "model.n_layers=64", "model.d_ff=65536"], ["No mesh fits", "GiB more than"]),
        (["--topology", "v5e:1x1", "model.d_model=2048", "model.n_layers=19", "model.d_ff=8192"], ["No layout fits", "data.seq_len"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_with_the_fix(capfd, arguments, said):
    code, out, err = run(capfd, "tiny", *arguments)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("maxlm: ")
    for words in said:
        assert words in last


def test_without_libtpu_the_pip_line_is_given(capfd, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    aot.devices.cache_clear()
    code, _, err = run(capfd, "tiny", "--topology", "v5e:2x2")
    assert code == 2
    assert "[tpu]" in err.splitlines()[-1]


def test_a_config_is_found_again_from_wherever_it_is_extended(tmp_path):
    """Shipped ones by name, others by where they lie; overrides and slices come along."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "plans").mkdir()
    (tmp_path / "mine" / "run.yml").write_text("extends: runs/llama3-8b-v5p-128\n", encoding="utf-8")
    for name in ("runs/llama3-8b-v5p-128", str(tmp_path / "mine" / "run.yml")):
        loaded = load(name, ["train.global_batch=512", "mesh.slices=2", "mesh.data=2", "optimizer.warmup_steps="])
        chosen = next(one for one in LayoutSpace(loaded.config, 128) if one.offload and one.across_slices == "fsdp")
        out = tmp_path / "plans" / "out.yml"
        out.write_text(as_yaml(name, loaded, chosen, out, "A remark.\nAnd more."), encoding="utf-8")
        again = load(str(out))
        assert again.config.model_copy(update={"run": loaded.config.run}) == chosen.apply(loaded.config)
        assert find(name).name != "out.yml"


def test_a_plan_leaves_nothing_that_its_mesh_does_not_use(tmp_path):
    """What would be refused when the written config is read: ways of splitting, on axes that the plan does not split."""
    name, said = "runs/llama3-8b-v5p-128", ["train.global_batch=512", "mesh={zero: 1, context: 2, context_attention: gather}"]
    loaded = load(name, said, any_mesh=True)
    chosen = next(one for one in LayoutSpace(loaded.config, 64) if one.sizes["fsdp"] == 1)
    out = tmp_path / "out.yml"
    out.write_text(as_yaml(name, loaded, chosen, out, "A remark."), encoding="utf-8")
    again = load(str(out))
    assert again.config.model_copy(update={"run": loaded.config.run}) == chosen.apply(loaded.config)


def test_a_section_that_was_set_to_nothing_holds_what_the_plan_adds(tmp_path):
    loaded = load("runs/llama3-8b-v5p-128", ["cost="])
    chosen, out = LayoutSpace(loaded.config, 64).own(), tmp_path / "out.yml"
    text = as_yaml("runs/llama3-8b-v5p-128", loaded, chosen, out, "A remark.", {"cost.calibration": "/a/file.json"})
    assert "cost: {calibration: /a/file.json}" in text


def test_a_layout_of_one_device_says_so():
    from maxlm.planning.plan import describe

    one = Layout(tuple((axis, 1) for axis in AXES), 1, 8)
    assert describe(one) == "one device, loss in 8; full"
