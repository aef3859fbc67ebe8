"""Bytes of a file, decompressed by what they begin with: blocks of bounded size, with limits against decompression bombs."""

import bz2
import codecs
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO

from maxlm.documents.records import MIB, DamagedError, ReadSettings
from maxlm.documents.text import bom_encoding, wide_encoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd  # and not zstandard: its readers take a truncated frame for whole

BLOCK = MIB // 4  # bytes read and decompressed at once
LAYERS = 3  # of compression around one file
XZ_MEMORY = 256 * MIB  # zstd's own limit is a window of 128 MiB
Blocks = Iterator[bytes]


class Meter:
    """Bytes read of a file, and what they became."""

    def __init__(self, settings: ReadSettings) -> None:
        self.settings, self.raw = settings, 0

    def check(self, produced: int) -> None:
        """Raise DamagedError("bomb") once `produced` bytes are more than the limits allow for what was read."""
        limits = self.settings
        if produced > limits.max_file_bytes or (produced > limits.ratio_from_bytes and produced > limits.max_ratio * self.raw):
            raise DamagedError("bomb", f"{produced} bytes from {self.raw}")


class ByteStream:
    """Blocks of bytes, read forwards: by line, by count or block by block. The end of the data gives b""."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._buffer, self._at = blocks, b"", 0
        self._error: DamagedError | OSError | None = None  # met while looking ahead: for whoever reads up to there

    def peek(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end or before damage, which stay unread."""
        try:
            while len(self._buffer) - self._at < count and self._fill():
                pass
        except (DamagedError, OSError) as error:
            self._error = error
            if self._at == len(self._buffer):
                raise
        return self._buffer[self._at : self._at + count]

    def take(self, count: int) -> bytes:
        """Read `count` bytes, fewer at the end of the data."""
        pieces, left = [], count
        while left > 0 and (self._at < len(self._buffer) or self._fill()):
            piece = self._buffer[self._at : self._at + left]
            self._at += len(piece)
            left -= len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def skip(self, count: int) -> int:
        """Leave out `count` bytes; how many there were."""
        left = count
        while left > 0 and (self._at < len(self._buffer) or self._fill()):
            step = min(left, len(self._buffer) - self._at)
            self._at += step
            left -= step
        return count - left

    def line(self, limit: int) -> bytes:
        """Read up to and including the next line feed, at most `limit` bytes."""
        return self.until(b"\n", limit)[0]

    def until(self, mark: bytes, limit: int) -> tuple[bytes, bool]:
        """Read up to and including `mark`, or `limit` bytes without it; whether `mark` was found."""
        searched = 0
        while True:
            found = self._buffer.find(mark, self._at + searched, self._at + limit)
            if found >= 0:
                return self.take(found + len(mark) - self._at), True
            searched = max(0, min(len(self._buffer) - self._at, limit) - len(mark) + 1)
            if len(self._buffer) - self._at >= limit or not self._fill():
                return self.take(min(limit, len(self._buffer) - self._at)), False

    def push_back(self, data: bytes) -> None:
        """Put `data` before what is read next."""
        self._buffer, self._at = data + self._buffer[self._at :], 0

    def rest(self) -> Blocks:
        """All that is left, block by block."""
        while self._at < len(self._buffer) or self._fill():
            block, self._buffer, self._at = self._buffer[self._at :], b"", 0
            yield block

    def _fill(self) -> bool:
        """Add one block to the buffer; False at the end of the data."""
        if self._error is not None:
            raise self._error
        block = next(self._blocks, b"")
        self._buffer, self._at = (self._buffer[self._at :] + block if self._at < len(self._buffer) else block), 0
        return bool(block)


def open_stream(raw: BinaryIO, meter: Meter) -> ByteStream:
    """The content of `raw`: each layer of gzip, zstd, bzip2 or xz taken off.

    Reading it raises DamagedError once all bytes before the damage were read: truncated, damaged, bomb, too_much_memory, trailing_garbage.
    """
    stream = ByteStream(_raw_blocks(raw, meter))
    for _ in range(LAYERS):
        opener = compression(stream.peek(16))
        if opener is None:
            return stream
        stream = ByteStream(_decompressed(stream.rest(), opener, meter))
    if compression(stream.peek(16)) is not None:
        raise DamagedError("bomb", f"more than {LAYERS} layers of compression")
    return stream


def as_utf8(stream: ByteStream) -> ByteStream:
    """`stream` without a byte order mark, and in UTF-8 if it is UTF-16 or UTF-32. Any other encoding stays as it is."""
    head = stream.peek(4096)
    marked = bom_encoding(head)
    if marked is not None:
        stream.skip(marked[1])
    encoding = marked[0] if marked is not None else wide_encoding(head)
    return stream if encoding in (None, "utf-8") else ByteStream(_recoded(stream.rest(), str(encoding)))


def compression(head: bytes) -> Callable[[], Any] | None:
    """The decompressor of data that begins with `head`; None if it is not compressed."""
    if head.startswith(b"\x1f\x8b\x08"):
        return _Gzip
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):  # a frame, or one to skip
        return zstd.ZstdDecompressor
    if head.startswith(b"BZh") and head[3:4] in b"123456789" and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return bz2.BZ2Decompressor
    if head.startswith(b"\xfd7zXZ\0"):
        return _xz
    return None


_xz = partial(lzma.LZMADecompressor, memlimit=XZ_MEMORY)


class _Gzip:
    """One member of a gzip file, with the methods of bz2.BZ2Decompressor."""

    def __init__(self) -> None:
        self._member, self.needs_input = zlib.decompressobj(31), True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """At most `max_length` bytes of `data` and of the input before it that is left."""
        data = self._member.decompress(self._member.unconsumed_tail + data, max_length)
        self.needs_input = not self._member.unconsumed_tail and len(data) < max_length
        return data

    @property
    def eof(self) -> bool:
        """True at the end of the member."""
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        """Input after the end of the member."""
        return self._member.unused_data


def _raw_blocks(raw: BinaryIO, meter: Meter) -> Blocks:
    while block := raw.read(BLOCK):
        meter.raw += len(block)
        yield block


def _decompressed(blocks: Blocks, opener: Callable[[], Any], meter: Meter) -> Blocks:
    """All members of one file one after another, as gzip, zstd, bzip2 and xz themselves read it."""
    stream, produced = ByteStream(blocks), 0
    while head := stream.peek(16):
        if compression(head) is not opener:
            if any(block.strip(b"\0") for block in stream.rest()):  # zeros fill up a block of a tape or a disk
                raise DamagedError("trailing_garbage")
            return
        member = opener()
        while not member.eof:
            data = b""
            if member.needs_input and not (data := stream.take(BLOCK)):
                raise DamagedError("truncated")
            try:
                block = member.decompress(data, BLOCK)
            except (zlib.error, lzma.LZMAError, zstd.ZstdError, OSError, EOFError, ValueError) as error:
                memory = "emory" in str(error) or "indow" in str(error)
                raise DamagedError("too_much_memory" if memory else "damaged", error) from error
            if block:
                produced += len(block)
                meter.check(produced)
                yield block
        stream.push_back(member.unused_data)


def _recoded(blocks: Blocks, encoding: str) -> Blocks:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    for block in blocks:
        if data := decoder.decode(block).encode():
            yield data
    if data := decoder.decode(b"", final=True).encode():
        yield data
