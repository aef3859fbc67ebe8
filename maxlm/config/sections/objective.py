"""The loss: next-token prediction, supervised fine-tuning, direct preference optimization."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from maxlm.config.capability import Capability, Problems
from maxlm.config.fields import Float, PositiveFloat, Section
from maxlm.config.sections.moe import MoeConfig
from maxlm.hardware.topologies import either

if TYPE_CHECKING:
    from maxlm.config.schema import Config


class NextTokenConfig(Section):
    """Next-token prediction."""

    kind: Literal["next_token"]


class SftConfig(Section):
    """Supervised fine-tuning: next-token prediction of responses only."""

    kind: Literal["sft"]


class DpoConfig(Section):
    """Direct preference optimization (arXiv 2305.18290). The frozen reference is the model that training starts from."""

    kind: Literal["dpo"]
    beta: PositiveFloat = 0.1  # strength of the pull towards the reference
    label_smoothing: Annotated[Float, Field(ge=0, lt=0.5)] = 0.0  # probability that a pair is the wrong way round


ObjectiveConfig = Annotated[NextTokenConfig | SftConfig | DpoConfig, Field(discriminator="kind")]  # rows of maxlm.objectives.OBJECTIVES


def _problems(config: "Config") -> Problems:
    """Fine-tuning on conversations, whose rows are packed and whose loss is a mean over responses or pairs."""
    objective, moe = config.objective, config.model.moe
    yield from _objective_of_store(config)
    if objective is None or objective.kind == "next_token":
        return
    kind = f"objective.kind = {objective.kind}"
    yield from _packed_router(moe, objective.kind)
    if not config.data.mask_documents:
        yield "data.mask_documents", False, f"{kind} packs conversations, and attention stays inside each", "use true"
    for name in ("balance_loss", "z_loss") if moe is not None else ():
        if value := getattr(moe.router if moe else None, name):
            rule = f"is a mean over all tokens, and {kind} divides by responses or pairs"
            yield f"model.moe.router.{name}", value, rule, "use 0, which may differ from the source's"
    if objective.kind != "dpo":
        return
    if config.train.start_from is None:
        yield "train.start_from", None, f"{kind} needs the model that is its reference and its beginning", "set train.start_from.path"
    if config.train.z_loss:
        yield "train.z_loss", config.train.z_loss, f"{kind} compares log-probabilities, and adds nothing to them", "use 0"
    if config.model.mtp is not None:
        yield "model.mtp", "set", f"{kind} has no loss of tokens further ahead", "fine-tune with objective.kind=sft"


def _objective_of_store(config: "Config") -> Problems:
    """An objective that would refuse the store once it is prepared, which may take hours."""
    prepare, kind = config.data.prepare, config.objective.kind if config.objective is not None else "next_token"
    if prepare is None:
        return
    name, made = "data.prepare.conversations", prepare.conversations.kind if prepare.conversations is not None else None
    read: dict[str, tuple[str | None, ...]] = {"next_token": (None,), "sft": ("prompt_response", "chat"), "dpo": ("preferences",)}
    if made not in read[kind]:
        kinds = [one for one in read[kind] if one is not None]
        fix = f"set {name}.kind to {either(kinds)}" if kinds else f"remove {name}"
        store = f"data.prepare makes without {name}" if made is None else f"{name}.kind = {made} makes"
        reader = next(one for one in read if made in read[one])
        yield "objective.kind", kind, f"does not read the store that {store}", f"use {reader}, or {fix}"


def _packed_router(moe: MoeConfig | None, kind: str) -> Problems:
    """Routers that look beyond a segment of a packed row, or that route a text in another way than the reference did."""
    if moe is None:
        return
    router, name = moe.router, "model.moe.router"
    if router.choice == "expert":
        rule = f"compares the tokens of a whole row, and objective.kind = {kind} packs conversations that must not see each other"
        yield f"{name}.choice", "expert", rule, "fine-tune a model whose tokens choose"
    if kind == "dpo" and router.capacity is not None:
        rule = "drops a token by what comes before it in the row, so one text has other log-probabilities in another row"
        yield f"{name}.capacity", router.capacity, rule, "use null, which may differ from the source's"
    if kind == "dpo" and router.jitter:
        rule = "changes log-probabilities in training, and the reference's are computed without it"
        yield f"{name}.jitter", router.jitter, rule, "use 0, which may differ from the source's"


def _identity(config: "Config") -> dict[str, Any]:
    """The kind; the absent section is next-token prediction."""
    kind = "next_token" if config.objective is None else config.objective.kind
    return {} if kind == "next_token" else {"objective.kind": kind}


CAPABILITY = Capability(key="objective", rules=(_problems,), identity=_identity)
