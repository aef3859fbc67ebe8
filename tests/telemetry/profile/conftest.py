"""Synthetic traces: nothing here was recorded on a TPU or a GPU. Names of planes, lines and stats are those of real traces."""

import pytest
from synthetic_trace import Event, Instruction, PlaneWriter, hlo_proto, metadata_plane

US = 1_000_000  # picoseconds
STEP = "jit(train_step)"
BODY = f"{STEP}/jvp()/while/body/closed_call"


def tpu_trace() -> bytes:
    """Two steps of 100 us on one TPU: attention, an mlp, an optimizer; a gather half of which compute hides, and a wait for its end."""
    plane = PlaneWriter("/device:TPU:0")
    places = {
        "while.1": f"{STEP}/jvp()/while",
        "fusion.2": f"{BODY}/attn/BSD,DHK->BSHK/dot_general",
        "fusion.3": f"{BODY}/mlp/BSD,DF->BSF/dot_general",
        "all-gather-start.4": f"{BODY}/mlp/BSD,DF->BSF/dot_general",
        "all-gather-done.4": f"{BODY}/mlp/BSD,DF->BSF/dot_general",
        "fusion.5": f"{STEP}/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/attn/exp",
        "fusion.6": f"{STEP}/mul",
    }
    for name, where in places.items():
        plane.describe(f"%{name} = bf16[8,128]{{1,0}} op(...)", name, tf_op=f"{where}:", program_id=11)

    def at(name: str, start: int, length: int) -> Event:
        return Event(f"%{name} = bf16[8,128]{{1,0}} op(...)", start * US, length * US, {"run_id": 3})

    ops, beside = [], []
    for step in (0, 100):
        ops += [at("while.1", step, 60), at("fusion.2", step, 20), at("all-gather-start.4", step + 20, 1), at("fusion.3", step + 21, 19)]
        ops += [at("all-gather-done.4", step + 40, 20), at("fusion.5", step + 60, 10), at("fusion.6", step + 75, 15)]
        beside.append(at("all-gather-start.4", step + 20, 40))
    plane.line("XLA Ops", ops)
    plane.line("Async XLA Ops", beside)
    plane.line("XLA Modules", [Event("jit_train_step(11)", 0, 190 * US)])
    host = PlaneWriter("/host:CPU")
    host.line("python", [Event("maxlm:data_wait", 70 * US, 4 * US), Event("maxlm:step", 74 * US, 20 * US)])
    return plane.written() + host.written()


def gpu_trace() -> bytes:
    """A step on one GPU: two matmuls on one stream, beside the second a kernel of NCCL on another; a copy, and a program beside."""
    program = [
        Instruction("gemm.1", "custom-call", f"{STEP}/jvp()/while/body/closed_call/attn/dot_general"),
        Instruction("gemm.2", "custom-call", f"{STEP}/transpose(jvp())/while/body/closed_call/checkpoint/mlp/dot_general"),
        Instruction("all-reduce.3", "all-reduce", f"{STEP}/transpose(jvp())/reduce_sum"),
    ]
    plane = PlaneWriter("/device:GPU:0")

    def kernel(title: str, op: str, start: int, length: int, number: int = 5) -> Event:
        stats = {"correlation_id": 900 + start, "hlo_op": op, "hlo_module": "jit_train_step", "program_id": number}
        return Event(title, start * US, length * US, stats)

    plane.line(
        "Stream #13(Compute)",
        [
            kernel("sm90_xmma_gemm_a", "gemm.1", 0, 40),
            kernel("sm90_xmma_gemm_b", "gemm.2", 50, 30),
            kernel("input_reduce", "other.9", 95, 5, 6),
        ],
    )
    plane.line("Stream #20(Compute)", [kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all-reduce.3", 60, 30)])
    plane.line("Stream #21(MemcpyD2H)", [Event("MemcpyD2H", 100 * US, 2 * US, {"memcpy_details": "kind:D2H"})])
    plane.line("XLA Ops", [Event("gemm.1", 0, 40 * US)])  # derived from the streams: not counted again
    other = [Instruction("other.9", "fusion", "jit(metrics)/add")]
    return metadata_plane({5: hlo_proto("jit_train_step", [program]), 6: hlo_proto("jit_metrics", [other])}) + plane.written()


@pytest.fixture
def tpu_file(tmp_path):
    path = tmp_path / "tpu.xplane.pb"
    path.write_bytes(tpu_trace())
    return path


@pytest.fixture
def gpu_file(tmp_path):
    path = tmp_path / "gpu.xplane.pb"
    path.write_bytes(gpu_trace())
    return path
