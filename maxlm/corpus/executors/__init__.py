"""Executors of the tasks of a corpus: processes of this machine, jobs of Slurm, tasks of a Ray cluster. The output has the same bytes."""

import os
from collections.abc import Callable

from maxlm.base.errors import UserError
from maxlm.base.installing import install_command
from maxlm.corpus.engine import Executor
from maxlm.corpus.settings import CorpusSettings

__all__ = ["make_executor"]


def make_executor(settings: CorpusSettings, say: Callable[[str], None]) -> Executor:
    """The executor that the corpus file asks for. Raises UserError if its package is missing."""
    workers = settings.run.workers
    try:
        if settings.slurm is not None:
            from maxlm.corpus.executors.slurm import SlurmExecutor

            return SlurmExecutor(settings.slurm, workers, say)
        if settings.ray is not None:
            from maxlm.corpus.executors.ray import RayExecutor

            return RayExecutor(settings.ray, workers, say)
    except ModuleNotFoundError as error:
        extra = "corpus-slurm" if settings.slurm is not None else "corpus-ray"
        raise UserError(f"{extra.partition('-')[2]}: needs the package {error.name}: {install_command(extra)}.") from None
    from maxlm.corpus.executors.local import LocalExecutor

    return LocalExecutor(workers or len(os.sched_getaffinity(0)), say)
