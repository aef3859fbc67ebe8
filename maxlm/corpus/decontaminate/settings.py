"""Settings of decontamination. Published work behind the method, as ideas:

- 13-gram overlap of words: Brown et al. 2020 (GPT-3), arXiv 2005.14165, appendix C.
- Share of an item's tokens that lie in matched n-grams, with differences allowed: Touvron et al. 2023 (Llama 2), arXiv 2307.09288,
  appendix A.6; 8-grams and a threshold for each set: Dubey et al. 2024 (Llama 3), arXiv 2407.21783, section 5.1.4.
- n-grams weighted by inverse document frequency, short questions held to more: `decon` of AllenAI, github.com/allenai/decon.
- Rewording gets past long n-grams: Yang et al. 2023, arXiv 2311.04850.
"""

from typing import Annotated

from pydantic import Field

from maxlm.config.fields import Section

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class EvalSet(Section):
    """A file of items: JSONL, one object a line, with `fields`; or without `fields` plain text, one item a line. `.gz` is unpacked.

    `fields` hold the question, `options` the answers to choose from: strings, numbers or lists of them; "choices.text" is a field inside a
    field. Options count only where the question alone carries too little to be told from others. A field with public text that others
    quote as well, such as a passage to read, does not belong here.
    """

    path: str = Field(min_length=1)
    """File of the items, JSON lines or plain text."""
    fields: tuple[str, ...] = ()
    """Fields of an item that hold the question; a name such as choices.text is a field inside a field. Empty: each line of the file is an
    item.
    """
    options: tuple[str, ...] = ()
    """Fields of an item that hold the answers to choose from. Empty: the question alone is searched."""


class DecontaminateSettings(Section):
    """Settings of the search: the sets that are looked for, and how much of an item must be found.

    A document is removed if a passage of it holds `threshold` of an item's weight and 0.7 of that share of its words. Items of fewer than
    2 * `shortest` words need `short_threshold` of their weight and of their words, and items of fewer than `shortest` all of them; the
    share needed falls from `short_threshold` at 2 * `shortest` words to `threshold` at 4 * `shortest`. Items that have no run of
    `ngram` words are not searched. Of the numbers and names that item and passage have at the same places, 0.7 must be equal: else the
    passage is another item of the same template. The weight of a word is its inverse document frequency (0 to 1) times the rarity of the
    n-grams that it is part of; an item is not searched if its weights add up to less than `evidence`. Rarity is 0 for an n-gram in
    `common_documents` documents of the sample or `common_share` of it, whichever is more, or in as many items; 1 for one in a quarter
    of that or fewer. An item with no rare run, such as a stem of many questions before options of a word or two, is looked for by its
    common ones, and told by the options.
    """

    sets: dict[str, EvalSet] = Field(default={})
    """Evaluation sets that are searched, by name."""
    ngram: int = Field(default=3, ge=2, le=13)
    """Length of the runs of words by which items are found. Unit: words."""
    threshold: Share = 0.5
    """Share of an item's weight that a passage must hold for the document to be removed, for items of 4 * shortest words or more. Unit:
    share.
    """
    short_threshold: Share = 0.65
    """The same share for items of fewer than 2 * shortest words, which is held by their words as well. Unit: share."""
    shortest: int = Field(default=8, ge=1, le=100)
    """Items of fewer words must be found as a whole. Unit: words."""
    evidence: float = Field(default=0.7, ge=0, allow_inf_nan=False)
    """Items with less weight in sum are not searched, since they carry too little to be told from other text. Unit: weight."""
    common_documents: int = Field(default=20, ge=2)
    """Documents of the sample in which an n-gram must occur to count as common, so that it has no weight. Unit: documents."""
    common_share: Share = 1e-4
    """Share of the sample's documents in which an n-gram must occur to count as common, if that is more than common_documents. Unit: share.
    """
    sample_share: Share = 1.0
    """Share of the documents from which the frequencies of n-grams are learned, chosen by a hash of their ids. Unit: share."""
