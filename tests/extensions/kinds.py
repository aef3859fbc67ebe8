"""A package by a stranger with a small part of each kind that has no package of its own in this folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from maxlm.base.metric import Metric
from maxlm.config.fields import PositiveFloat, Section
from maxlm.config.part import Part, ReaderFacts
from maxlm.documents.files import SourceFile
from maxlm.documents.records import Record, Wanted
from maxlm.documents.stream import ByteStream
from maxlm.objectives import BatchMetric, ModelOutput


class SurpriseConfig(Section):
    """Share of surprising tokens."""

    above: PositiveFloat = 2.0  # nats


class Surprise(BatchMetric):
    """Share of tokens with a large loss, and the largest loss of a token."""

    metrics = (
        Metric("surprising", "Surprising tokens", "share of tokens", per="seen"),
        Metric("most_surprising", "Largest loss of a token", "nats", reduce="max"),
    )

    def values(self, output: ModelOutput, batch: Any) -> Mapping[str, Array]:
        """Sums and a maximum of this device's rows."""
        nll_BS = output.scores(batch.targets_BS).nll_BS
        counted_BS = batch.weights_BS > 0
        return {
            "surprising": jnp.sum(counted_BS & (nll_BS > self.own.above)).astype(jnp.float32),
            "seen": jnp.sum(counted_BS).astype(jnp.float32),
            "most_surprising": jnp.max(jnp.where(counted_BS, nll_BS, 0)),
        }


METRIC = Part(kind="metric", name="surprise", place="extensions.kinds:Surprise", section=SurpriseConfig, about="Surprising tokens.")


def read_blocks(stream: ByteStream, wanted: Wanted) -> Iterator[Record]:
    """Texts between lines of dashes."""
    for number, text in enumerate(b"".join(stream.rest()).split(b"\n---\n"), 1):
        if text == b"broken":
            raise KeyError("oops")
        yield Record(number, "block", text, {"n": number})


def two_files(argument: str) -> list[SourceFile]:
    """The files a and b of a folder."""
    return [SourceFile(str(path), path.stat().st_size, "", path.name) for path in sorted(Path(argument).glob("[ab].*"))]


READER = Part(kind="reader", name="blocks", place="extensions.kinds:read_blocks", facts=ReaderFacts((".blocks",)), about="Texts.")
SOURCE = Part(kind="source", name="two-files", place="extensions.kinds:two_files", about="Two files of a folder.")
