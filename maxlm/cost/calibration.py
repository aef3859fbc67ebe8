"""Correction factors of a machine: the file that `maxlm plan --calibrate` writes, and a topology with a chip that has them. No jax here."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from maxlm.base.errors import UserError, error_kind
from maxlm.base.paths import read_file
from maxlm.config.sections.cost import CostConfig
from maxlm.hardware.chips import Achieved, CpuSpeeds, Rate
from maxlm.hardware.topologies import Topology

OPTION, FIELD = "--calibration", "cost.calibration"
MOST_BYTES = 2**20  # of a file
MOST = 1.2  # a share above 1 is a chip above its nominal clock; far above, a wrong chip or a wrong measurement
Share = Annotated[float, Field(gt=0, le=MOST)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Measured(_Record):
    """Measured speeds of one machine. Bus bandwidth as nccl-tests count it, of all local devices; None on a machine of one device."""

    matmul_dtype: str
    matmul_size: int  # of each of the three dims
    matmul_flops: Rate  # FLOP/s of one device
    hbm_bytes_per_s: Rate  # read and written, one device
    all_gather_bytes_per_s: Rate | None
    reduce_scatter_bytes_per_s: Rate | None
    cpu: CpuSpeeds | None = None  # of CPUs only; None in files from before 2026-11-26


class Factors(_Record):
    """Achieved over stated: of the bf16 peak, of the memory's bandwidth, of the links' (the slower of the two collectives)."""

    matmul: Share
    hbm: Share
    links: Share | None


class Calibration(_Record):
    """One measurement of one machine. `chip` and `factors` are None where no peak of the device is known, such as of a CPU."""

    chip: str | None
    device_kind: str
    devices: int
    machine: str
    date: str
    versions: dict[str, str]
    measured: Measured
    factors: Factors | None


def read(path: Path, asked_by: str = OPTION) -> Calibration:
    """The calibration in the file `path`, which `asked_by` names. Raises UserError, which names the field, for anything else."""
    try:
        return Calibration.model_validate_json(read_file(path, MOST_BYTES))
    except OSError as error:
        raise error_kind(error)(f"{asked_by} {path} cannot be read: {error.strerror}; give a file of `maxlm plan --calibrate`.") from None
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"{asked_by} {path}: {where}: {first['msg']}; write the file with `maxlm plan --calibrate` on the machine itself."
        ) from None


def of_config(cost: CostConfig | None, topology: Topology) -> Topology:
    """`topology`, its chip with the factors of `cost.calibration`, if any; TPUs are priced by counted shares. Raises as `calibrated`."""
    path = cost.calibration if cost is not None else None
    return topology if path is None or topology.is_tpu else calibrated(topology, Path(path), FIELD)


def calibrated(topology: Topology, path: Path, asked_by: str = OPTION) -> Topology:
    """`topology`, its chip with the factors in the file `path`. Raises UserError for factors of another chip, and for TPUs."""
    found = read(path, asked_by)
    if topology.is_tpu:
        raise UserError(
            f"{asked_by} {path}: {topology.name} is priced by shares counted for TPUs, which no factor of a file changes; leave it out."
        )
    if found.chip != topology.chip.name or found.factors is None:
        rule = f"was measured on {found.device_kind}, and {topology.name} is made of {topology.chip.name}"
        raise UserError(f"{asked_by} {path}: {rule}; measure on one of its nodes with `maxlm plan --calibrate`.")
    factors = found.factors
    achieved = Achieved(factors.matmul, factors.hbm, factors.links, source=f"{found.machine}, {found.date}")
    return replace(topology, chip=replace(topology.chip, achieved=achieved))
