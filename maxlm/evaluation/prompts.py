"""Prompts of items, with solved items before them."""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from maxlm.base.errors import UserError, show
from maxlm.evaluation import template
from maxlm.evaluation.task import ExactMatchTask, Item, MultipleChoiceTask, Task, read_items


class Solved(NamedTuple):
    """A prompt and its right continuation."""

    prompt: str
    answer: str


class Prompts:
    """Prompts of a task. What precedes an item depends on the seed and the item's number alone."""

    def __init__(self, task: Task, config: MultipleChoiceTask | ExactMatchTask) -> None:
        self.task, self.config = task, config

    def plain(self, item: Item) -> str:
        """The item's own prompt."""
        return template.render(self.config.prompt, item.values, self.task.where(item))

    def with_shots(self, number: int) -> str:
        """The prompt of an item, after its shots. Raises UserError if there are not enough others to draw from."""
        own, fewshot = self.plain(self.task.items[number]), self.config.fewshot
        if fewshot is None:
            return own
        shots: list[str] = []
        for index in np.random.default_rng([fewshot.seed, number]).permutation(len(self._pool)):
            other = self._pool[index]
            if other.prompt != own:
                shots.append(other.prompt + other.answer)
            if len(shots) == fewshot.shots:
                return fewshot.separator.join([*shots, own])
        raise UserError(f"task {self.task.name}: fewshot.shots = {fewshot.shots}, and there are {len(shots)} other items to draw from.")

    @cached_property
    def _pool(self) -> list[Solved]:
        """All items of the file, whatever the limit: fewer of them are asked, with the same shots."""
        data = (self.config.fewshot and self.config.fewshot.data) or self.config.data
        return [Solved(self.plain(item), self.answer(item)) for item in read_items(self.task.path_of(data))]

    def answer(self, item: Item) -> str:
        """The right continuation of an item's prompt."""
        where = self.task.where(item)
        if isinstance(self.config, MultipleChoiceTask):
            return self.continuation(item, self.choices(item)[self.gold(item)])
        text = template.render(self.config.answer, item.values, where)
        return text if self.config.prompt[-1:].isspace() or text[:1].isspace() else f" {text}"

    def choices(self, item: Item) -> list[str]:
        """Texts of the choices."""
        assert isinstance(self.config, MultipleChoiceTask)
        if not isinstance(self.config.choices, str):
            return list(self.config.choices)
        where = self.task.where(item)
        found = template.lookup(item.values, self.config.choices, where)
        if not isinstance(found, list) or len(found) < 2:
            raise UserError(f"{where}: the field {self.config.choices} is {show(found)}, not a list of two choices or more.")
        return [template.text_of(choice, self.config.choices, where) for choice in found]

    def gold(self, item: Item) -> int:
        """Number of the right choice, from 0."""
        assert isinstance(self.config, MultipleChoiceTask)
        where, field = self.task.where(item), self.config.gold
        value, choices = template.lookup(item.values, field, where), self.choices(item)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
            return value
        if isinstance(value, str) and choices.count(value) == 1:
            return choices.index(value)
        raise UserError(
            f"{where}: the field {field} is {show(value)}, neither a number from 0 to {len(choices) - 1} nor one of the choices."
        )

    def continuation(self, item: Item, choice: str) -> str:
        """The text that is scored for a choice."""
        assert isinstance(self.config, MultipleChoiceTask)
        return template.render(self.config.continuation, {**item.values, "choice": choice}, self.task.where(item))

    def check(self) -> None:
        """Render everything. Raises UserError naming the first item that is wrong."""
        for number, item in enumerate(self.task.items):
            self.with_shots(number)
            self.answer(item)
