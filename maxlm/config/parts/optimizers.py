"""The update rules, with the rules that hold for one of them alone (docs/explanation/optimizers.md)."""

from collections.abc import Iterator, Mapping
from typing import Any

from maxlm.config.capability import Inert, Problems, excludes
from maxlm.config.part import FAST, FIRST, SECOND, SLOW, OptimizerFacts, Part
from maxlm.config.sections.optimizer import AdafactorConfig, AdemamixConfig, MuonConfig, SoapConfig, moves
from maxlm.config.sections.optimizer_state import FLOAT32, OptimizerStateConfig

NAMED = "optimizer.name = schedule_free"
LEAST_BETA1 = 0.1  # the average is divided by it: errors of float32 grow tenfold
ADAMW = "use optimizer.name=adamw"


def _muon(muon: MuonConfig) -> Problems:
    yield from moves("muon.momentum", muon.momentum)


def _ademamix(ademamix: AdemamixConfig, optimizer_beta1: float) -> Problems:
    yield from moves("ademamix.beta3", ademamix.beta3)
    if ademamix.beta3 <= optimizer_beta1:
        rule = f"is not above optimizer.beta1 = {optimizer_beta1:g}, so the slow average would be the faster one"
        yield "optimizer.ademamix.beta3", ademamix.beta3, rule, "use 0.999 to 0.9999"


def _branched(ademamix: AdemamixConfig, train_branch_from: object) -> Problems:
    """A branch of a run, in which averages that rise over the whole run would rise in another way."""
    if train_branch_from is not None and ademamix.warmup_steps is None:
        rule = "is not set, so that beta3 and alpha rise over the whole run, and a branch has another length"
        fix = "set it in the stable run and in the branch, to the same number"
        yield "optimizer.ademamix.warmup_steps", None, rule, fix


def _adafactor(adafactor: AdafactorConfig, optimizer_state: OptimizerStateConfig | None) -> Problems:
    if optimizer_state is not None and optimizer_state.moments != FLOAT32:
        rule = "optimizer.name = adafactor has no first moment"
        yield "optimizer.state.moments", optimizer_state.moments, rule, f"remove it, or {ADAMW}"
    if optimizer_state is not None and optimizer_state.second_moment is not None:
        rule = "the second moment of optimizer.name = adafactor is always factored"
        yield "optimizer.state.second_moment", optimizer_state.second_moment, rule, f"remove it, or {ADAMW}"


def _without_adams(adafactor: AdafactorConfig) -> Iterator[Inert]:
    why = "optimizer.name = adafactor has no first moment, and a decay of its own"
    yield from (Inert(f"optimizer.{field}", why, ADAMW) for field in ("beta1", "beta2", "eps"))


def _without_divisor(lion: None) -> Iterator[Inert]:
    yield Inert("optimizer.eps", "optimizer.name = lion divides by nothing", ADAMW)


def _bases(soap: SoapConfig) -> Mapping[str, Any]:
    """Numbers in the state of SOAP."""
    return {"optimizer.soap.largest": soap.largest} if soap.largest != SoapConfig().largest else {}


def _schedule_free(own: None, optimizer_schedule: str, optimizer_beta1: float, optimizer_state: OptimizerStateConfig | None) -> Problems:
    """Settings that contradict the average, or that would evaluate another point."""
    if optimizer_schedule != "constant":
        rule = f"decays the learning rate, and {NAMED} averages in place of a decay"
        yield "optimizer.schedule", optimizer_schedule, rule, "use optimizer.schedule=constant, which warms up first"
    if optimizer_beta1 < LEAST_BETA1:
        rule = f"takes gradients so near to z that the average of {NAMED}, which is computed from them, would be their rounding"
        yield "optimizer.beta1", optimizer_beta1, rule, "use 0.9 to 0.98"
    state = optimizer_state
    if state is not None and state.moments != FLOAT32:
        fix = "remove it, and set optimizer.state.second_moment instead"
        yield "optimizer.state.moments", state.moments, f"{NAMED} has no first moment, and its point z is float32", fix
    if state is not None and state.masters != FLOAT32:
        rule = f"stores weights in two parts, and the average of {NAMED} is computed from float32"
        yield "optimizer.state.masters", state.masters, rule, "use float32"


EXCLUDED = {
    "ema": "averages parameters, as is done already by",
    "diloco": "takes the mean of workers' parameters, and leaves behind the points z of",
    "memory.offload_state": "keeps state off the device, where evaluations compute the average of",
}

PARTS = (
    Part(
        kind="optimizer",
        name="adamw",
        place="maxlm.training.update_rules:AdamW",
        about="Adam with decoupled weight decay (arXiv 1711.05101).",
        facts=OptimizerFacts((FIRST, SECOND), factored=True, freezes=True, scales=True),
    ),
    Part(
        kind="optimizer",
        name="muon",
        place="maxlm.training.update_rules:Muon",
        about="Orthogonalised momentum of hidden matrices, Adam for all else (Jordan 2024; arXiv 2502.16982).",
        section=MuonConfig,
        rules=(_muon,),
        facts=OptimizerFacts((FIRST,), adam=True, gathers=True, scales=True),
    ),
    Part(
        kind="optimizer",
        name="soap",
        place="maxlm.training.update_rules:Soap",
        about="Adam in the eigenbasis of Shampoo's covariances, for hidden matrices (arXiv 2409.11321).",
        section=SoapConfig,
        identity=_bases,
        facts=OptimizerFacts((FIRST, SECOND), adam=True, gathers=True, more="a covariance and a basis of each side that is rotated"),
    ),
    Part(
        kind="optimizer",
        name="lion",
        place="maxlm.training.update_rules:Lion",
        about="Sign of an interpolated momentum (arXiv 2302.06675).",
        inert=_without_divisor,
        facts=OptimizerFacts((FIRST,)),
    ),
    Part(
        kind="optimizer",
        name="adafactor",
        place="maxlm.training.update_rules:Adafactor",
        about="Factored second moments, no first moment (arXiv 1804.04235, algorithm 4).",
        section=AdafactorConfig,
        rules=(_adafactor,),
        inert=_without_adams,
        facts=OptimizerFacts((), factored=True),
    ),
    Part(
        kind="optimizer",
        name="ademamix",
        place="maxlm.training.update_rules:AdEMAMix",
        about="Adam with a second, slow average of gradients (arXiv 2409.03137).",
        section=AdemamixConfig,
        rules=(_ademamix, _branched),
        facts=OptimizerFacts((FAST, SLOW, SECOND)),
    ),
    Part(
        kind="optimizer",
        name="schedule_free",
        place="maxlm.training.update_rules:ScheduleFree",
        about="AdamW with an average of iterates in place of a decaying rate (arXiv 2405.15682, algorithm 1).",
        rules=(_schedule_free, excludes(EXCLUDED, f" {NAMED}", f"remove it, or {ADAMW}")),
        identity=lambda own, optimizer_beta1: {"optimizer.beta1": optimizer_beta1},  # the averaged point reads it
        stored=("maxlm.training.schedule_free:AveragedPoint",),
        facts=OptimizerFacts((SECOND, "z")),
    ),
)
