"""`maxlm export`: a checkpoint as a folder that the Hugging Face library loads."""

import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxlm.base.errors import shorten
from maxlm.config import UserError
from maxlm.interop import weights
from maxlm.interop.families import Family
from maxlm.interop.hf_config import family_of
from maxlm.interop.importing import MODEL
from maxlm.interop.new_folder import new_folder
from maxlm.interop.packing import Packing, packing_of
from maxlm.interop.published_files import CONFIG, object_or_none, with_format, write_files
from maxlm.interop.tensor_files import INDEX, write_tensors
from maxlm.models import abstract_model_state, abstract_parameters, count_parameters
from maxlm.models.parametrization import folded, standard
from maxlm.models.stack import Names
from maxlm.training.saved_run import PUBLISHED, SavedRun, open_run

DTYPES: dict[str, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Exported(NamedTuple):
    """Result of an export."""

    architecture: str
    parameters: int
    files: int
    notes: tuple[str, ...] = ()


def export_model(
    run: Path,
    out: Path,
    dtype: str,
    shard_size: str,
    step: int | None,
    progress: weights.Step,
    of: str = "raw",
    quantize: str | None = None,
) -> Exported:
    """Export the newest checkpoint of `run`, or of `step`, into the new folder `out`. Raises UserError; then nothing is left.

    `of`: the parameters, or their moving average. Adapters are merged into them. `quantize`: matrices of layers in int8, int4 or fp8.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {' and '.join(DTYPES)}.")
    limit = _bytes(shard_size)
    saved = open_run(run)
    saved.check_kind(of)
    published = object_or_none(run / PUBLISHED / CONFIG)
    seq_len = 0 if saved.untrained and published is not None else saved.config.data.seq_len
    family, their_config = family_of(standard(saved.config.model), seq_len, published)
    trained, found = saved.trained, weights.targets(saved.config.model, family)
    packing = None if quantize is None else packing_of(trained.model, trained.precision, found, quantize)
    their_config = with_format(their_config, dtype, None if packing is None else packing.config, stated=published is None)
    with new_folder(out) as made:
        exported = _write(saved, family, their_config, made, DTYPES[dtype], limit, step, of, progress, packing)
    return exported._replace(notes=tuple(_notes(their_config, published)))


def _notes(config: dict[str, Any], published: dict[str, Any] | None) -> Iterator[str]:
    """Notes on parts of the published model that the export leaves out."""
    if config.get("auto_map"):
        yield "config.json names code of its source (auto_map), which is not exported: load it without trust_remote_code"
    was = None if published is None else published.get("model_type")
    if was is not None and was != config["model_type"]:
        yield f"config.json is of the type {config['model_type']}, and the source's was {was}"


def _write(
    saved: SavedRun,
    family: Family,
    their_config: dict[str, Any],
    folder: Path,
    dtype: np.dtype,
    limit: int,
    step: int | None,
    of: str,
    progress: weights.Step,
    packing: Packing | None,
) -> Exported:
    run, config = saved.directory, saved.config
    write_files(saved, their_config, folder)  # first, so that a fault in these files is reported before weights are read
    found = weights.targets(config.model, family)
    repeated = weights.copies(config.model, family)
    shapes = dict(weights.with_copies(weights.their_shapes(config.model, found).items(), repeated))
    here = SingleDeviceSharding(jax.devices("cpu")[0])
    specs = {"params": abstract_parameters(config.model), "model_state": abstract_model_state(config.model)}
    at = step if step is not None else saved.checkpoints.latest(saved.unfit)
    if at is None:
        fit = " that it would continue from itself: name one with --step" if saved.unfit else ""
        raise UserError(f"{run} holds no checkpoint{fit}.")

    def leaf(name: Names) -> np.ndarray:
        kind = next(kind for kind, tree in specs.items() if weights.entry(tree, name) is not None)
        abstract = weights.entry(specs[kind], name)
        wanted = jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=here)
        restored = saved.restore({kind: weights.nested(name, wanted)}, at, of)
        value = np.asarray(weights.entry(restored.params if kind == "params" else restored.model_state, name))
        factor = folded(config.model, name)
        return value if factor == 1 else value * np.float32(factor)

    exact = {piece.theirs for target in found if target.rule.exact for piece in target.pieces}
    dtypes = {name: DTYPES["float32"] if name in exact else dtype for name in shapes}
    packed = frozenset[str]() if packing is None else packing.names
    sizes = [
        packing.bytes(shape) if packing is not None and name in packed else dtypes[name].itemsize * math.prod(shape)
        for name, shape in shapes.items()
    ]
    files, total = _shards(sizes, limit), sum(sizes)
    index: dict[str, str] = {}
    waiting: dict[str, np.ndarray] = {}
    number = held = written = 0
    for name, value in weights.with_copies(weights.tensors(found, leaf), repeated):
        if packing is not None and name in packed:
            made = packing.tensors(name, value)
        else:
            made = {name: np.ascontiguousarray(value.astype(dtypes[name], copy=False))}
        waiting, held, written = waiting | made, held + 1, written + sum(one.nbytes for one in made.values())
        progress(written, total)
        if held == files[number]:
            file = "model.safetensors" if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            write_tensors(waiting, folder / file)
            index |= dict.fromkeys(waiting, file)
            waiting, held, number = {}, 0, number + 1
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1), encoding="utf-8")
    count = count_parameters(config.model)
    (folder / "README.md").write_text(_card(saved, family, count, at, packing), encoding="utf-8")
    return Exported(family.architecture, count, len(files))


def _shards(sizes: list[int], limit: int) -> list[int]:
    """Tensors in each file: as many, in their order, as fit into `limit` bytes; at least one."""
    counts, filled = [0], 0
    for size in sizes:
        if counts[-1] and filled + size > limit:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


def _card(saved: SavedRun, family: Family, count: int, step: int, packing: Packing | None) -> str:
    """The model card: facts of the run, or of a model that was imported or averaged where it is from."""
    rows = {"architecture": family.architecture, "parameters": f"{count:,}"}
    if packing is not None:
        rows["matrices of layers"] = f"{packing.format}, with a scale for each output"
    model = saved.directory / MODEL
    if model.is_file():
        text = model.read_text(encoding="utf-8", errors="replace")
        said = html.escape(text.partition("\n")[0].removeprefix("#").strip()[:300], quote=False)
        said = said.replace("[", "&#91;").replace("|", "&#124;")  # no link, picture or cell of a table by the name of a folder
    else:
        said, rows = "Trained with maxlm.", rows | _training(saved, step)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    title = _code(saved.directory.name)
    return f"---\nlibrary_name: transformers\ntags: [maxlm]\n---\n# {title}\n{said}\n\n| | |\n|---|---|\n{table}\n"


def _code(name: str) -> str:
    """A name as code in Markdown, which no character of it ends."""
    return "`" + "".join(char if char.isprintable() and char not in "`|" else "_" for char in shorten(name)) + "`"


def _training(saved: SavedRun, step: int) -> dict[str, str]:
    """Facts of a run for its card."""
    config = saved.trained
    rows = {
        "checkpoint": f"step {step:,}",
        "sequence length": f"{config.data.seq_len:,} tokens",
        "batch": f"{config.train.global_batch:,} sequences an update",
        "optimizer": f"{config.optimizer.name}, peak learning rate {config.optimizer.peak_lr:g}, {config.optimizer.schedule}",
        "seed": str(config.train.seed),
    }
    if config.train.start_from is not None:
        rows["started from"] = _code(Path(config.train.start_from.path).name)
    if config.objective is not None:
        rows["objective"] = config.objective.kind
    if config.model.lora is not None:
        rows["adapters"] = f"LoRA of rank {config.model.lora.rank}, merged into these weights"
    if config.model.moe is not None and config.model.moe.router.capacity is not None:
        rows["routing"] = (
            f"trained with a capacity of {config.model.moe.router.capacity:g} even shares an expert; this model drops no token"
        )
    return rows


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d{1,9})\s*([KMGT]?B)?", size.strip(), re.IGNORECASE)
    if not match or int(match[1]) < 1:
        raise UserError(f"--shard-size {size} is not a size: give one such as 5GB.")
    return int(match[1]) * _UNITS[(match[2] or "B").upper()]
