"""Matmuls of a compiled program by the number formats that they read: FLOPs, seconds and peaks; what falls back is named."""

import itertools
import re
from dataclasses import replace

import pytest
from tiny import tiny_config

from maxlm.cost.compile_report import formats_line
from maxlm.cost.pricing import format_of
from maxlm.cost.quantized_matmuls import check
from maxlm.cost.step_cost import estimate
from maxlm.hardware.chips import CHIPS, HBM_LATENCY_S, chip_named
from maxlm.hlo import parser
from maxlm.models import mfu_format

N = 4096
DOT = "dim_labels=bf_io->bf"
PROGRAM = f"""HloModule formats, is_scheduled=true

%quantized (x: bf16[{N},{N}], w: s8[{N},{N}]) -> s32[{N},{N}] {{
  %x = bf16[{N},{N}]{{1,0}} parameter(0)
  %w = s8[{N},{N}]{{1,0}} parameter(1)
  %q = s8[{N},{N}]{{1,0}} convert(%x)
  ROOT %y = s32[{N},{N}]{{1,0}} convolution(%q, %w), {DOT}
}}

%widened (x: bf16[{N},{N}], w: s8[{N},{N}]) -> f32[{N},{N}] {{
  %x.1 = bf16[{N},{N}]{{1,0}} parameter(0)
  %w.1 = s8[{N},{N}]{{1,0}} parameter(1)
  %wide = bf16[{N},{N}]{{1,0}} convert(%w.1)
  ROOT %y.1 = f32[{N},{N}]{{1,0}} convolution(%x.1, %wide), {DOT}
}}

ENTRY %main () -> () {{
  %a = bf16[{N},{N}]{{1,0}} parameter(0)
  %b = s8[{N},{N}]{{1,0}} parameter(1)
  %e = f8e4m3fn[{N},{N}]{{1,0}} parameter(2)
  %g = f8e5m2[{N},{N}]{{1,0}} parameter(3)
  %low = s32[{N},{N}]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%quantized
  %high = f32[{N},{N}]{{1,0}} fusion(%a, %b), kind=kOutput, calls=%widened
  ROOT %float = f32[{N},{N}]{{1,0}} convolution(%e, %g), {DOT}
}}
"""
V5P = chip_named("v5p")
SIZES = {"data": 1, "stage": 1, "fsdp": 1, "context": 1, "tensor": 1, "expert": 1}


def test_a_matmul_counts_as_what_its_dot_reads():
    """A fusion that widens int8 weights runs a bf16 dot, and one that quantizes runs an int8 dot."""
    cost = estimate(parser.read(PROGRAM), V5P, SIZES, {})
    rows = {row.operands: row for row in cost.formats}
    assert {operands: (row.format, row.flops) for operands, row in rows.items()} == {
        "s8": ("int8", 2 * N**3),
        "bf16": ("bf16", 2 * N**3),
        "f8e4m3fn x f8e5m2": ("e4m3", 2 * N**3),
    }
    assert sum(row.seconds for row in cost.formats) == pytest.approx(cost.matmul_s)
    share = V5P.reached.scheduled_matmul[0]
    least = {name: 2 * N**3 / (share * V5P.peak_bf16_flops * V5P.matmul_speed(row.format)) for name, row in rows.items()}
    assert {name: row.seconds for name, row in rows.items()} == {
        name: pytest.approx(HBM_LATENCY_S + s, rel=1e-6) for name, s in least.items()
    }
    assert rows["s8"].share_of_peak == pytest.approx(2 * N**3 / rows["s8"].seconds / 918e12)
    assert rows["bf16"].share_of_peak == pytest.approx(2 * N**3 / rows["bf16"].seconds / 459e12)
    assert re.search(r"bf16 \d+% \(at 97% of the bf16 peak\)", formats_line(cost, V5P))
    assert re.search(r"f8e4m3fn x f8e5m2 \d+% \(at \d+% of the bf16 peak\)", formats_line(cost, V5P)), "no peak of fp8 is published"


@pytest.mark.parametrize("name", ["v4", "v5p"])
def test_matmuls_are_charged_by_the_vmem_that_our_flags_give_a_chip(name):
    """A program for v4 keeps XLA's own limit, for v5p it has more; a program of others states its own limit."""
    chip, module = chip_named(name), parser.read(PROGRAM)
    seconds = {raised: estimate(replace(module, raised_vmem=raised), chip, SIZES, {}).matmul_s for raised in (None, True, False)}
    assert seconds[True] < seconds[False] and seconds[None] == seconds[name == "v5p"]


@pytest.mark.parametrize(
    ("operands", "format"),
    [
        ("bf16", "bf16"),
        ("f32", "bf16"),
        ("s8", "int8"),
        ("bf16 x s8", "bf16"),
        ("f8e4m3fn x f8e5m2", "e4m3"),
        ("f8e5m2", "e5m2"),
        ("", "bf16"),
    ],
)
def test_the_slower_operand_decides(operands, format):
    assert format_of(operands) == format


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_formats_of_a_chip(chip):
    """8 bits have at most twice the peak of bf16, and no compiled matmul beats the ratio of published peaks by more than 5%."""
    for format in ("int8", "e4m3", "e5m2"):
        ratio = chip.peak_flops(format) / chip.peak_bf16_flops
        assert 1 <= ratio < 2.01
        published = chip.peak_int8_ops if format == "int8" else chip.peak_fp8_flops
        assert published is None or chip.matmul_speed(format) <= 1.05 * ratio
    assert chip.matmul_speed("bf16") == 1


@pytest.mark.parametrize(
    ("matmul", "format"),
    [
        (None, "bf16"),
        ({"format": "int8"}, "int8"),
        ({"format": "fp8"}, "e4m3"),
        ({"format": "mxfp8"}, "e4m3"),
        ({"format": "int8", "weights_only": True}, "bf16"),
        ({"format": "int4", "weights_only": True}, "bf16"),
    ],
)
def test_mfu_is_a_share_of_the_peak_of_the_format_that_multiplies(matmul, format):
    assert mfu_format(tiny_config(precision={"compute": "bfloat16", "matmul": matmul}).precision.matmul) == format


ROWS, WIDE, DEEP = 512, 64, 128  # of the tiny model, on one device


def program(*dots: tuple[str, int, int, int, int]) -> parser.Module:
    """A program with dots of (dtype, rows, in, out) and how often each runs."""
    lines = []
    for number, (dtype, rows, wide_in, wide_out, times) in enumerate(dots):
        for turn in range(times):
            name = f"{number}.{turn}"
            lines += [
                f"  %a{name} = {dtype}[{rows},{wide_in}]{{1,0}} parameter(0)",
                f"  %b{name} = {dtype}[{wide_in},{wide_out}]{{1,0}} parameter(1)",
                f"  %y{name} = f32[{rows},{wide_out}]{{1,0}} convolution(%a{name}, %b{name}), {DOT}",
            ]
    return parser.read("HloModule m, is_scheduled=true\n\nENTRY %main () -> () {\n" + "\n".join(lines) + "\n}\n")


def problems(*dots: tuple[str, int, int, int, int], model: dict | None = None, **matmul) -> list[str]:
    config = tiny_config(precision={"compute": "bfloat16", "matmul": {"format": "int8", **matmul}}, model=model or {})
    assert (config.tokens_per_step, config.model.d_model, config.model.d_ff) == (ROWS, WIDE, DEEP)
    return [row.problem for row in check(config, program(*dots), SIZES) if row.problem]


def three(name: str, *, wide_in: int, wide_out: int, layers: int) -> list[tuple[str, int, int, int, int]]:
    """The dots of `layers` matmuls, forward and backward."""
    return [(name, ROWS, wide_in, wide_out, layers), (name, ROWS, wide_out, wide_in, layers), (name, wide_in, ROWS, wide_out, layers)]


SQUARE = three("s8", wide_in=WIDE, wide_out=WIDE, layers=4)  # query and out
NARROW = three("s8", wide_in=WIDE, wide_out=32, layers=4)  # key and value
MLP = three("s8", wide_in=WIDE, wide_out=DEEP, layers=6)  # gate, up and down
VOCABULARY = three("bf16", wide_in=WIDE, wide_out=256, layers=1)


def test_a_program_that_does_what_it_should_has_no_problem():
    assert problems(*SQUARE, *NARROW, *MLP, *VOCABULARY) == []


def test_what_is_missing_or_wider_is_named():
    missing = [dot for dot in MLP if dot != MLP[1]]
    (problem,) = problems(*SQUARE, *NARROW, *missing)
    assert problem == "precision.matmul: of gate and up and down, 67% of the FLOPs that should have 8-bit operands do."
    recomputed = ("bf16", ROWS, WIDE, 32, 1)  # once more, in bf16
    (problem,) = problems(*SQUARE, *NARROW, recomputed, *MLP)
    assert problem.startswith("precision.matmul: matmuls of key and value with 2.1e+06 FLOPs a step have operands of more than 8 bits")


def test_what_the_compiler_makes_one_matmul_counts_as_its_parts():
    """XLA:GPU multiplies by key and value at once."""
    forward, *gradients = three("s8", wide_in=WIDE, wide_out=16, layers=4)
    merged = (forward[0], ROWS, WIDE, 2 * 16, forward[-1] // 2)
    others = (*SQUARE, *gradients, *MLP)
    assert problems(merged, *others, model={"n_kv_heads": 2}) == []
    (problem,) = problems(("bf16", *merged[1:]), *others, model={"n_kv_heads": 2})
    assert problem == "precision.matmul: of key and value, 67% of the FLOPs that should have 8-bit operands do."


@pytest.mark.parametrize(("heads", "names"), [(8, "qkv"), (8, "kv"), (8, "qk"), (4, "qkv"), (4, "kv"), (4, "qk"), (2, "qkv")])
@pytest.mark.parametrize("lacks", [False, True], ids=["", "one is bf16"])
def test_merged_attention_of_any_number_of_key_heads(heads, names, lacks):
    """As wide as two queries, as one query, or as gate and up: what a matmul stands for is not told by its width alone."""
    wide = {"q": WIDE, "k": 8 * heads, "v": 8 * heads}
    dots = [("s8", ROWS, WIDE, sum(wide[name] for name in names), 2)]  # forward, in two layers
    dots += [("s8", ROWS, WIDE, wide[name], 2) for name in wide if name not in names]
    gradients = [dot for name in wide for dot in three("s8", wide_in=WIDE, wide_out=wide[name], layers=2)[1:]]
    others = [*gradients, *three("s8", wide_in=WIDE, wide_out=WIDE, layers=2), *MLP]
    first = [("bf16", *dots[0][1:]), *dots[1:]] if lacks else dots
    assert bool(problems(*first, *others, model={"n_kv_heads": heads})) == lacks


def test_latent_attention_makes_keys_and_values_in_one_matmul():
    latent = {"n_kv_heads": 8, "latent": {"q_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}}
    sizes = {"query_down": (WIDE, 24), "query": (24, 8 * 12), "kv_down": (WIDE, 20), "kv": (16, 8 * 16), "out": (WIDE, WIDE)}
    dots = {name: three("s8", wide_in=wide_in, wide_out=wide_out, layers=2) for name, (wide_in, wide_out) in sizes.items()}
    assert problems(*itertools.chain(*dots.values()), *MLP, model=latent) == []
    (problem,) = problems(*itertools.chain(*(dots[name] for name in sizes if name != "kv")), *MLP, model=latent)
    assert problem.startswith("precision.matmul: of kv, 0%")


def test_what_is_meant_to_be_wide_may_be():
    skipped = three("bf16", wide_in=WIDE, wide_out=DEEP, layers=2)
    others = three("s8", wide_in=WIDE, wide_out=DEEP, layers=4)
    assert problems(*SQUARE, *NARROW, *skipped, *others, skip=("down",)) == []
    assert len(problems(*SQUARE, *NARROW, *skipped, *others)) == 1
    forward = [dot if n % 3 == 0 else ("bf16", *dot[1:]) for n, dot in enumerate([*SQUARE, *NARROW, *MLP])]
    assert problems(*forward, gradients="bf16") == []
    assert len(problems(*forward)) == 3


def test_a_format_that_a_chip_does_not_have_is_charged_what_its_machine_code_takes():
    """XLA estimates about as many cycles for int8 on tpu7x as for bf16, and twice as many are issued."""
    chip = chip_named("tpu7x")
    (row,) = (row for row in estimate(parser.read(PROGRAM), chip, SIZES, {}).formats if row.format == "int8")
    work_s = 2 * N**3 / (chip.reached.scheduled_matmul[0] * chip.peak_bf16_flops_per_device * chip.matmul_speed("int8"))
    assert row.seconds == pytest.approx(HBM_LATENCY_S + work_s) and chip.matmul_speed("int8") < 0.6
