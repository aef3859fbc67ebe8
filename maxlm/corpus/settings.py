"""Settings of a corpus file: sources, stages and how they run. A stage whose section is absent is off."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from maxlm.corpus.decontaminate import DecontaminateSettings
from maxlm.corpus.dedup.settings import DedupSettings
from maxlm.corpus.document import Value
from maxlm.corpus.filters import FilterSettings
from maxlm.corpus.read import ReadSettings

MIB = 2**20


class Section(BaseModel):
    """A part of the corpus file: no other fields, and not changed once read."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(Section):
    """Files of one origin. `license` and `metadata` are added to each document that does not have them."""

    paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1, description="Files, folders, globs or URLs.")
    license: str | None = None
    metadata: dict[str, Value] = {}


class RunSettings(Section):
    """How the work is divided. No setting here changes which documents stay, and only `task_bytes` changes the files they are in."""

    workers: int | None = Field(default=None, ge=1, description="Processes; null: one for each core.")
    task_bytes: int = Field(
        default=256 * MIB, ge=1, description="Bytes of input files, as stored, that one task reads; a larger file is one task."
    )
    memory_mb: int = Field(default=512, ge=64, description="MiB that the search for copies keeps in memory; the rest is on disk.")


class CorpusSettings(Section):
    """A whole corpus file."""

    output: str = Field(min_length=1, description="Folder of the result.")
    sources: dict[str, Source] = Field(min_length=1, description="By name, which becomes the metadata `source`.")
    read: ReadSettings = ReadSettings()
    filters: FilterSettings | None = None
    deduplicate: DedupSettings | None = None
    decontaminate: DecontaminateSettings | None = None
    run: RunSettings = RunSettings()
