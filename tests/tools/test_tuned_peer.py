"""The tuned peer: its candidates and their search with a compiler that is a stand-in, and the table of three rulers from kept programs."""

import json
import math
import shutil
from pathlib import Path

import maxtext_schedule
import peer_search
import pytest
import tuned_peer
from peer_search import Candidate, Peer, search

STAND_IN = """#!/bin/sh
case "$*" in
*find_spec*) echo /nowhere; exit;;
*fails*) echo no such model; exit 1;;
esac
for word in $(echo "$*"); do case "$word" in *--xla_dump_to=*) folder=${word##*--xla_dump_to=};; esac; done
mkdir -p "$folder"
echo > "$folder/m.jit_train_step.after_optimizations-buffer-assignment.txt"
report="$folder/m.jit_train_step.after_optimizations-memory-usage-report.txt"
printf 'Memory Space: default (color=0)\\nTotal bytes: 4096 (4.0KiB)\\n' > "$report"
sleep 0.4; echo HloModule > "$folder/m.jit_train_step.after_optimizations.txt"
sleep 0.4; echo } >> "$folder/m.jit_train_step.after_optimizations.txt"
exec sleep 60
"""
RULER = """
def estimate(text, chip):
    attention = 2.0 + ("counted_once" in text)
    kernels = {"attention splash_mha_fwd": 2, "attention splash_mha_dkv": 1}
    rest = {"grouped": 0.0, "matmul": 0.5, "other": 0.0, "exposed": 0.25}
    return {"total_s": 3.0 + attention, "attention": attention, **rest, "kernels": kernels}
"""
CASE = """cases:
  - name: tiny
    title: A tiny step
    topology: v5p:2x2x1
    model: llama3.1-8b
    batch: 4
    sequence: 4096
    ours: runs/llama3-8b-v5p-128
    experts: true
"""
PROGRAMS = Path(__file__).resolve().parents[1] / "hlo" / "programs"
KNOBS = {
    "keep": dict.fromkeys(("none", "few", "some", "most", "all"), ()),
    "steps": dict.fromkeys(("2", "1"), ()),
    "flags": dict.fromkeys(("defaults", "better"), ()),
}
START = {"keep": "some", "steps": "2", "flags": "defaults"}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder with one case, a page and a ruler."""
    (tmp_path / "cases.yml").write_text(CASE)
    (tmp_path / "page.md").write_text(f"# Page\n\n{tuned_peer.BEGIN}\nold\n{tuned_peer.END}\n\nAfter.\n")
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler" / "hlo_cost_scheduled.py").write_text(RULER)
    monkeypatch.setattr(tuned_peer, "CASES", tmp_path / "cases.yml")
    monkeypatch.setattr(tuned_peer, "CHOSEN", tmp_path / "chosen.yml")
    monkeypatch.setattr(tuned_peer, "PAGE", tmp_path / "page.md")
    monkeypatch.delitem(tuned_peer.sys.modules, "hlo_cost_scheduled", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "ruler"))
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["tuned_peer.py", *map(str, arguments)])
        tuned_peer.main()
        return capsys.readouterr().out

    return main


def price(choice):
    """Seconds of a made-up machine: all kept does not fit, nor most in one batch."""
    rung, steps = list(KNOBS["keep"]).index(choice["keep"]), int(choice["steps"])
    if rung + 2 - steps > 3:
        return math.inf
    return 10 - rung + 0.5 * steps - (choice["flags"] == "better")


def test_the_first_attempt_is_an_expert_s():
    case, _ = tuned_peer.read_cases()["8x7b-v5p"]
    settings, flags = case.row(case.start).to_compile
    said = dict(setting.split("=", 1) for setting in settings)
    assert (case.ours, said["compile_topology"], said["sa_block_q_dkv"], said["remat_policy"]) == (
        "runs/mixtral-8x7b-v5p-256",
        "v5p-256",
        "1024",
        "custom",
    )
    assert int(said["per_device_batch_size"]) * int(said["gradient_accumulation_steps"]) == case.batch
    assert said["moe_mlpwi_0"] == said["moe_mlpwi_1"] == "device"
    assert "--xla_tpu_scoped_vmem_limit_kib=65536" in flags
    assert "--xla_tpu_enable_sparse_core_collective_offload_all_gather=true" in flags


def test_every_choice_trains_as_many_tokens():
    for case, chosen in tuned_peer.read_cases().values():
        for steps in case.knobs["steps"]:
            said = dict(one.split("=", 1) for one in case.row({**case.start, "steps": steps}).settings)
            assert int(said["per_device_batch_size"]) * int(said["gradient_accumulation_steps"]) == case.batch
        assert all(chosen[knob] in options for knob, options in case.knobs.items() if chosen)


def test_experts_may_be_over_an_axis():
    case, _ = tuned_peer.read_cases()["v2-lite-v5e"]
    row = case.row({**case.start, "mesh": "expert 4"})
    assert row.mesh == {"fsdp": 16, "expert": 4} and "ici_expert_parallelism=4" in row.settings


@pytest.mark.parametrize("keep", KNOBS["keep"])
def test_search_finds_the_fastest_that_fits(keep):
    """From every start, those that do not fit included; in one batch less is kept."""
    best, tried = search(KNOBS, {**START, "keep": keep}, price, 40, _never)
    assert best == {"keep": "most", "steps": "2", "flags": "better"} and tried < 20
    assert price(best) == min(price({"keep": k, "steps": s, "flags": f}) for k in KNOBS["keep"] for s in ("1", "2") for f in KNOBS["flags"])


def test_search_keeps_to_its_budget_and_repeats_nothing():
    asked = []

    def seconds(choice):
        asked.append(tuple(choice.values()))
        return price(choice)

    best, tried = search(KNOBS, START, seconds, 3, _never)
    assert len(asked) == len(set(asked)) == tried == 3
    assert price(best) == min(price(dict(zip(KNOBS, one, strict=True))) for one in asked)


def test_nothing_that_fits_is_no_choice_but_the_start():
    best, tried = search(KNOBS, START, lambda choice: math.inf, 6, _never)
    assert best == START and tried == 6


def test_what_should_not_fit_is_not_tried():
    """All kept would not fit by a known candidate: it is asked of once, and costs no candidate."""
    asked = []

    def seconds(choice):
        asked.append(choice["keep"])
        return price(choice)

    best, tried = search(KNOBS, {**START, "keep": "all"}, seconds, 40, lambda choice: choice["keep"] == "all")
    assert best["keep"] == "most" and "all" not in asked and tried == len(asked)


def test_memory_is_expected_from_a_candidate():
    """Of Llama 3.1 8B: a list of q, k, v and attention, 2 x 8,192 tokens a step in bfloat16 over 32 layers; gate and up are 14,336 wide."""
    case, _ = tuned_peer.read_cases()["8b-v5p"]
    memory = peer_search.Memory(case, tuned_peer.load(case.ours).config.model)
    hidden = 2 * 32 * 2 * 8192 * (4 * 4096 + 2 * 1024 + 2 * 14336)
    assert memory.expected(case.start) == hidden + 12 * 8_030_261_248 // 64
    memory.learn(case.start, 60 << 30)
    less = {**case.start, "keep": "q, k, v, attention, its projection"}
    assert memory.expected(case.start) - memory.expected(less) == 2 * 32 * 2 * 8192 * 2 * 14336
    state, kept = 12 * 8_030_261_248 // 64, 4096 + 3 * 4096 + 2 * 1024
    temporaries = (60 << 30) - state - hidden
    longer = memory.expected({**less, "steps": "1"}) - memory.expected(less)
    assert longer == 2 * 32 * 2 * 8192 * kept + temporaries


def _never(choice):
    return False


def test_a_candidate_is_scheduled_once(tmp_path):
    """A failure is kept as well, and other settings have a program of their own."""
    calls = []

    def compiles(python, settings, flags, out):
        calls.append(settings)
        if "gradient_accumulation_steps=4" in settings:
            raise RuntimeError("some lines\nRan out of memory in memory space hbm.\n")
        out.write_text("HloModule\n}\n")
        return 4096

    case, _ = tuned_peer.read_cases()["8b-v5p"]
    row, other = case.row(case.start), case.row({**case.start, "steps": "4"})
    peer = Peer(Path("python"), tmp_path, compiles)
    first = peer.candidate(row)
    assert (peer.candidate(row), len(calls)) == (first, 1) and first.problem(4096) == ""
    assert first.problem(4095).startswith("needs 0.0 of")
    assert (
        peer.candidate(other).problem(1 << 40)
        == peer.candidate(other).problem(1 << 40)
        == "refused: Ran out of memory in memory space hbm."
    )
    assert len(calls) == 2
    with pytest.raises(RuntimeError, match="give --maxtext-python"):
        Peer(None, tmp_path / "other").candidate(row)


def test_what_xla_recomputes_by_itself_is_skipped(tmp_path):
    program = tmp_path / "a.hlo"
    program.write_text(
        "ENTRY e {\n  %fusion.3.remat2 = f32[] fusion()\n  ROOT %copy.remat = f32[] copy()\n  %x = f32[] add(), calls=%a.remat\n}\n"
    )
    case, _ = tuned_peer.read_cases()["8b-v5p"]
    assert Candidate(case.row(case.start), program, 1).problem(2) == "XLA recomputes 2 operations of its own choice"


def test_search_writes_what_it_chose(run, folder, monkeypatch):
    """Without MaxText the page can be written again."""
    monkeypatch.setattr(tuned_peer, "available_hbm", lambda machine: 1 << 40)
    monkeypatch.setattr(tuned_peer, "compile_ours", _no_compiler)
    monkeypatch.setattr(peer_search.Peer.__init__, "__defaults__", (_compiles,))
    page = run(folder / "out", "--neutral", folder / "ruler", "--maxtext-python", "python", "--search")
    _, chosen = tuned_peer.read_cases()["tiny"]
    assert chosen["tried"] == peer_search.BUDGET and chosen["keep"] == "q, k, v, attention, its projection, gate, up"
    assert run(folder / "out", "--neutral", folder / "ruler") == page
    text = (folder / "page.md").read_text()
    assert text.startswith("# Page\n") and text.endswith("\n\nAfter.\n") and "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| A tiny step"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    # Attention has 2 x 2 + 4 matmuls, 9 with five in the fused backward pass: a quarter of a second more of two
    assert cells[1:4] == ["5.00", "5.00 (5.25)", "1.00 (1.00)"] and cells[4:7] == ["not compiled", "not compiled", "–"]
    assert "With one turn of our loops for uneven loads ours takes 5.00 s" in text
    alone = next(line for line in run(folder / "out").splitlines() if line.startswith("| A tiny step"))
    assert [cell.strip() for cell in alone.split("|")[1:-1]] == [cells[0], "–", "–", "–", *cells[4:]]
    assert (folder / "page.md").read_text() == text


def _compiles(python, settings, flags, out):
    shutil.copy(PROGRAMS / "kernels.hlo", out)
    return 4096


def _no_compiler(case, out, *, machine_code):
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PROGRAMS / "kernels.hlo", out)
    out.with_suffix(".json").write_text(json.dumps({"mesh": {"fsdp": 4}, "links": {"fsdp": {"dims": 2, "torus": [0, 1]}}}))


def test_kernels_in_fusions_stand_alone():
    """As the neutral ruler reads programs: a statement a line, and a kernel by its own name, also where its result is used."""
    text = """HloModule m

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %gmm.5 = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"a":"b"
}}, metadata={op_name="x"}
}

ENTRY %e (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  %fusion.1 = (f32[4]{0}, f32[8]{0}) fusion(%q), kind=kCustom, calls=%fused
  %fusion.12 = f32[8]{0} fusion(%q), kind=kLoop, calls=%other
  ROOT %r = f32[4]{0} get-tuple-element(%fusion.1), index=0
}
"""
    lines = tuned_peer.kernels_alone(text).splitlines()
    rest = 'custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={"a":"b"}}, metadata={op_name="x"}'
    assert (
        f"  %gmm.fusion.1 = f32[4]{{0}} custom-call(%p), {rest}" in lines
        and f"  ROOT %gmm.5 = f32[4]{{0}} custom-call(%p), {rest}" in lines
    )
    assert "  %fusion.12 = f32[8]{0} fusion(%q), kind=kLoop, calls=%other" in lines
    assert lines[-2:] == ["  ROOT %r = f32[4]{0} get-tuple-element(%gmm.fusion.1), index=0", "}"]


@pytest.mark.parametrize(
    ("kernels", "times"),
    [
        ({"attention splash_mha_fwd": 1, "attention splash_mha_dkv": 1}, 7 / 6),
        ({"attention splash_mha_fwd": 1, "attention splash_mha_dkv": 1, "attention splash_mha_dq": 1}, 1),
        ({"grouped gmm": 3}, 1),
    ],
)
def test_a_fused_backward_pass_has_five_matmuls(kernels, times):
    assert tuned_peer.fifth_matmul(kernels) == pytest.approx(times)


def test_a_program_is_scheduled_once(tmp_path):
    """By a stand-in for MaxText, which has to be ended: it writes the program piece by piece, and goes on."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    wanted = {"a": (("compile_topology=v5e-8",), ("--x=1",)), "b": (("fails",), ())}
    maxtext_schedule.schedule_missing(python, wanted, tmp_path / "out")
    assert (tmp_path / "out" / "a.hlo").read_text() == "HloModule\n}\n"
    assert not (tmp_path / "out" / "b.hlo").exists()
    assert maxtext_schedule.schedule(python, *wanted["a"], tmp_path / "again.hlo") == 4096
    python.unlink()
    maxtext_schedule.schedule_missing(python, {"a": wanted["a"]}, tmp_path / "out")


@pytest.mark.parametrize(("flags", "given"), [((), []), (("--x=1", "--y=2"), ["compile_xla_flags=--x=1 --y=2"])])
def test_machine_code_is_compiled_with_its_flags(tmp_path, flags, given):
    """MaxText refuses an empty setting."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ $# = 2 ] && echo /maxtext && exit\nshift 2\nfile=$1\nshift\nprintf "%s\\n" "$@" > "$file"\n')
    python.chmod(0o755)
    maxtext_schedule.compile_whole(python, ("compile_topology=v5e-8",), flags, tmp_path / "a.hlo")
    arguments = (tmp_path / "a.hlo").read_text().splitlines()
    assert "compile_topology=v5e-8" in arguments and [one for one in arguments if one.startswith("compile_xla_flags")] == given


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["out", "--search"], "--search compares by the neutral ruler: give --neutral"),
        (["out", "--neutral", "nowhere"], "has no hlo_cost_scheduled.py: give the folder"),
        (["out", "--neutral", "ruler", "huge"], "huge is no case"),
    ],
)
def test_bad_input_is_an_error(run, folder, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    assert end.value.code == 2 and said in capsys.readouterr().err.splitlines()[-1]
