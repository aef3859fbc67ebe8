"""The loss: next-token prediction, supervised fine-tuning, direct preference optimization."""

from typing import Annotated, Literal

from pydantic import Field

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Float, PositiveFloat, Section
from maxlm.config.part import ObjectiveFacts
from maxlm.config.sections.model import ModelConfig
from maxlm.config.sections.moe import MoeConfig
from maxlm.config.sections.train import TrainConfig


class NextTokenConfig(Section):
    """Next-token prediction: the mean cross-entropy of every token given the tokens before it."""

    kind: Literal["next_token"]


class SftConfig(Section):
    """Supervised fine-tuning: next-token prediction of responses only."""

    kind: Literal["sft"]


class DpoConfig(Section):
    """Direct preference optimization (arXiv 2305.18290). The frozen reference is the model that training starts from."""

    kind: Literal["dpo"]
    beta: PositiveFloat = 0.1
    """Strength of the pull towards the reference: factor of the log-probability ratios in the loss. Unit: factor."""
    label_smoothing: Annotated[Float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed probability that a pair is the wrong way round. Unit: probability."""


ObjectiveConfig = Annotated[NextTokenConfig | SftConfig | DpoConfig, Field(discriminator="kind")]


def _problems(
    objective: ObjectiveConfig, objective_facts: ObjectiveFacts, model: ModelConfig, data_mask_documents: bool, train: TrainConfig
) -> Problems:
    """Fine-tuning on conversations: rows are packed, and the loss is a mean over responses or pairs."""
    moe = model.moe
    if objective_facts.content == "text":
        return
    kind = f"objective.kind = {objective.kind}"
    yield from _packed_router(moe, objective.kind, objective_facts.reference)
    if not data_mask_documents:
        yield "data.mask_documents", False, f"{kind} packs conversations, and attention stays inside each", "use true"
    for name in ("balance_loss", "z_loss") if moe is not None else ():
        if value := getattr(moe.router if moe else None, name):
            rule = f"is a mean over all tokens, and {kind} divides by responses or pairs"
            yield f"model.moe.router.{name}", value, rule, "use 0, which may differ from the source's"
    if not objective_facts.reference:
        return
    if train.start_from is None:
        yield "train.start_from", None, f"{kind} needs the model that is its reference and its beginning", "set train.start_from.path"
    if train.z_loss:
        yield "train.z_loss", train.z_loss, f"{kind} compares log-probabilities, and adds nothing to them", "use 0"


def _further(objective: ObjectiveConfig, objective_facts: ObjectiveFacts, model_mtp: object) -> Problems:
    if model_mtp is not None and not objective_facts.further:
        fix = "remove it" if objective_facts.content == "text" else "fine-tune with objective.kind=sft"
        yield "model.mtp", "set", f"objective.kind = {objective.kind} has no loss of tokens further ahead", fix


def _packed_router(moe: MoeConfig | None, kind: str, reference: bool) -> Problems:
    """Routers that look beyond a segment of a packed row, or that route a text in another way than the reference did."""
    if moe is None:
        return
    router, name = moe.router, "model.moe.router"
    if router.choice == "expert":
        rule = f"compares the tokens of a whole row, and objective.kind = {kind} packs conversations that must not see each other"
        yield f"{name}.choice", "expert", rule, "fine-tune a model with choice: token"
    if reference and router.capacity is not None:
        rule = "drops a token by what comes before it in the row, so one text has other log-probabilities in another row"
        yield f"{name}.capacity", router.capacity, rule, "use null, which may differ from the source's"
    if reference and router.jitter:
        rule = "changes log-probabilities in training, and the reference's are computed without it"
        yield f"{name}.jitter", router.jitter, rule, "use 0, which may differ from the source's"


CAPABILITY = Capability(
    key="objective",
    rules=(_problems, _further),
    identity=lambda one: {} if one.kind == "next_token" else {"objective.kind": one.kind},  # as the absent section
)
