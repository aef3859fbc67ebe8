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

    paths: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """Files, folders, globs or URLs of this source."""
    text_field: Annotated[str, Field(min_length=1)] | None = None
    """Field of JSON objects and column of tables that holds the text; null: `read.text_field`."""
    license: str | None = None
    """License that is written into the metadata of documents without one; null: none."""
    metadata: dict[str, Value] = Field(default={})
    """Metadata that is added to each document of the source that does not have it."""
    where: tuple[Annotated[str, AfterValidator(conditions.checked)], ...] = Field(default=())
    """Conditions on the metadata, all of which a document must meet, such as `gopher_quality.verdict == passed`. Empty: all documents."""


class RunSettings(Section):
    """Division of the work. No setting here changes which documents stay, and only `task_bytes` changes the files they are in."""

    workers: int | None = Field(default=None, ge=1)
    """Tasks that run at once; null: one for each core here, or as many as the cluster runs. Unit: tasks."""
    task_bytes: int = Field(default=256 * MIB, ge=1)
    """Size of the input files, as stored, that one task reads; a larger file is a task of its own. Unit: bytes."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory of the search for copies; what does not fit is kept on disk. Unit: MiB."""


class SlurmSettings(Section):
    """Array jobs of Slurm, one task each. Nodes share the folders of the input and the output."""

    partition: str = Field(min_length=1)
    """Partition of the cluster that jobs are sent to."""
    time: str = Field(default="4:00:00", min_length=1)
    """Time limit of one task, in the form that sbatch takes."""
    memory_gb: int = Field(default=4, ge=1)
    """Memory for each CPU of a task. Unit: GiB."""
    combine_cpus: int = Field(default=4, ge=1)
    """CPUs of the search over the whole corpus between passes. Unit: CPUs."""
    qos: str | None = None
    """Quality of service of the jobs; null: the cluster's default."""
    setup: str | None = None
    """Shell line that runs before each task, such as `source env/bin/activate`; null: none."""
    max_array: int = Field(default=1001, ge=1)
    """Largest array of jobs that the cluster takes; larger ones are split. Unit: jobs."""
    options: dict[str, str | int] = Field(default={})
    """Further options of sbatch by name, such as account."""


class RaySettings(Section):
    """Tasks of a Ray cluster. Nodes share the folders of the input and the output."""

    address: str = Field(default="auto", min_length=1)
    """Address of the Ray cluster. auto: the one that is found; local: one is started on this machine."""
    memory_gb: float = Field(default=2.0, gt=0)
    """Memory that is reserved for each task. Unit: GiB."""
    combine_cpus: int = Field(default=4, ge=1)
    """CPUs of the search over the whole corpus between passes. Unit: CPUs."""


class CorpusSettings(Section):
    """A whole corpus file."""

    output: str = Field(min_length=1)
    """Folder of the result: documents/, the removed ones, the report and the state of the run."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of the files in documents/, with zstd compression. jsonl: JSON lines; parquet: Parquet tables."""
    sources: dict[str, Source] = Field(min_length=1)
    """Sources by name; the name becomes the metadata `source` of their documents."""
    read: ReadSettings = ReadSettings()
    """Limits on one input file, and the field that holds the text."""
    filters: FilterSettings | None = None
    """Filters of documents; null: none."""
    deduplicate: DedupSettings | None = None
    """Removal of copies; null: none."""
    decontaminate: DecontaminateSettings | None = None
    """Removal of documents that hold items of evaluation sets; null: none."""
    tag: tuple[str, ...] = Field(default=())
    """Stages that remove nothing: documents that they would remove stay, with the reason in the metadata STAGE.verdict, and take no part in
    later passes. Names of filters, deduplicate, repeated_lines, repeated_paragraphs, repeated_substrings, decontaminate.
    """
    run: RunSettings = RunSettings()
    """Division of the work; it does not change which documents stay."""
    slurm: SlurmSettings | None = None
    """Run the tasks as array jobs of Slurm; null: on this machine."""
    ray: RaySettings | None = None
    """Run the tasks on a Ray cluster; null: on this machine."""

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
