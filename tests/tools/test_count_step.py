"""What `tools/count_step.py` refuses, each in a line, and what it prints of operations that were counted."""

import re

import count_step
import pytest
from count_step import Row

from maxlm.base.errors import UserError


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("runs/quickstart", [], "names no machine: give one"),
        ("runs/llama3-1b-v6e-16", ["cluster.topology=h200:2x8", "cluster.accelerator=null"], "only the machine code of TPUs"),
        ("runs/nothing", [], "runs/nothing does not exist"),
    ],
)
def test_bad_input_is_one_line(config, overrides, said, tmp_path):
    with pytest.raises(UserError, match=said) as caught:
        next(count_step.rows(config, overrides, tmp_path, 0.0))
    assert "\n" not in str(caught.value)


def test_lines_add_up_by_kind(capsys):
    part = {"times": 2, "waits": 0.001, "xla": 0.006, "charged": 0.005, "at_peak": 0.002}
    count_step.show([Row("fusion.1", "mlp", "matmul", issued=0.003, **part), Row("fusion.2", "norm", "memory", issued=0.0, **part)])
    count_step.show([Row(f"fusion.{n}", "mlp", "matmul", issued=0.003, **part) for n in range(3)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["2", "matmul", "4.00"] and lines[2].split()[2] == "1.00"
    assert re.search(r"all matmul +12\.0 +3\.0 +18\.0 +15\.0 +6\.0", lines[-1])
