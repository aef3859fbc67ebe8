"""Low-rank adapters on a frozen model."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from maxlm.config.capability import FLOAT32, Capability, Problems, StateEntry
from maxlm.config.fields import Positive, PositiveFloat, Section
from maxlm.config.part import OptimizerFacts

LoraMatrix = Literal["query", "key", "value", "out", "query_down", "kv_down", "kv", "gate", "up", "down"]


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): the model of `train.start_from` is frozen; a matrix W becomes W + alpha / rank * A B."""

    rank: Positive
    """Inner dimension of the product A B that is added to each adapted matrix. Unit: dims."""
    alpha: PositiveFloat = 16.0
    """The product A B is multiplied by alpha / rank. Unit: factor."""
    matrices: Annotated[tuple[LoraMatrix, ...], Field(min_length=1)] | None = None
    """Adapted matrices, by their names in the parameter tree: matrices of attention (query_down, kv_down and kv belong to model.latent),
    and of feed-forward layers that are dense or shared by all tokens. null: all of these that the model has. Embeddings, norms, routers and
    routed experts are never adapted.
    """


def _problems(
    lora: LoraConfig,
    model_adaptable: tuple[str, ...],
    model_moe: object,
    model_d_model: int,
    optimizer_name: str,
    optimizer_facts: OptimizerFacts,
    diloco: object,
) -> Problems:
    """Settings of `model.lora`, and what does not go together with a frozen model."""
    if other := [name for name in lora.matrices or () if name not in model_adaptable]:
        experts = " (experts are not adapted)" if model_moe is not None else ""
        yield (
            "model.lora.matrices",
            list(lora.matrices or ()),
            f"this model has no `{other[0]}`{experts}",
            f"it has {', '.join(model_adaptable)}",
        )
    if lora.rank > model_d_model:
        yield "model.lora.rank", lora.rank, f"is above model.d_model = {model_d_model}, the rank of a whole matrix", "use 4 to 64"
    if optimizer_facts.gathers:
        yield "optimizer.name", optimizer_name, "is for whole matrices, and model.lora trains none", "use adamw"
    if diloco is not None:
        rule = "gives every worker a state of its own, with the frozen model of model.lora"
        yield "diloco", "set", rule, "remove one of them: adapters are small, so reductions cost little"


def _adapted_at_random(lora: LoraConfig, train_start_from: object) -> Problems:
    if train_start_from is None:
        rule = "model.lora freezes the model that training starts from, and without one frozen weights would be random"
        yield "train.start_from", None, rule, "set train.start_from.path to a run or an imported model"


CAPABILITY = Capability(
    key="model.lora",
    rules=(_problems,),
    written_rules=(_adapted_at_random,),
    state=lambda lora, state: replace(state, entries={"frozen parameters": StateEntry(FLOAT32)}, trained=False),  # adapters are few
    unplanned="a frozen model (model.lora)",
)
