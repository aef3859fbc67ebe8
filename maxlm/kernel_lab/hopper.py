"""`python -m maxlm.kernel_lab.hopper OPERATION IMPLEMENTATION SHAPE [HEADS]`: compile for an H200, without the hardware.

Prints a JSON line of the program's memory, then one a kernel. Mosaic GPU turns a kernel into machine code without a GPU: ptxas prints
its registers, nvdisasm its code. A process of its own, since the environment is read when libraries are loaded, and since
they print from C++.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from maxlm.base.errors import UserError
from maxlm.base.host import python_command
from maxlm.compiler.gpu_compiler import devices, make_ready, missing, show_tools
from maxlm.hardware.topologies import parse

if TYPE_CHECKING:
    import jax

    from maxlm.kernel_lab.problems import Problem

_DUMP = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
_KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_NOTE = re.compile(r"(?:warning|\(C75\d+\)).*in (?:the )?function '(\w+)'")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code: registers a thread at launch, bytes that spill, what ptxas warns of, instructions by opcode; bytes of
    shared memory that a block is launched with, 0 if the program does not state it.

    Among the warnings is the one that costs most: wgmma that are serialized wait for each other's results.
    """

    name: str
    target: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    warnings: tuple[str, ...]
    opcodes: dict[str, int]
    shared: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes of a program's results and of its temporaries."""

    results: int
    temporaries: int


def kernels_of(operation: str, implementation: str, shape: str, heads: int = 8) -> list[Kernel]:
    """Forward and backward at `shape`, attention of so many query heads. Raises UserError when they do not compile."""
    return [Kernel(**printed) for printed in _printed(operation, implementation, shape, heads)[1:]]


def memory_of(operation: str, implementation: str, shape: str, heads: int = 8) -> Memory:
    """Memory of the same program. Raises UserError when it does not compile."""
    return Memory(**_printed(operation, implementation, shape, heads)[0])


def _printed(operation: str, implementation: str, shape: str, heads: int) -> list[dict[str, Any]]:
    if missing():
        raise UserError(f"{operation} {implementation} cannot be compiled: {missing()}.")
    command = python_command("-m", "maxlm.kernel_lab.hopper", operation, implementation, shape, str(heads))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{operation} {implementation} at {shape} does not compile for an H200: {done.stderr.strip()[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def compile_for_h200(problem: "Problem") -> tuple[Memory, list[Kernel]]:
    """Memory and Mosaic GPU kernels of our step, in bfloat16. Only in a process that has not loaded jax yet: see `main`."""
    targets = devices(parse("h200:1x1"))
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(targets, ("x",))
    whole = NamedSharding(mesh, PartitionSpec())
    arguments = [*((size, "bfloat16") for size in problem.sizes), *((array.shape, array.dtype) for array in problem.given)]
    placed = [jax.ShapeDtypeStruct(size, dtype, sharding=whole) for size, dtype in arguments]
    with tempfile.TemporaryFile() as output, jax.set_mesh(mesh):
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(output.fileno(), 1)  # the compiler prints from C++
        try:
            lowered = jax.jit(problem.step("ours")).lower(*placed)
            show_tools()
            memory: Any = lowered.compile().memory_analysis()  # never None on a GPU
        finally:
            os.dup2(stdout, 1)
        output.seek(0)
        shared = shared_memory(lowered)
        kernels = [replace(kernel, shared=shared.get(kernel.name, 0)) for kernel in read(output.read().decode())]
        return Memory(memory.output_size_in_bytes, memory.temp_size_in_bytes), kernels


def shared_memory(lowered: "jax.stages.Lowered") -> dict[str, int]:
    """Bytes of shared memory that each Mosaic GPU kernel of the program is launched with: ptxas sees only what is static."""
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    bytes_by_kernel = {}
    for call in _operations(lowered.compiler_ir()):
        if call.name != "stablehlo.custom_call" or "mosaic_gpu" not in str(call.attributes["call_target_name"]):
            continue
        code = ir.StringAttr(ir.DictAttr(call.attributes["mhlo.backend_config"])["module"]).value_bytes
        with make_ir_context() as context:
            context.allow_unregistered_dialects = True
            module = ir.Module.parse(code)
            name = ir.StringAttr(module.operation.attributes["sym_name"]).value
            launch = next(one for one in _operations(module) if one.name.endswith("gpu.launch"))  # behind a version of the dialect
            bytes_by_kernel[f"{name}_mosaic_gpu_kernel"] = ir.IntegerAttr(launch.operands[-1].owner.attributes["value"]).value
    return bytes_by_kernel


def _operations(inside: Any) -> Iterator[Any]:
    """All operations nested in a module or an operation."""
    for region in inside.operation.regions:
        for block in region.blocks:
            for operation in block.operations:
                yield operation.operation
                yield from _operations(operation)


def read(text: str) -> list[Kernel]:
    """Kernels of what ptxas and nvdisasm printed."""
    starts = [match.start() for match in _KERNEL.finditer(text)]
    warnings = [(match[1], match[0]) for match in _NOTE.finditer(text)]  # printed before the kernel's own lines
    return [_kernel(text[start:end], warnings) for start, end in pairwise([*starts, len(text)])]


def _kernel(text: str, warnings: Sequence[tuple[str, str]]) -> Kernel:
    named, spills, registers = _KERNEL.search(text), _SPILLS.search(text), _REGISTERS.search(text)
    assert named and spills and registers, "ptxas prints all three for every kernel"
    stack, stores, loads = (int(number) for number in spills.groups())
    mine = tuple(warning for name, warning in warnings if name == named[1])
    return Kernel(named[1], named[2], int(registers[1]), stack, stores, loads, mine, dict(Counter(_OPCODE.findall(text))))


def main(operation: str, implementation: str, name: str, heads: str = "8") -> None:
    """Attention: one sequence, at most `heads` query heads, by `implementation`; others use the implementation that a GPU gets."""
    os.environ.update(_DUMP)  # before jax is loaded
    make_ready()
    from maxlm.kernel_lab.problems import PROBLEMS, attention_problem, shape_of

    shape = shape_of(operation, name)
    if operation == "attention":
        groups = max(int(heads) * shape.groups // shape.heads, 1)
        shape = replace(shape, heads=groups * shape.heads // shape.groups, groups=groups)
        problem = attention_problem(shape, implementation)
    else:
        problem = PROBLEMS[operation](shape)
    memory, kernels = compile_for_h200(problem)
    for printed in (asdict(memory), *map(asdict, kernels)):
        print(json.dumps(printed))


if __name__ == "__main__":
    main(*sys.argv[1:])
