"""Schedule of the pipeline over `mesh.stage`."""

import math
from typing import TYPE_CHECKING, Literal

from maxlm.config.capability import Capability, Problems, Sizes
from maxlm.config.fields import Positive, Section
from maxlm.config.sections.model import ModelConfig

if TYPE_CHECKING:
    from maxlm.config.schema import Config


class PipelineConfig(Section):
    """Schedule of the pipeline over `mesh.stage`. Absent: 1f1b with one chunk."""

    schedule: Literal["1f1b", "gpipe"] = "1f1b"  # gpipe keeps activations of every microbatch
    chunks: Positive = 1  # parts of the depth that a stage computes, far apart: as many times shorter bubbles (interleaved)


def _on_mesh(config: "Config", sizes: Sizes) -> Problems:
    """Stages of a pipeline, or its section without one."""
    model, train, stage = config.model, config.train, sizes["stage"]
    if stage == 1:
        if config.pipeline is not None:
            yield "pipeline", "set", "mesh.stage = 1 makes no pipeline", "remove it, or raise mesh.stage"
        return
    chunks = (config.pipeline or PipelineConfig()).chunks
    period = len(model.layer_pattern)
    periods = math.ceil((model.n_layers - model.n_dense) / period)
    held = f"{periods} periods of {period} layers" if period > 1 else f"{periods} layers"
    held += f" after model.moe.n_dense = {model.n_dense}" if model.n_dense else ""
    if stage > periods:
        rule = f"is more than the {held} of the model, and a stage without any would only wait"
        yield "mesh.stage", stage, rule, f"use {periods} at most"
    elif stage * chunks > periods:
        rule = f"makes {stage * chunks} parts with mesh.stage = {stage}, of {held}"
        yield "pipeline.chunks", chunks, rule, f"use {periods // stage} at most"
    if chunks > 1 and train.microbatches % stage:
        rule = f"is not a multiple of mesh.stage = {stage}, and pipeline.chunks > 1 takes them in rounds of as many"
        yield "train.microbatches", train.microbatches, rule, f"use {math.ceil(train.microbatches / stage) * stage}"
    if model.lora is not None and not set(model.lora.matrices or model.adaptable) & set(_of_pattern(model).adaptable):
        rule = f"divides layers of which model.lora.matrices = {list(model.lora.matrices or ())} adapts none"
        yield "mesh.stage", stage, rule, "adapt matrices of attention, too, or use 1"
    if config.memory.offload:
        rule = f"does not work with mesh.stage = {stage}: what waits for its backward pass stays on the device"
        yield "memory.offload", list(config.memory.offload), rule, "use [], and recompute (memory.remat) instead"


def _of_pattern(model: ModelConfig) -> ModelConfig:
    """The model without the dense layers before its pattern."""
    return model if model.moe is None else model.model_copy(update={"moe": model.moe.model_copy(update={"n_dense": 0})})


CAPABILITY = Capability(key="pipeline", mesh_rules=(_on_mesh,))
