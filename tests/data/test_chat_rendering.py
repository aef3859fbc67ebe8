"""Chat templates of the structure that 19 families publish render as transformers renders them, and the same turns count."""

import json
import re

import numpy as np
import pytest
from record_chat import BOS, CONVERSATIONS, DAY, EOS, READS_PARTS, RECORDED, byte_tokenizer, names, sources

from maxlm.config.sections.prepare import ChatConfig
from maxlm.data import marks
from maxlm.data.chat_template import ChatTemplate, Renderer, TemplateError
from maxlm.data.conversations import ConversationEncoder
from maxlm.data.encoding import NOTHING
from maxlm.data.messages import TextChecker, read_conversation
from maxlm.data.sources import Document

TRANSFORMERS = json.loads(RECORDED.read_text(encoding="utf-8"))
CASES = [(name, key) for name in names() for key in CONVERSATIONS]
CHECK = TextChecker(re.compile("(?!)"), False)


@pytest.fixture(scope="module")
def renderers():
    """Compiled templates by family."""
    return {name: Renderer(template(name)) for name in names()}


def template(name):
    source = sources(name)
    return ChatTemplate(source["default"], {"bos_token": BOS, "eos_token": EOS}, DAY, source.get("tool_use"))


def test_the_recording_is_whole():
    assert len(names()) >= 18 and len(CONVERSATIONS) == 10
    assert {name: [*found] for name, found in TRANSFORMERS.items() if name != "transformers"} == {
        name: [*CONVERSATIONS] for name in names()
    }
    assert sum("fails" in found for name in names() for found in TRANSFORMERS[name].values()) < 10


@pytest.mark.parametrize(("name", "key"), CASES)
def test_text_and_turns_are_those_of_transformers(renderers, name, key):
    row, wanted = CONVERSATIONS[key], TRANSFORMERS[name][key]
    conversation = read_conversation(row, "messages", CHECK)
    if "fails" in wanted:
        with pytest.raises(TemplateError, match="fails"):
            renderers[name].render(conversation)
        return
    assert renderers[name].prompt(conversation) == wanted["prompt"]
    turns = wanted.get("turns")
    if turns is None:
        assert renderers[name].render(conversation).text == wanted["text"]
    elif None not in turns:
        assert renderers[name].render(conversation) == (wanted["text"], [tuple(turn) for turn in turns])
    else:
        with pytest.raises(TemplateError, match=r"{% generation %}.*data\.prepare\.conversations\.template"):
            renderers[name].render(conversation)
    if turns is not None and turns[-1] is not None:
        assert renderers[name].render(conversation, last=True) == (wanted["text"], [tuple(turns[-1])])


@pytest.mark.parametrize(("name", "key"), [case for case in CASES if "mask" in TRANSFORMERS[case[0]][case[1]]])
def test_tokens_that_count_are_those_of_transformers(monkeypatch, renderers, name, key):
    """By the marks of the template, with a token a byte."""
    encode = ConversationEncoder(ChatConfig(kind="chat"), byte_tokenizer().to_str(), EOS, template(name), 10_000)
    encode._render = lambda conversation, last: renderers[name].render(conversation, last)
    document = Document(json.dumps(CONVERSATIONS[key]), key, 0, NOTHING)
    marked = encode([document])[0][0][:-1]  # the end of the document is ours
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (marked & marks.COUNTS) != 0, [0]]).astype(int)))
    assert edges.reshape(-1, 2).tolist() == TRANSFORMERS[name][key]["mask"]


def test_parts_are_given_to_templates_that_read_them(renderers):
    """One that loops over a content; any other is given the texts of its parts, joined."""
    assert {name for name in names() if renderers[name]._main._reads_parts} == READS_PARTS
