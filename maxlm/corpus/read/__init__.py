"""Read raw documents: files of any format, compression and encoding, as a stream of documents and of what is none, with the reason."""

from maxlm.corpus.read.inputs import Input, find, folders, version_of
from maxlm.corpus.read.problems import REASONS, ReadSettings
from maxlm.corpus.read.reader import read
from maxlm.corpus.read.text import normalise

__all__ = ["REASONS", "Input", "ReadSettings", "find", "folders", "normalise", "read", "version_of"]
