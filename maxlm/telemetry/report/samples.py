"""Texts that the model of a run has written: the lines of `samples.jsonl`, and their section of the report."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from maxlm.base.atomic import AppendFile
from maxlm.base.strict_json import dumps, is_finite, read_objects
from maxlm.telemetry.course import Undone
from maxlm.telemetry.observer import is_step

MAX_STEPS = 10  # of a run on a page: the newest
MAX_TEXTS = 20  # of a step
MAX_CHARACTERS = 8000  # of a prompt, and of its continuation


class Sample(NamedTuple):
    """A prompt and its continuation by the weights after a step; None: the prompt left no room for one."""

    step: int
    prompt: str
    text: str | None


def append_samples(path: Path, step: int, texts: Mapping[str, str | None]) -> None:
    """Add a line for each prompt. Raises OSError."""
    made, file = round(time.time(), 3), AppendFile(path)
    try:
        for prompt, text in texts.items():
            file.append(dumps({"step": step, "time": made, "prompt": prompt, "text": text}).encode() + b"\n")
    finally:
        file.close()


def read_samples(path: Path, notes: list[str], undone: Undone) -> list[Sample]:
    """Samples of steps that count, by step and then by line; of a prompt that was continued twice after a step the newer text."""
    found: dict[tuple[int, str], Sample] = {}
    bad = 0
    for item in read_objects(path) if path.is_file() else ():
        step, made, prompt, text = (item.get(key) for key in ("step", "time", "prompt", "text"))
        if not is_step(step) or not is_finite(made) or not isinstance(prompt, str) or not isinstance(text, str | None):
            bad += 1
        elif not undone(step, made):
            found[step, prompt] = Sample(step, prompt, text)
    if bad:
        notes.append(f"{path.name}: {bad} {'line' if bad == 1 else 'lines'} could not be read and {'is' if bad == 1 else 'are'} left out.")
    return sorted(found.values(), key=lambda sample: sample.step)


def block(samples: Sequence[Sample]) -> str:
    """HTML of the samples of a run: the newest step, and below it, folded, earlier steps. "" if there are no samples."""
    steps = {step: list(of_step) for step, of_step in groupby(samples, key=lambda sample: sample.step)}
    newest = sorted(steps, reverse=True)[:MAX_STEPS]
    parts = [
        f"<details{' open' if step == newest[0] else ''}><summary>step {step:,}</summary>{_texts(steps[step])}</details>" for step in newest
    ]
    return "".join([*parts, _left_out(len(steps) - len(newest), "earlier steps")])


def _texts(samples: Sequence[Sample]) -> str:
    """A block a prompt, so that texts of several prompts cannot be mistaken for one."""
    missing = {None: "the prompt fills the context", "": "nothing"}
    texts = [escape(_cut(one.text)) if one.text else f" <i>({missing[one.text]})</i>" for one in samples[:MAX_TEXTS]]
    blocks = [f'<pre class="sample"><b>{escape(_cut(one.prompt))}</b>{text}</pre>' for one, text in zip(samples, texts, strict=False)]
    return "".join([*blocks, _left_out(len(samples) - MAX_TEXTS, "more prompts")])


def _cut(text: str) -> str:
    left = len(text) - MAX_CHARACTERS
    return text if left <= 0 else f"{text[:MAX_CHARACTERS]} … ({left:,} characters more)"


def _left_out(count: int, what: str) -> str:
    return f'<p class="note">Only in samples.jsonl: {what} ({count:,}).</p>' if count > 0 else ""
