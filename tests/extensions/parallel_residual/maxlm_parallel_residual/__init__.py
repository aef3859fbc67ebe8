"""Blocks whose sublayers read the same normed input, as in GPT-J and PaLM (arXiv 2204.02311, section 2), and a family that states them.

model: {norm_position: parallel}
"""

import maxlm
from maxlm.config.capability import Problems
from maxlm.config.part import Part


def _problems(own: None, model_parametrization: object) -> Problems:
    if model_parametrization is not None:
        rule = "is not derived for model.norm_position = parallel"
        yield "model.parametrization", "set", rule, "remove it, or use model.norm_position=pre"


maxlm.register(
    Part(
        kind="residual",
        name="parallel",
        place="maxlm_parallel_residual.block:Parallel",
        about="x + attention(norm(x)) + mlp(norm(x)), with one norm (PaLM, arXiv 2204.02311).",
        rules=(_problems,),
    )
)
maxlm.register(Part(kind="family", name="parallel_llama", place="maxlm_parallel_residual.family:FAMILY"))
