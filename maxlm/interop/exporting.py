"""`maxlm export`: a checkpoint as a folder that the Hugging Face library loads."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import SingleDeviceSharding

from maxlm.config import Config, UserError
from maxlm.config.schema import WeightsKind
from maxlm.interop import weights
from maxlm.interop.families import Family
from maxlm.interop.hf_export_config import family_of
from maxlm.interop.importing import MODEL, TOKENIZER_FILES
from maxlm.interop.new_folder import new_folder
from maxlm.interop.packing import Packing, packing_of
from maxlm.interop.published_frame import json_object
from maxlm.interop.tensor_files import INDEX, write_tensors
from maxlm.models import abstract_model_state, abstract_parameters, count_parameters
from maxlm.models.parametrization import folded, standard
from maxlm.models.stack import Names
from maxlm.training.saved_run import TOKENIZER, SavedRun, open_run

DTYPES: dict[str, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GENERATION = "generation_config.json"  # as transformers names it
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class Exported(NamedTuple):
    """Result of an export."""

    architecture: str
    parameters: int
    files: int


def export_model(
    run: Path,
    out: Path,
    dtype: str,
    shard_size: str,
    step: int | None,
    progress: weights.Step,
    of: WeightsKind = "raw",
    quantize: str | None = None,
) -> Exported:
    """Export the newest checkpoint of `run`, or that of `step`, into the new folder `out`. Raises UserError; then nothing is left.

    `of`: the parameters, or their moving average. Adapters are merged into them. `quantize`: matrices of layers in int8, int4 or fp8.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {' and '.join(DTYPES)}.")
    limit = _bytes(shard_size)
    saved = open_run(run)
    saved.check_kind(of)
    family, their_config = family_of(standard(saved.config.model), saved.config.data.seq_len)
    packing = None if quantize is None else packing_of(saved.trained, weights.targets(saved.config.model, family), quantize)
    their_config |= {"dtype": dtype} if packing is None else {"dtype": dtype, "quantization_config": packing.config}
    with new_folder(out) as made:
        return _write(saved, family, their_config, made, DTYPES[dtype], limit, step, of, progress, packing)


def _write(
    saved: SavedRun,
    family: Family,
    their_config: dict[str, Any],
    folder: Path,
    dtype: np.dtype,
    limit: int,
    step: int | None,
    of: WeightsKind,
    progress: weights.Step,
    packing: Packing | None,
) -> Exported:
    run, config = saved.directory, saved.config
    their_config |= _tokens(run / TOKENIZER, folder)
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
    if not (folder / GENERATION).is_file():
        known = {name: their_config[name] for name in ("bos_token_id", "eos_token_id") if their_config.get(name) is not None}
        (folder / GENERATION).write_text(json.dumps(known), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"architectures": [family.architecture], **their_config}, indent=2), encoding="utf-8")
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


def _tokens(tokenizer: Path, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer, with the ends of texts that this model has; returns what config.json says of it."""
    if not tokenizer.is_dir():
        return {}
    from maxlm.data.tokenizer import open_tokenizer

    known = open_tokenizer(str(tokenizer))
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(tokenizer / name, folder / name)
    if not (folder / "tokenizer_config.json").is_file():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": known.end_of_document, "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    ends = list(dict.fromkeys([known.end_of_document_id, *known.frame.ends]))
    stated = {"eos_token_id": ends if len(ends) > 1 else ends[0]}
    _restate(tokenizer, folder, GENERATION, stated)
    for name in () if _template_reads_end(tokenizer) else ("tokenizer_config.json", "special_tokens_map.json"):
        _restate(tokenizer, folder, name, {"eos_token": known.end_of_document})
    return stated


def _restate(source: Path, folder: Path, file: str, stated: dict[str, Any]) -> None:
    """Write to `folder` the file of `source` that says something else, as one of another model does whose texts had other ends."""
    said = json_object(source / file)
    plain = {name: said[name].get("content") if isinstance(said.get(name), dict) else said.get(name) for name in stated}
    if (source / file).is_file() and plain != stated:
        (folder / file).write_text(json.dumps(said | stated, indent=1), encoding="utf-8")


def _template_reads_end(source: Path) -> bool:
    """True if the chat template writes `eos_token`: then it stays what conversations were rendered with for training."""
    named, alone = json_object(source / "tokenizer_config.json").get("chat_template"), source / "chat_template.jinja"
    return "eos_token" in json.dumps(named) or (alone.is_file() and "eos_token" in alone.read_text(encoding="utf-8", errors="replace"))


def _card(saved: SavedRun, family: Family, count: int, step: int, packing: Packing | None) -> str:
    """The model card: facts of the run, or of a model that was imported or averaged where it is from."""
    rows = {"architecture": family.architecture, "parameters": f"{count:,}"}
    if packing is not None:
        rows["matrices of layers"] = f"{packing.format}, with a scale for each output"
    model = saved.directory / MODEL
    if model.is_file():
        said = model.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
    else:
        said, rows = "Trained with maxlm.", rows | _training(saved.trained, step)
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"---\nlibrary_name: transformers\ntags: [maxlm]\n---\n# {saved.directory.name}\n{said}\n\n| | |\n|---|---|\n{table}\n"


def _training(config: Config, step: int) -> dict[str, str]:
    """Facts of a run for its card."""
    rows = {
        "checkpoint": f"step {step:,}",
        "sequence length": f"{config.data.seq_len:,} tokens",
        "batch": f"{config.train.global_batch:,} sequences an update",
        "optimizer": f"{config.optimizer.name}, peak learning rate {config.optimizer.peak_lr:g}, {config.optimizer.schedule}",
        "seed": str(config.train.seed),
    }
    if config.train.start_from is not None:
        rows["started from"] = Path(config.train.start_from.path).name
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
