"""Rows of public runs of MaxText: what they state can be compiled, priced and compared."""

import math
from collections import Counter

import pytest
import truth

from maxlm.hardware import topologies

ROWS = {row.name: row for row in truth.read_rows()}
STATED = {  # TFLOP/s a chip in tpu-recipes training/ironwood/README.md, where MaxText counts attention as we do
    "llama3.1-70b-tpu7x-4x4x4": 1207.05,
    "llama3.1-405b-tpu7x-4x8x8": 1261.40,
    "llama3.1-70b-128k-tpu7x-4x8x8": 897.94,
    "deepseek-v3-tpu7x-4x4x8": 607.53,
    "qwen3-235b-tpu7x-4x8x8": 629.79,
    "gpt-oss-120b-tpu7x-4x4x4": 378.90,
}


def test_settings_and_flags_are_stated_once():
    """MaxText refuses a flag that is given twice, and a group that does not exist would be handed to it as a setting."""
    assert len(ROWS) == len(truth.read_rows()) >= 50
    for row in ROWS.values():
        for words in row.to_compile:
            assert all("=" in word for word in words), row.name
            assert max(Counter(word.split("=")[0] for word in words).values()) == 1, row.name
        assert row.seconds > 0 and topologies.parse(row.topology).devices == math.prod(row.mesh.values())


@pytest.mark.parametrize("name", STATED)
def test_model_flops_are_those_that_maxtext_counts(name):
    assert ROWS[name].published_mfu == pytest.approx(STATED[name] / 2307, rel=2e-3)


def test_the_best_published_mfu_is_in_our_count_and_as_its_page_has_it():
    assert "| v5p | 69.7% | 71.5% | 32b-v5p-128 |" in list(truth.best_mfu(list(ROWS.values())))


def links(name):
    row = ROWS[name]
    return dict(truth.links(row, topologies.parse(row.topology)))


def test_axes_lie_on_the_torus_as_jax_lays_them():
    """An axis over the two devices of a chip has no links of its own, and groups of one device a chip share those of the other axis."""
    two = links("deepseek-v3-tpu7x-4x8x8")
    assert (two["fsdp"].torus, two["fsdp"].rows, two["fsdp_transpose"].torus) == ((0, 1, 2), 2, ())
    rings = links("llama4-maverick-v5p-256")
    assert (rings["fsdp"].torus, rings["tensor"].torus, rings["tensor"].wrapped) == ((1, 2), (0,), True)
    assert links("32b-v5p-128")["fsdp"].dims == 2 and links("llama3.1-70b-v6e-256")["fsdp"].dims == 2


def test_squares_of_four_chips_share_their_links_with_the_axis_across_them():
    """MaxText's hybrid ring on v6e: both axes have what two open dims carry."""
    found = links("mixtral-8x22b-v6e-256")
    assert {axis: (one.dims, one.wrapped) for axis, one in found.items()} == {"fsdp": (2, False), "expert": (2, False)}


def test_rows_without_a_program_keep_their_line_and_the_reason_for_their_error(tmp_path):
    """A page written from a folder that lacks programs differs in its date and in the rows that it says are of an earlier day."""
    before = (truth.REPOSITORY / "docs" / "lab" / "truth.md").read_text(encoding="utf-8")
    after = truth._page(list(ROWS.values()), tmp_path)
    dated = "without", "## Rows of an earlier day"
    told = "By the prices of then: "

    def kept(page):
        return [line for line in page.splitlines() if line and not line.endswith(dated) and not line.startswith(told)]

    assert kept(after) == kept(before)
    (earlier,) = (line for line in after.splitlines() if line.startswith(told))
    assert earlier.startswith(f"{told}llama3.1-8b-v6e-8, ") and "llama3.1-8b-v6e-8 (+36%): Copies" in after
