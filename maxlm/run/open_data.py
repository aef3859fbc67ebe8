"""Batches of a run: for training, held out, and of further held-out sets."""

import functools
from typing import NamedTuple

import jax

from maxlm.base.errors import ConfigError
from maxlm.base.paths import PYTHON
from maxlm.cluster import agree
from maxlm.config import Config, UserError
from maxlm.config.sections.data import DataConfig
from maxlm.data import manifest, storage
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.prepare import prepare as prepare_store
from maxlm.objectives import build_objective
from maxlm.run import frozen
from maxlm.telemetry.phases import Phases


class OpenedData(NamedTuple):
    """Batches for training, those that are held out if evaluation is on, and further held-out sets by name."""

    train: Pipeline
    held_out: Pipeline | None
    named: dict[str, Pipeline]

    @property
    def pipelines(self) -> dict[str, Pipeline]:
        """All of them: `train`, `eval` and `eval/NAME`."""
        held_out = {} if self.held_out is None else {"eval": self.held_out}
        return {"train": self.train, **held_out, **{f"eval/{name}": pipeline for name, pipeline in self.named.items()}}


def open_data(config: Config, *, held_out: bool = True) -> OpenedData:
    """Open the training batches, and with `held_out` the held-out ones if evaluation is on. Raises UserError for an unusable store."""
    if given := next((store for store in config.data.stores if store.startswith(PYTHON)), None):
        fix = "go on in that program with maxlm.fit(config, data=...), or name a token store"
        raise ConfigError("data.store", given, "the batches of this run came from a Python program", fix)
    create = functools.partial(
        Pipeline,
        global_batch=config.train.global_batch,
        seed=config.train.seed,
        vocab_size=config.model.vocab_size,
        make_batch=build_objective(config).make_batch,
        content=config.objective_facts.content,
    )
    data, named = create(config.data, batch_sizes=config.batch_sizes), dict[str, Pipeline]()
    if not held_out:
        return OpenedData(data, None, named)
    for name, store in config.data.eval.stores.items() if config.data.eval is not None else ():
        named[name] = create(config.data.model_copy(update={"store": store, "mixture": None}), split="eval", field=f"data.eval.{name}")
        if named[name].tokenizer_hash != data.tokenizer_hash:
            fix = "prepare it with data.prepare.tokenizer.path of that tokenizer"
            raise ConfigError(f"data.eval.{name}", store, "has another tokenizer than the training data", fix)
    return OpenedData(data, create(config.data, split="eval") if config.train.eval_batches > 0 else None, named)


def open_data_on_all_hosts(config: Config, phases: Phases) -> OpenedData:
    """Prepare the data if configured, and open it. Raises UserError on all hosts if one cannot, or if their stores differ."""
    digests = lambda opened: {f"{name} data": one.fingerprint[:12] for name, one in opened.pipelines.items()}  # noqa: E731

    def open_here() -> OpenedData:
        if config.data.prepare is not None and not frozen.is_restart():  # at a restart, sources may have been edited since
            phases.say("preparing the data")
            _prepare(config.data, progress=phases.console.is_terminal)
        with phases("reading the data"):
            opened = open_data(config)
        frozen.check_unchanged(digests(opened))
        return opened

    return agree.on_all(open_here, digests, frozen.explained)


def _prepare(data: DataConfig, *, progress: bool) -> None:
    if jax.process_count() == 1:
        prepare_store(data, progress=progress)
    elif data.store is None or storage.read_bytes(data.store, manifest.MANIFEST) is None:  # of a disk or a bucket
        raise UserError(f"data.store = {data.store} is not prepared: on several hosts run `maxlm data prepare` once before training.")
