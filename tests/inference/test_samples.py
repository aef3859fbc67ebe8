"""The sample at the end of a run fits the positions that its model has."""

import io
import re

import jax
from rich.console import Console

from maxlm.config.schema import Config
from maxlm.inference import text


class ByteTokenizer:
    """A token a byte, and one before each text."""

    special_pattern = re.compile("(?!)")

    def encode_prompt(self, words: str, *, special: bool = False) -> list[int]:
        return [0, *words.encode()]


def test_a_continuation_is_cut_to_the_learned_positions(monkeypatch, tmp_path):
    config = Config(
        model={"vocab_size": 256, "d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8, "learned_positions": {"max_seq_len": 32}},
        data={"store": "unused", "seq_len": 32},
        train={"steps": 1, "global_batch": 1},
        samples={"prompts": ["a" * 20, "a" * 40], "tokens": 30},
    )
    asked = []
    params = {"any": jax.device_put(0, jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.sharding.PartitionSpec()))}
    monkeypatch.setattr(text.SavedRun, "text_tokenizer", lambda _: ByteTokenizer())
    monkeypatch.setattr(text, "_continue", lambda *arguments: asked.append(arguments[-2].max_new_tokens) or ["!"])
    said = io.StringIO()
    found = text.print_samples(text.SavedRun(tmp_path, config), params, {}, Console(file=said, width=200), stopped=lambda: False)
    assert found == {"a" * 20: "!", "a" * 40: None}
    assert text.print_samples(text.SavedRun(tmp_path, config), params, {}, Console(file=said), stopped=lambda: True) == {}
    assert asked == [11], "after the token before the prompt"
    assert "a" * 20 + "!" in said.getvalue() and "fills all 32 tokens" in said.getvalue()
