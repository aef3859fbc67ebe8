"""Remove documents that hold items of evaluation sets: word n-gram overlap, weighted by how rare the n-grams are in the corpus."""

from maxlm.corpus.decontaminate.decontaminator import Decontaminator
from maxlm.corpus.decontaminate.frequencies import Frequencies
from maxlm.corpus.decontaminate.index import EvalIndex
from maxlm.corpus.decontaminate.settings import DecontaminateSettings, EvalSet

__all__ = ["DecontaminateSettings", "Decontaminator", "EvalIndex", "EvalSet", "Frequencies"]
