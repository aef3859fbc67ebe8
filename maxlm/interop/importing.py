"""`maxlm import`: a published model becomes a folder with a model config, a checkpoint and a tokenizer, from which a run can start."""

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ruamel.yaml import YAML

from maxlm.base.errors import quoted, some
from maxlm.base.paths import read_file
from maxlm.checkpoint import Checkpoints
from maxlm.cluster.agree import on_all
from maxlm.config import Config, UserError, load
from maxlm.config.loader import saved_text
from maxlm.config.schema import ModelConfig
from maxlm.data import manifest
from maxlm.data.template_files import published_opening
from maxlm.data.text_frame import FRAME, TextFrame
from maxlm.data.tokenizer import MOST_BYTES, Tokenizer, tokenizer_info
from maxlm.interop import packed, published_files, weights
from maxlm.interop.families import Family
from maxlm.interop.hf_config import has_towers, read_config, text_tower
from maxlm.interop.new_folder import new_folder
from maxlm.interop.published_files import GENERATION, TOKENIZER_FILES, ends_of, keep_files, object_or_none, read_object
from maxlm.interop.tensor_files import TensorFiles
from maxlm.models import count_parameters
from maxlm.parallel import build_mesh
from maxlm.training.saved_run import CHECKPOINTS, CONFIG, PUBLISHED, TOKENIZER

MODEL = "model.yml"
ADAPTER = "adapter_config.json"  # as PEFT names it


class Imported(NamedTuple):
    """Result of an import."""

    folder: Path
    family: str
    parameters: int
    notes: list[str]


class _Source(NamedTuple):
    """All that is known of a source without its numbers."""

    path: Path  # a folder, or one safetensors file
    folder: Path
    config: Path
    family: Family
    section: dict[str, Any]
    files: TensorFiles
    end_of_document: list[int]  # ids of config.json
    digest: str


def import_model(source: Path, out: Path, overrides: Sequence[str], step: weights.Step, config_file: Path | None = None) -> Imported:
    """Import `source`, a folder or one safetensors file, into the new folder `out`. Raises UserError; then nothing is left.

    `overrides`: settings of `mesh`, over which the parameters are spread; without any they lie on one device, or with several processes
    on all by mesh.fsdp. `config_file`: instead of the config.json of the folder. All processes must see the source and `out`; one that does
    not ends all.
    """
    known = on_all(lambda: _read(source, overrides, config_file), lambda known: {"source": known.digest})
    with new_folder(out) as made:
        imported = _write(known, made, overrides, step)
    return imported._replace(folder=out)


def _read(source: Path, overrides: Sequence[str], config_file: Path | None) -> _Source:
    if wrong := [text for text in overrides if not text.startswith("mesh.")]:
        raise UserError(f"{wrong[0]}: an import takes settings of `mesh` only; others belong to the run that starts from it.")
    folder = source if source.is_dir() else source.parent
    if not source.exists():
        raise UserError(f"{source} does not exist: name a folder with config.json and safetensors files, or one such file.")
    config_file = config_file or folder / published_files.CONFIG
    published = _config(config_file)
    values = text_tower(published, str(config_file))
    family, section = read_config(values, str(config_file))
    files = TensorFiles(source, packed.block_size(values.get("quantization_config")))
    if has_towers(published):
        files.keep_text()
    digest = hashlib.sha256(json.dumps([values, sorted(files.items())], sort_keys=True).encode()).hexdigest()
    eos = ends_of(values, config_file)
    section = _with_further_modules(values, section, files)
    return _Source(source, folder, config_file, family, section, files, eos, digest[:12])


def _write(known: _Source, folder: Path, overrides: Sequence[str], step: weights.Step) -> Imported:
    family, files = known.family, known.files
    said = f"Imported from {quoted(known.path.resolve().name)} (model_type {family.model_type}) by `maxlm import`"

    def prepare() -> tuple[Config, list[weights.Target], Mesh, list[str]]:
        with tempfile.TemporaryDirectory() as own:  # of this host
            model = Path(own) / MODEL
            write_model(model, known.section, said, None)
            config = load(str(model), assume=True).config
            mesh = build_mesh(config, jax.local_devices()[:1])
            if spread := overrides or (["mesh.fsdp=-1"] if jax.process_count() > 1 else []):
                batch = f"train.global_batch={jax.device_count()}"  # which a mesh must divide
                mesh = build_mesh(load(str(model), [*spread, batch], assume=True).config)
        found = weights.targets(config.model, family)
        notes = weights.check(config.model, family, found, files)
        if files.passed_over:
            notes.append(f"not read, since the model is in other files: {some(files.passed_over)}")
        if jax.process_index() == 0:
            write_model(folder / MODEL, known.section, said, count_parameters(config.model))
            (folder / CONFIG).write_text(saved_text(config), encoding="utf-8")
            keep_files(known.folder, known.config, folder / PUBLISHED)
            notes += _copy_tokenizer(known.folder, folder / TOKENIZER, config.model, known.end_of_document)
        return config, found, mesh, notes

    config, found, mesh, notes = on_all(prepare)
    state = on_all(lambda: weights.load(config.model, found, files, mesh, step))
    checkpoints = Checkpoints(folder / CHECKPOINTS, config.checkpoint, {"family": family.model_type})
    checkpoints.save(0, state, {})
    checkpoints.close()
    return Imported(folder, family.model_type, count_parameters(config.model), notes)


def write_model(path: Path, section: dict[str, Any], source: str, count: int | None) -> None:
    """Write a `model` section, with its source and exact size on top. `source`: without a line break."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with path.open("w", encoding="utf-8") as stream:
        stream.write(f"# {source}.\n" + ("" if count is None else f"# {count:,} parameters.\n"))
        yaml.dump({"model": section}, stream)


def _with_further_modules(values: dict[str, Any], section: dict[str, Any], files: TensorFiles) -> dict[str, Any]:
    """Multi-token prediction modules where the config counts some and the source has their weights, which not all releases have."""
    depth = values.get("num_nextn_predict_layers") or 0
    depth = depth if isinstance(depth, int) else 0
    present = any(name.endswith(".eh_proj.weight") for name in files)
    return {**section, "mtp": {"depth": depth}} if depth and present else section


def _copy_tokenizer(source: Path, folder: Path, model: ModelConfig, end_of_document: list[int]) -> list[str]:
    """Copy the tokenizer, if the source has one that the tokenizers library reads. Returns notes. `end_of_document`: ids of config.json."""
    if not (source / "tokenizer.json").exists():
        return ["the source has no tokenizer.json, so there is no tokenizer: give ids to what needs one"]
    folder.mkdir()
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(read_file(source / name, MOST_BYTES))
    tokenizer = Tokenizer(
        (folder / "tokenizer.json").read_bytes(), _end_of_document(source, end_of_document), str(source / "tokenizer.json")
    )
    notes = []
    if tokenizer.vocab_size > model.vocab_size:
        sizes = f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model {model.vocab_size:,}"
        notes.append(f"{sizes}: training on data of this tokenizer needs a larger model.vocab_size")
    frame = published_frame(source, tokenizer, end_of_document)
    info = tokenizer_info(tokenizer, {FRAME: frame.to_json()})
    (folder / manifest.MANIFEST).write_bytes(manifest.as_bytes(info.model_dump(mode="json")))
    return notes


def published_frame(folder: Path, tokenizer: Tokenizer, ends: Iterable[int]) -> TextFrame:
    """Return the special tokens around texts of the model with the files in `folder`. `ends`: ids that config.json names.

    Raises UserError for a file that is no JSON, or names an end of texts by no number.
    """
    said, generation = (object_or_none(folder / name) or {} for name in ("tokenizer_config.json", GENERATION))
    bos = said.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    prefix = tokenizer.ids.get(bos) if isinstance(bos, str) else None
    every = {*ends, *ends_of(generation, folder / GENERATION)}
    known = {token for token in every if 0 <= token < tokenizer.vocab_size}
    return TextFrame(published_opening(tokenizer.text, said), prefix, tuple(sorted(known - {tokenizer.end_of_document_id})))


def _end_of_document(source: Path, ids: list[int]) -> str:
    """The text of the token that ends a document: `eos_token` of the tokenizer, or the special token with one of these ids."""
    settings = object_or_none(source / "tokenizer_config.json") or {}
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if isinstance(token, str):
        return token
    added = read_object(source / manifest.TOKENIZER).get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("id") in ids:
            return str(entry.get("content"))
    raise UserError(f"{source}: neither tokenizer_config.json nor config.json names the token that ends a document (eos_token).")


def _config(path: Path) -> dict[str, Any]:
    """config.json of a model. Raises UserError."""
    try:
        return read_object(path)
    except FileNotFoundError:
        if (path.parent / ADAPTER).is_file():
            raise UserError(f"{path.parent} holds only adapters ({ADAPTER}): import the model with the adapters merged into it.") from None
        raise UserError(f"{path} is missing: a model needs its config.json.") from None
