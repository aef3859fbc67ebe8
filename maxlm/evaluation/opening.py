"""Open a model to be evaluated: a run, an imported model, or a Hugging Face folder; also as a scorer of texts for the perplexity filter."""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxlm.base.paths import read_file
from maxlm.config import Config, UserError
from maxlm.config.derived import command_line, without_training
from maxlm.config.schema import ModelConfig, PrecisionConfig
from maxlm.data.tokenizer import Tokenizer
from maxlm.evaluation.language_model import LanguageModel
from maxlm.evaluation.requests import Request
from maxlm.evaluation.scoring import Scorer
from maxlm.interop.hf_config import text_tower
from maxlm.interop.importing import import_model
from maxlm.models import Parameters
from maxlm.parallel import build_mesh
from maxlm.telemetry.phases import progress_bar
from maxlm.telemetry.run_dir import RunDirectory
from maxlm.training.saved_run import CONFIG, SavedRun, open_run

MOST_CONTEXT = 4096  # tokens of a published model's context, unless more are asked for
SETTABLE = ("mesh", "precision")


@dataclass(frozen=True)
class Opened:
    """A model to evaluate. `step` and `folder`, where its results belong, are None for a published model."""

    model: LanguageModel
    step: int | None
    folder: Path | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class OpenedWeights:
    """A model and its weights on a mesh. `context`: tokens that are read together; `tokenizer`: None if the model has none; `step` and
    `folder` are None for a published model.
    """

    config: Config
    mesh: Mesh
    params: Parameters
    model_state: Parameters
    tokenizer: Tokenizer | None
    context: int
    step: int | None
    folder: Path | None
    notes: tuple[str, ...]


def open_model(place: Path, overrides: Sequence[str], *, step: int | None = None, context: int | None = None, kind: str = "raw") -> Opened:
    """Open the model in the folder `place` to be evaluated on texts: as `open_weights`, and it must have a tokenizer."""
    found = open_weights(place, overrides, step=step, context=context, kind=kind, text=True)
    assert found.tokenizer is not None, "it was asked for"
    model = LanguageModel(Scorer(found.config, found.mesh, context=found.context), found.params, found.model_state, found.tokenizer)
    return Opened(model, found.step, None if found.folder is None else RunDirectory(found.folder, primary=True).evaluations, found.notes)


def open_weights(
    place: Path,
    overrides: Sequence[str],
    *,
    step: int | None = None,
    context: int | None = None,
    kind: str = "raw",
    text: bool = False,
) -> OpenedWeights:
    """Open the model in the folder `place` over all devices, or over the mesh of `overrides`, which may also set its precision.

    `context`: tokens that are read together; None: as trained, and of a Hugging Face folder as config.json says, MOST_CONTEXT at most.
    `kind`: of the weights of a run. It computes as in training, and a Hugging Face model as its config.json says: in bfloat16 or else in
    float32. `text`: it must have a tokenizer.
    Raises UserError: it is no model, has no tokenizer or no such checkpoint, or a setting is wrong.
    """
    if not place.exists():
        raise UserError(f"{place} does not exist: name the folder of a run, of an imported model, or a Hugging Face folder.")
    if not any((place / name).is_file() for name in (CONFIG, "config.json")):
        raise UserError(f"{place} is neither a run, which has a {CONFIG}, nor a Hugging Face folder, which has a config.json.")
    if (place / CONFIG).is_file():
        saved = open_run(place)
        return _weights(saved, overrides, step, context or saved.config.data.seq_len, kind, text=text)
    if kind != "raw":
        raise UserError(f"--weights {kind}: {place} is a Hugging Face folder, which has one kind of weights.")
    if step is not None:
        raise UserError(f"--step {step}: {place} is a Hugging Face folder, which has no steps.")
    _settings(overrides)
    spread = [one for one in overrides if one.strip().startswith("mesh.")] or ["mesh.fsdp=-1"]  # over the devices that will compute
    with tempfile.TemporaryDirectory() as folder:
        with progress_bar("importing") as progress:
            imported = import_model(place, Path(folder) / "model", spread, progress)
        notes, said = list(imported.notes), text_tower(json.loads(read_file(place / "config.json")), "config.json")
        most = next((said[name] for name in ("max_position_embeddings", "n_positions") if isinstance(said.get(name), int)), None)
        if context is None and most is not None and most > 0:
            context = min(most, MOST_CONTEXT)
            if most > context:
                notes.append(f"a context of {context:,} tokens, of the {most:,} that the model takes: --context chooses another")
        saved = open_run(imported.folder)
        stored = said.get("dtype", said.get("torch_dtype"))
        overrides = [f"precision.compute={'bfloat16' if stored == 'bfloat16' else 'float32'}", *overrides]
        found = _weights(saved, overrides, None, context or saved.config.data.seq_len, text=text)
        return replace(found, step=None, folder=None, notes=tuple(notes))


def _weights(saved: SavedRun, overrides: Sequence[str], step: int | None, context: int, kind: str = "raw", *, text: bool) -> OpenedWeights:
    tokenizer = saved.text_tokenizer() if text else saved.tokenizer
    config = _config(saved.config.model, saved.config.precision, overrides, context)
    mesh = build_mesh(config)
    weights = saved.weights(mesh, step, kind)
    return OpenedWeights(config, mesh, weights.params, weights.model_state, tokenizer, context, weights.step, saved.directory, ())


def _config(model: ModelConfig, precision: PrecisionConfig, overrides: Sequence[str], context: int) -> Config:
    """The trained model and precision, on the mesh of `overrides`."""
    chosen = _settings(overrides)
    training = {"loss_scale"} | ({"dispatch"} if chosen["mesh"].get("expert", 1) == 1 else set())  # no token travels to an expert
    inherited = {"precision": precision.model_dump(mode="json", exclude=training)}
    return without_training(model, context, jax.device_count(), chosen, inherited)


def _settings(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`section.name=value` by section."""
    return command_line(overrides, SETTABLE, ": an evaluation takes settings of mesh and precision, such as mesh.tensor=2.")


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that any process can open. `key`: digest of its weights and of its tokenizer, which decide the scores."""

    place: str
    step: int | None
    key: tuple[str, str]

    def open(self) -> "TextScorer":
        """Open the model in this process, once. Raises UserError."""
        return _open(self.place, self.step)


@dataclass(frozen=True)
class TextScorer:
    """Bits per byte by a trained model, over all devices of this process."""

    model: LanguageModel

    def score(self, texts: Sequence[str]) -> list[float]:
        """Bits per UTF-8 byte of each text, in windows that overlap by half of the context; 0.0 for an empty text."""
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # a lone surrogate has no tokens
        requests = [Request((self.model.prefix,), self.model.encode(text)) for text in texts]
        scores = self.model.score(requests, stride=max(self.model.scorer.context // 2, 1))
        sizes = (max(len(text.encode()), 1) for text in texts)
        return [-score.logprob / math.log(2) / size for score, size in zip(scores, sizes, strict=True)]


def find_checkpoint(place: str) -> CheckpointSource:
    """The newest checkpoint of a run, or an imported or published model, which stays the same one if training goes on. Raises UserError."""
    opened = open_model(Path(place), [])
    return CheckpointSource(place, opened.step, (opened.model.weights_digest, opened.model.tokenizer.hash))


@cache
def _open(place: str, step: int | None) -> TextScorer:
    return TextScorer(open_model(Path(place), [], step=step).model)
