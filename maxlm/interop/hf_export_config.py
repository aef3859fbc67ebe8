"""The config.json that describes a model of ours: written by the family that reads the same settings from it."""

from maxlm.base.errors import UserError
from maxlm.config.fields import flatten
from maxlm.config.schema import ModelConfig
from maxlm.config.sections.mtp import MtpConfig
from maxlm.config.sections.rope import DynamicScaling
from maxlm.interop.families import FAMILIES, Family
from maxlm.interop.families.keys import Json
from maxlm.interop.families.rope import POSITIONS, positions
from maxlm.interop.hf_config import read_config, text_tower

# Settings of training, which say nothing about the network.
TRAINING = (
    "init_std",
    "mtp.loss_weight",
    *(f"moe.router.{name}" for name in ("balance_loss", "balance_over", "z_loss", "jitter", "capacity", "bias_rate")),
)


_UNREADABLE = 1000  # differences of a family with a config.json that cannot be read again
_LEAST_POSITIONS = 2048  # the least that a family of the library has by default, but for GPT-2
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # null where there is none: the library has defaults of its own
_OLDER_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")  # next to `rope_parameters`


def family_of(config: ModelConfig, seq_len: int, published: Json | None = None) -> tuple[Family, Json]:
    """Return (family, config.json) that describe `config`. `published`: the config.json of the imported model, restated except for keys
    that differ now. `seq_len`: tokens of its sequences in training here, 0 without. Raises UserError naming the settings that the nearest
    family cannot state, or the library cannot run.
    """
    base = None if published is None else _base(published)
    if base is not None and (restated := _restated(config, seq_len, *base)) is not None:
        return restated
    known = {} if base is None else base[1]
    seq_len = max(seq_len, known.get(POSITIONS) or 0)
    nearest: tuple[int, str] = (1 << 30, "")
    for family in FAMILIES.values():
        values = family.write(config)
        if family.model_type != "gpt2":
            values |= {POSITIONS: positions(config.rope, config.max_seq_len or seq_len)}
        differing = _differing(config, values)
        if not differing:
            facts = {key: known.get(key) for key in _TOKENS}
            return family, {"architectures": [family.architecture], **values, **facts}
        nearest = min(nearest, (len(differing), f"{family.architecture} cannot say {', '.join(differing[:3])}"))
    raise UserError(f"This model cannot be exported: no published architecture is like it; the nearest, {nearest[1]}.")


def _base(published: Json) -> tuple[Family, Json]:
    """(family, config.json) of the published model, or of its text tower, by a type that the library has."""
    try:
        values = text_tower(published, "the published config.json")
        family = read_config(values, "the published config.json")[0]
    except UserError as error:  # imported by another version of maxlm
        raise UserError(f"{error} To export without what the source said, remove the folder `published` from the run.") from None
    known = next(name for name, one in FAMILIES.items() if one.architecture == family.architecture)
    if known != published["model_type"]:
        values = {key: value for key, value in values.items() if key != "auto_map"}
        values |= {"model_type": known, "architectures": [family.architecture]}
    return FAMILIES[known], values


def _restated(config: ModelConfig, seq_len: int, family: Family, published: Json) -> tuple[Family, Json] | None:
    """Return the published config with the settings of `config` that differ; None if this is no model of its family any more."""
    try:
        section = read_config(published, "the published config.json")[1]
        depth = published.get("num_nextn_predict_layers") or 0
        mtp = config.mtp if config.mtp_depth in (0, depth) else MtpConfig(depth=depth)  # not all releases have the modules' weights
        was = ModelConfig(**{**section, "mtp": mtp})
    except ValueError:
        return None
    before, after = (family.write(model) for model in (was, config))
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    left_out = {key for key in changed if key not in after} | set(_OLDER_ROPE if "rope_parameters" in changed else ())
    values = {key: value for key, value in published.items() if key not in left_out} | {key: after[key] for key in changed if key in after}
    known = values.get(POSITIONS)
    scaled = positions(config.rope, seq_len) if config.rope != was.rope or isinstance(config.rope.scaling, DynamicScaling) else seq_len
    if scaled and family.model_type != "gpt2" and scaled > (known or _LEAST_POSITIONS):
        values[POSITIONS] = scaled
    return None if _differing(config, values) else (family, values)


def _differing(config: ModelConfig, values: Json) -> list[str]:
    try:
        section = read_config(values, "config.json")[1]
        further = MtpConfig(depth=config.mtp_depth) if config.mtp and FAMILIES[values["model_type"]].copies else None
        again = ModelConfig(**{**section, "mtp": further})
    except (UserError, ValueError) as error:
        return [str(error).splitlines()[0]] * _UNREADABLE
    mine, theirs = (dict(flatten(model.model_dump(mode="json"))) for model in (config, again))
    differing = [
        f"model.{key} = {mine.get(key)}" for key in {**mine, **theirs} if mine.get(key) != theirs.get(key) and not key.startswith(TRAINING)
    ]
    if config.moe is not None and not config.n_dense:  # then no layer is as wide as d_ff
        differing = [text for text in differing if not text.startswith("model.d_ff ")]
    differing += FAMILIES[values["model_type"]].problems(values)
    balanced = [bool(model.moe and model.moe.router.bias_rate) for model in (config, again)]
    return differing + (["model.moe.router.bias_rate"] if balanced[0] != balanced[1] else [])
