"""Settings of a corpus file: sources, stages and how they run. A stage without a section is off."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from maxlm.base.errors import ConfigError
from maxlm.config import conditions
from maxlm.config.fields import Section
from maxlm.corpus.decontaminate import DecontaminateSettings
from maxlm.corpus.dedup.settings import DedupSettings
from maxlm.corpus.document import Value
from maxlm.corpus.filters import FilterSettings
from maxlm.documents.records import ReadSettings

MIB = 2**20


class Source(Section):
    """Files of one origin. `license` and `metadata` are added to each document that does not have them."""

    paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1, description="Files, folders, globs or URLs.")
    text_field: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Field of JSON objects and column of tables; null: `read.text_field`."
    )
    license: str | None = None
    metadata: dict[str, Value] = Field(default={})
    where: tuple[Annotated[str, AfterValidator(conditions.checked)], ...] = Field(
        default=(), description="Conditions on the metadata that a document must meet, such as `gopher_quality.verdict == passed`."
    )


class RunSettings(Section):
    """Division of the work. No setting here changes which documents stay, and only `task_bytes` changes the files they are in."""

    workers: int | None = Field(
        default=None, ge=1, description="Tasks at once; null: one for each core here, or as many as the cluster runs."
    )
    task_bytes: int = Field(
        default=256 * MIB, ge=1, description="Bytes of input files, as stored, that one task reads; a larger file is one task."
    )
    memory_mb: int = Field(default=512, ge=64, description="MiB that the search for copies keeps in memory; the rest is on disk.")


class SlurmSettings(Section):
    """Array jobs of Slurm, one task each. Nodes share the folders of the input and the output."""

    partition: str = Field(min_length=1)
    time: str = Field(default="4:00:00", min_length=1, description="Limit of one task, as sbatch takes it.")
    memory_gb: int = Field(default=4, ge=1, description="GiB for each CPU of a task.")
    combine_cpus: int = Field(default=4, ge=1, description="CPUs of the search over the whole corpus between passes.")
    qos: str | None = None
    setup: str | None = Field(default=None, description="Shell line before a task, such as `source env/bin/activate`.")
    max_array: int = Field(default=1001, ge=1, description="Largest array that the cluster takes; larger ones are split.")
    options: dict[str, str | int] = Field(default={}, description="More options of sbatch, such as account.")


class RaySettings(Section):
    """Tasks of a Ray cluster. Nodes share the folders of the input and the output."""

    address: str = Field(default="auto", min_length=1, description="Of the cluster; `local` starts one on this machine.")
    memory_gb: float = Field(default=2.0, gt=0, description="GiB reserved for each task.")
    combine_cpus: int = Field(default=4, ge=1, description="CPUs of the search over the whole corpus between passes.")


class CorpusSettings(Section):
    """A whole corpus file."""

    output: str = Field(min_length=1, description="Folder of the result.")
    format: Literal["jsonl", "parquet"] = Field(default="jsonl", description="Of documents/: JSON lines or Parquet, with zstd.")
    sources: dict[str, Source] = Field(min_length=1, description="By name, which becomes the metadata `source`.")
    read: ReadSettings = ReadSettings()
    filters: FilterSettings | None = None
    deduplicate: DedupSettings | None = None
    decontaminate: DecontaminateSettings | None = None
    tag: tuple[str, ...] = Field(
        default=(),
        description="Stages that remove no document: what they would remove stays with STAGE.verdict, the reason, in its metadata, and "
        "takes no part in later passes. Names of filters, deduplicate, repeated_lines, repeated_paragraphs, repeated_substrings, "
        "decontaminate.",
    )
    run: RunSettings = RunSettings()
    slurm: SlurmSettings | None = None
    ray: RaySettings | None = None

    @field_validator("decontaminate")
    @classmethod
    def _some_sets(cls, value: DecontaminateSettings | None) -> DecontaminateSettings | None:
        if value is not None and not value.sets:
            raise ValueError("no evaluation set is listed, so that nothing would be searched; list one in `sets`, or remove the section")
        return value

    @property
    def decisive(self) -> dict[str, Any]:
        """All settings that decide the result, as JSON has them."""
        return self.model_dump(mode="json", exclude={"output": True, "slurm": True, "ray": True, "run": {"workers", "memory_mb"}})

    @model_validator(mode="after")
    def _preferred_sources(self) -> Self:
        prefer = self.deduplicate.prefer if self.deduplicate is not None else ()
        for name in prefer:
            if name not in self.sources or prefer.count(name) > 1:
                rule = "is there twice" if name in self.sources else f"is no source ({', '.join(self.sources)})"
                raise ConfigError("deduplicate.prefer", list(prefer), f"{name} {rule}", "list names of `sources` in their order, each once")
        return self

    @model_validator(mode="after")
    def _one_executor(self) -> Self:
        if self.slurm is not None and self.ray is not None:
            raise ConfigError("ray", self.ray.model_dump(), "slurm and ray are both set, and tasks run on one of them", "remove a section")
        return self
