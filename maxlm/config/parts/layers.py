"""The parts of a layer: sequence mixers, residual rules and feed-forward parts. There is no memory yet."""

from maxlm.config.part import FeedForwardFacts, MixerFacts, Part, ResidualFacts
from maxlm.config.sections.model import LatentConfig
from maxlm.config.sections.moe import MoeConfig

ATTENTION = "maxlm.models.mixers.attention:Attention"

PARTS = (
    Part(kind="mixer", name="global", place=ATTENTION, about="Attention over the whole document."),
    Part(kind="mixer", name="local", place=ATTENTION, about="Attention over a window of `model.window` tokens."),
    Part(
        kind="mixer",
        name="latent_attention",
        place="maxlm.models.mixers.latent_attention:LatentAttention",
        about="Multi-head latent attention (arXiv 2405.04434), in place of the others where `model.latent` is set.",
        section=LatentConfig,
        facts=MixerFacts(by_section="latent", replaces=("global", "local")),
    ),
    Part(
        kind="residual",
        name="pre",
        place="maxlm.models.residual:Additive",
        about="x + f(norm(x)) for each sublayer.",
    ),
    Part(
        kind="residual",
        name="sandwich",
        place="maxlm.models.residual:Sandwich",
        about="x + norm(f(norm(x))) for each sublayer (Gemma 2, arXiv 2408.00118).",
        facts=ResidualFacts(norms_output=True),
    ),
    Part(kind="feed_forward", name="dense", place="maxlm.models.feed_forward.dense:Mlp", about="A dense feed-forward layer."),
    Part(
        kind="feed_forward",
        name="experts",
        place="maxlm.models.feed_forward.experts:Moe",
        about="Experts behind a router, after the first `model.moe.n_dense` layers.",
        section=MoeConfig,
        facts=FeedForwardFacts(by_section="moe"),
    ),
)
