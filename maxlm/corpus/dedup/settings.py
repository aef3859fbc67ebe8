"""Settings of the deduplication stage."""

from typing import Annotated

from pydantic import Field

from maxlm.config.fields import Section


class VerifySettings(Section):
    """Comparison of candidate pairs by their sets of n-grams before they count as near copies.

    Exact for documents of up to `sample` different n-grams; above that the Jaccard similarity is estimated from the `sample` smallest
    hashes of the union (bottom-k, Broder 1997), with a standard deviation of sqrt(J (1 - J) / sample): 0.006 at 0.8 and 4,096.
    A file of signatures holds up to 4 * `sample` bytes more for each document.
    """

    jaccard: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Jaccard similarity of the sets of n-grams from which on a pair counts as near copies. Unit: share."""
    sample: Annotated[int, Field(ge=64, le=1 << 20)] = 4096
    """Smallest hashes by which a larger document is estimated (bottom-k, Broder 1997). Unit: hashes."""
    window: Annotated[int, Field(ge=1, le=1024)] = 16
    """Neighbours, in keep order, that a document is compared with in the group of one band. Unit: documents."""


class MinHashSettings(Section):
    """MinHash with banding: two documents are candidates when all `rows` of a band agree, with probability 1 - (1 - J^rows)^bands.

    20 bands of 8 rows find 97.5% of the pairs at J = 0.8; FineWeb's 14 bands of 8 (arXiv 2406.17557, section 3.4) find 92.4%.
    """

    ngram: Annotated[int, Field(ge=1, le=32)] = 5
    """Length of the n-grams that are hashed and compared. Unit: words."""
    bands: Annotated[int, Field(ge=1, le=256)] = 20
    """Bands of the signature; a pair that agrees in all rows of one band is a candidate. Unit: bands."""
    rows: Annotated[int, Field(ge=1, le=64)] = 8
    """Hashes in each band. Unit: hashes."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the hash functions. Unit: seed."""
    verify: VerifySettings | None = VerifySettings()
    """Comparison of candidate pairs by their n-grams before they count as copies; null: candidates count."""


class RepeatSettings(Section):
    """Lines or paragraphs that occur in more than `max_documents` documents are removed from all but one of them."""

    min_length: Annotated[int, Field(ge=1)] = 20
    """Length below which a line or paragraph is never removed. Unit: characters."""
    max_documents: Annotated[int, Field(ge=1)] = 6
    """Documents that may hold the same line or paragraph before it is removed from all but one. Unit: documents."""


class SubstringSettings(Section):
    """Runs of `min_words` words or more that stand elsewhere in the corpus, too, are removed wherever they are not the first.

    50: the tokens of Lee et al. 2022 (arXiv 2107.06499, section 4.1), who removed such runs of BPE tokens by a suffix array.
    """

    min_words: Annotated[int, Field(ge=10, le=1000)] = 50
    """Length of the shortest run that is removed; in scripts without spaces a character counts as a word. Unit: words."""


class DedupSettings(Section):
    """The deduplication stage. A part that is null (or false) is not run.

    Of copies the one stays that comes first in keep order: by source, in the order of `prefer` and before sources that it does not name,
    then the longest text, then the smallest id by its bytes.
    """

    prefer: tuple[str, ...] = ()
    """Names of sources in the order in which their copies are kept; sources that are not named come last."""
    url: bool = False
    """Treat documents of one URL as copies, whatever their texts; scheme, www., fragment and tracking parameters do not count."""
    exact: bool = True
    """Remove documents with the same text."""
    minhash: MinHashSettings | None = MinHashSettings()
    """Removal of near copies by MinHash; null: none."""
    lines: RepeatSettings | None = None
    """Removal of lines that occur in many documents; null: none."""
    paragraphs: RepeatSettings | None = None
    """Removal of paragraphs that occur in many documents; null: none."""
    substrings: SubstringSettings | None = None
    """Removal of long runs of words that stand elsewhere in the corpus; null: none."""
