"""Keys of a config.json, and the rows of a family's table: each row reads keys into our settings and writes them back.

A section of settings is flat while it is read: dotted names below `model`, such as `moe.router.scale`. Keys that change nothing in the
network are listed too: whatever they say, or for the values that are listed with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from maxlm.base.errors import UserError, quoted, shorten
from maxlm.config.fields import INT64, LARGEST
from maxlm.config.schema import ModelConfig

# Names of files and versions, special tokens, dropout, which pretraining does without, and parallel layouts and kernels of other programs.
_FACTS = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _experts_implementation
    _flash_attn_2_enabled
    _name_or_path attn_implementation experts_implementation name_or_path model_name model_type transformers_version transformers.js_config
    unsloth_fixed unsloth_version unsloth_traced_tensors use_flash_attn use_flash_attention_2 flash_attn
    architectures auto_map tokenizer_class processor_class license language tags keys_to_ignore_at_inference
    dtype torch_dtype gradient_checkpointing use_gradient_checkpointing base_model_tp_plan base_model_pp_plan base_model_ep_plan tp_plan
    ep_size
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    bos_token eos_token pad_token unk_token
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout classifier_dropout_prob dropout embd_pdrop hidden_dropout
    hidden_dropout_prob residual_dropout resid_pdrop
    initializer_range is_llama_config max_position_embeddings initial_context_length max_sequence_length model_max_length n_ctx seq_length
    max_window_layers num_nextn_predict_layers qk_head_dim reorder_and_upcast_attn pretraining_tp rope_parameters rope_scaling rope_theta
    seq_aux chunk_size_feed_forward neftune_noise_alpha
"""
# Outputs of a call, and heads for other tasks.
_OUTPUTS = """
    output_attentions output_hidden_states output_router_logits output_scores return_dict return_dict_in_generate use_cache
    id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
"""
# How a text is generated, which older versions of the library wrote into config.json.
_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens min_length
    min_new_tokens no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep num_return_sequences penalty_alpha
    remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p
"""
HARMLESS = frozenset((_FACTS + _OUTPUTS + _GENERATION).split())
# Of these: keys of the networks of some families, which count only where the library reads them.
_OF_NETWORKS = """
    initial_context_length max_position_embeddings max_window_layers num_nextn_predict_layers qk_head_dim rope_parameters rope_scaling
    rope_theta seq_aux
"""
OF_NETWORKS = frozenset(_OF_NETWORKS.split())

_OFF = """
    add_cross_attention alibi attention_bias is_decoder is_encoder_decoder mlp_bias o_bias qkv_bias rope_interleaved rope_traditional
    tie_encoder_decoder torchscript use_bfloat16 use_bias use_bidirectional_attention use_mrope use_parallel_residual use_qk_norm
    use_qkv_bias use_sliding_window
"""
# Keys that must have one of these values in families that do not read them: any other value changes the network.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF.split(), (False,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "partial_rotary_factor"), (1,)),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "pruned_heads": ({},),
    "scale_attn_weights": (True,),
    "tf_legacy_loss": (False, True),
}


Json = dict[str, Any]
Section = dict[str, Any]
MOST_NAMED, MOST_SAID = 40, 600  # unknown keys in an error, and characters of them with their values
MOST = 10_000  # layers, or experts of a layer: the names of all tensors are made before any is read


class Keys:
    """The keys of a config.json; remembers which were asked for."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source, self._asked = values, source, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or `default` where the key is missing or null."""
        self._asked.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = INT64) -> int:
        """Return a whole number, from `least` to `most`."""
        value = self.get(key, default)
        if type(value) is not int or not least <= value <= INT64:
            self.refuse(key, value, f"must be a whole number above {least - 1}" if least else "must be a whole number, 0 or above")
        if value > most:
            self.refuse(key, value, f"is above {most:,}, which no model has")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not abs(value) < LARGEST:  # false for NaN
            self.refuse(key, value, "must be a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(key, default)
        return value if value > 0 else self.refuse(key, value, "must be above 0")

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        return value if type(value) is bool else self.refuse(key, value, "must be true or false")

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a JSON object; empty where the key is missing or null."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.refuse(key, value, "must be an object")
        return value

    def ignore(self, *names: str) -> None:
        """Accept any value of these keys."""
        self._asked.update(names)

    def only(self, key: str, *values: Any) -> None:
        """Refuse any value but these, of which the first is the default."""
        if self.get(key, values[0]) not in values:
            self.refuse(key, self._values[key], f"is not supported: only {' or '.join(map(repr, values))} is")

    def finish(self) -> None:
        """Refuse all keys that nothing has asked for, unless they change nothing."""
        left = {key: self._values[key] for key in sorted(self._values.keys() - self._asked - HARMLESS)}
        told = {key: value for key, value in left.items() if value is not None and value not in NEUTRAL.get(key, ())}
        if told:
            names = [shorten(key) if key.isprintable() else quoted(key) for key in told]
            said = [f"{name} = {shown(value)}" for name, value in zip(names, told.values(), strict=True)]
            if len(", ".join(said)) > MOST_SAID:
                said = names
            one = "is a setting that maxlm does not know, so it cannot say what it changes"
            rule = one if len(said) == 1 else "are settings that maxlm does not know, so it cannot say what they change"
            more = f", and {len(said) - MOST_NAMED} more" if len(said) > MOST_NAMED else ""
            raise UserError(f"{self._source}: {', '.join(said[:MOST_NAMED])}{more} {rule}.")

    def refuse(self, key: str, value: Any, rule: str) -> NoReturn:
        """Raise UserError naming the file, the key and its value."""
        raise UserError(f"{self._source}: {key} = {shown(value)} {rule}.")


def shown(value: Any) -> str:
    """Return `value` for a message, shortened."""
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


class Row:
    """One row of a family's table."""

    def read(self, keys: Keys, section: Section) -> None:
        """Add the settings that keys state to `section`. Raises UserError."""

    def write(self, config: ModelConfig) -> Json:
        """Return the keys that state these settings of `config`."""
        return {}


@dataclass(frozen=True)
class Key(Row):
    """A key that states one setting. `kind`: method of `Keys` that reads it; `default`: None if the key is required, unless `optional`;
    `other`: key that gives the default; `sparse`: leave the default out of our settings.
    """

    theirs: str
    ours: str
    kind: str = "count"
    default: Any = None
    other: str = ""
    optional: bool = False
    sparse: bool = False
    limits: tuple[tuple[str, int], ...] = ()  # `least` and `most` of a count

    def read(self, keys: Keys, section: Section) -> None:
        default = keys.get(self.other) if self.other else self.default
        if self.optional and keys.get(self.theirs) is None:
            return
        value = getattr(keys, self.kind)(self.theirs, default, **dict(self.limits))
        if not (self.sparse and value == default):
            section[self.ours] = value

    def write(self, config: ModelConfig) -> Json:
        return {self.theirs: setting(config, self.ours, self.default)}


def setting(config: Any, name: str, default: Any = None) -> Any:
    """Return the setting of this dotted name, or `default` if one of its sections is None."""
    for part in name.split("."):
        if config is None:
            return default
        config = getattr(config, part)
    return config


@dataclass(frozen=True)
class Choice(Row):
    """Keys that together state one setting of `model`, by the values that they may have. The first key values are written for a setting
    that no values state. `default`: values of missing keys.
    """

    theirs: tuple[str, ...]
    ours: str
    settings: Mapping[tuple[Any, ...], Any]
    default: tuple[Any, ...] = ()

    def read(self, keys: Keys, section: Section) -> None:
        defaults = self.default or next(iter(self.settings))
        given = tuple(
            keys.flag(key, default) if isinstance(default, bool) else keys.get(key, default)
            for key, default in zip(self.theirs, defaults, strict=True)
        )
        if not all(isinstance(value, bool | str) for value in given) or given not in self.settings:
            rule = f"is not supported: {', '.join(str(one) for one, *_ in self.settings)} are"
            if len(given) > 1:
                others = zip(self.theirs[1:], given[1:], strict=True)
                rule = "is not supported with " + " and ".join(f"{key} = {value}" for key, value in others)
            keys.refuse(self.theirs[0], given[0], rule)
        if (value := self.settings[given]) != ModelConfig.model_fields[self.ours].default:
            section[self.ours] = value

    def write(self, config: ModelConfig) -> Json:
        stated = (given for given, value in self.settings.items() if value == getattr(config, self.ours))
        return dict(zip(self.theirs, next(stated, next(iter(self.settings))), strict=True))


class Only(Row):
    """A key with one supported value, or several, of which the first is the default. `written`: state the default in an export."""

    def __init__(self, key: str, *values: Any, written: bool = False) -> None:
        self._key, self._values, self._written = key, values, written

    def read(self, keys: Keys, section: Section) -> None:
        keys.only(self._key, *self._values)

    def write(self, config: ModelConfig) -> Json:
        return {self._key: self._values[0]} if self._written else {}


class Fixed(Row):
    """Settings that all models of a family share, which no key states."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def read(self, keys: Keys, section: Section) -> None:
        section |= self._settings


class Ignored(Row):
    """Keys with any value. `stated`: values that an export writes."""

    def __init__(self, *names: str, **stated: Any) -> None:
        self._names, self._stated = names, stated

    def read(self, keys: Keys, section: Section) -> None:
        keys.ignore(*self._names, *self._stated)

    def write(self, config: ModelConfig) -> Json:
        return self._stated


def nested(section: Section) -> Section:
    """Return settings by dotted name as sections in sections."""
    whole: Section = {}
    for name, value in section.items():
        *parents, last = name.split(".")
        branch = whole
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return whole
