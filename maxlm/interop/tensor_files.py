"""Tensors of safetensors files, read by name and by slice, and written. Nothing else is opened: a pickle can run code."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from maxlm.base.errors import UserError, error_kind, some
from maxlm.base.paths import open_regular, read_file
from maxlm.base.transient import first_line
from maxlm.interop import packed
from maxlm.interop.copying import all_finite, widened
from maxlm.interop.hf_config import OTHER_TOWERS, TEXT_TOWER

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
ADAPTERS = "adapter_model.safetensors"  # PEFT's name
_PART = re.compile(r"model-\d+-of-\d+\.safetensors")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # how torch.save begins, today and long ago
_MOST_HEADER = 100_000_000  # bytes of JSON before the tensors, the format's own bound; an index is held to it too
_COMPARED = 1 << 22  # numbers of two tensors compared at a time
_BLOCKS, _SCALES, _BYTES = "_blocks", "_scales", 16  # bytes of a block, of 32 numbers
_DTYPES = ("F32", "BF16", "F16")
_FP8 = "F8_E4M3"
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # e2m1 (OCP MX v1.0, table 5)


class TensorFiles(Mapping[str, tuple[int, ...]]):
    """Shapes of all tensors, by name; `read` has their numbers.

    A pair `x_blocks`, `x_scales` of MXFP4 (OCP Microscaling Formats v1.0) is one tensor `x`, with its last two dims swapped, as gpt-oss
    stores its experts. `x_packed`, `x_scale` and `x_shape`, or `x` in e4m3 and `x_scale` or `x_scale_inv` (packed.py), are one matrix `x`.
    """

    def __init__(self, source: Path, blocks: tuple[int, int] | None = None) -> None:
        """`source`: a folder, or one file. `blocks`: outputs and inputs of a block that has one scale in `x_scale_inv`.

        Raises UserError for files that are damaged, missing, listed wrongly, or not safetensors.
        """
        self._file: dict[str, Path] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        self._open: dict[Path, Any] = {}
        self._stored: dict[str, str] = {}  # names in the files, where they differ
        self._blocks = blocks
        self._scaled: dict[str, str] = {}  # names in the files of matrices in e4m3, and of their scales
        self.notes: list[str] = []  # on tensors of other towers, and on matrices in blocks
        kinds: dict[str, str] = {}
        listed = _listed(source) if source.is_dir() else {}
        files = sorted(set(listed.values())) or _files(source)
        self.passed_over = sorted({file.name for file in source.glob("*.safetensors")} - {file.name for file in files})
        for file in files:
            for name in self._handle(file).keys():  # noqa: SIM118  (no mapping)
                if name in self._file:
                    raise UserError(f"{source}: {name} is in {self._file[name].name} and in {file.name}; which one counts is not said.")
                self._file[name] = file
                with _told(file):
                    stored = self._handle(file).get_slice(name)
                    self._shape[name], kinds[name] = tuple(stored.get_shape()), stored.get_dtype()
        wrong = [name for name, file in listed.items() if self._file.get(name) != file] + [
            name for name in self._file if listed and name not in listed
        ]
        if wrong:
            raise UserError(
                f"{source / INDEX} does not agree with the files: {some(wrong)} {'is' if len(wrong) == 1 else 'are'} not where it says."
            )
        self._join_blocks(kinds)
        self._join_packed(source, kinds)
        self._join_scaled(source, kinds)
        if strange := [f"{name} ({kinds[name]})" for name in self._shape if kinds.get(name, _DTYPES[0]) not in _DTYPES]:
            raise UserError(f"{source}: {some(strange)}: maxlm reads {', '.join(_DTYPES)}, MXFP4, and {_FP8} with scales.")

    def _join_blocks(self, kinds: dict[str, str]) -> None:
        """Name each pair of blocks and scales as one tensor."""
        for blocks in [name for name in self._shape if name.endswith(_BLOCKS)]:
            name, scales = blocks.removesuffix(_BLOCKS), blocks.removesuffix(_BLOCKS) + _SCALES
            shape = self._shape[blocks]
            if (
                {kinds[blocks], kinds.get(scales)} == {"U8"}
                and len(shape) > 2
                and shape[-1] == _BYTES
                and self._shape[scales] == shape[:-1]
            ):
                del self._shape[blocks], self._shape[scales]
                self._shape[name] = (*shape[:-3], 2 * _BYTES * shape[-2], shape[-3])

    def _join_packed(self, source: Path, kinds: dict[str, str]) -> None:
        """Name each packed matrix with its scales and its shape as one tensor."""
        for words in [name for name in self._shape if name.endswith(packed.PACKED)]:
            name = words.removesuffix(packed.PACKED)
            scale, sizes = name + packed.SCALE, name + packed.SHAPE
            if missing := [other for other in (scale, sizes) if other not in self._shape]:
                raise UserError(f"{source}: {words} has no {missing[0]}.")
            if (kinds[words], kinds[sizes], self._shape[sizes]) != ("I32", "I64", (2,)) or kinds[scale] not in _DTYPES:
                raise UserError(f"{source}: {name} is not packed as {packed.INTEGERS} says: int32 words, float scales and two sizes.")
            shape = tuple(int(size) for size in self._slice(sizes, None))
            groups = self._shape[scale][1:] if self._shape[scale][:1] == shape[:1] else ()
            if packed.bits_of(shape, self._shape[words]) is None or len(groups) != 1 or groups[0] < 1 or shape[1] % groups[0]:
                found = f"{list(self._shape[words])} words and {list(self._shape[scale])} scales"
                raise UserError(f"{source}: {name} of shape {list(shape)} has {found}, which fit neither 4 nor 8 bits.")
            for part in (words, scale, sizes):
                del self._shape[part]
            self._shape[name] = shape

    def _join_scaled(self, source: Path, kinds: dict[str, str]) -> None:
        """Name each matrix in e4m3 with its scales as one tensor."""
        for name in [name for name in self._shape if kinds.get(name) == _FP8]:
            shape, scales = self._shape[name], [name + ending for ending in (packed.SCALE, packed.BLOCK_SCALE)]
            scale = next((scale for scale in scales if scale in self._shape), None)
            if scale is None:
                raise UserError(f"{source}: {name} ({_FP8}) has no {' or '.join(scales)}.")
            found = self._shape.pop(scale)
            fitting: tuple[tuple[int, ...], ...] = ((shape[0], 1), (1, 1), (1,))
            rule = f"{packed.FLOATS} a float for each output or one for all"
            if scale.endswith(packed.BLOCK_SCALE):
                if self._blocks is None:
                    raise UserError(f"{source}: {scale} has a scale for each block, and config.json has no weight_block_size.")
                fitting = (tuple(-(-n // size) for n, size in zip(shape, self._blocks, strict=False)),)
                rule = f"blocks of {list(self._blocks)} a float each, {list(fitting[0])}"
            if len(shape) != 2 or kinds[scale] not in _DTYPES or found not in fitting:
                said = f"has scales of shape {list(found)} in {kinds[scale]}, and {rule}"
                raise UserError(f"{source}: {name} of shape {list(shape)} {said}.")
            self._scaled[name] = scale
            kinds[name] = kinds[scale]
        if count := sum(scale.endswith(packed.BLOCK_SCALE) for scale in self._scaled.values()):
            size = " x ".join(map(str, self._blocks or ()))
            self.notes.append(f"matrices in {_FP8} with a scale for each block of {size}: {count:,} become float32")

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._shape[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shape)

    def __len__(self) -> int:
        return len(self._shape)

    def prefix(self, prefix: str, keep: str) -> None:
        """Add `prefix` to the names of tensors that lack it, but for `keep`."""
        for name in [name for name in self._shape if name != keep and not name.startswith(prefix)]:
            self._rename(name, prefix + name)

    def keep_text(self) -> None:
        """Drop the tensors of other towers, listed in `notes`, and rename the tensors of the text tower as in a text model."""
        dropped: dict[str, int] = {}
        for name in list(self._shape):
            if other := next((start for start in OTHER_TOWERS if name.startswith(start)), None):
                del self._shape[name]
                dropped[other] = dropped.get(other, 0) + 1
            elif start := next((start for start in TEXT_TOWER if name.startswith(start)), None):
                self._rename(name, TEXT_TOWER[start] + name.removeprefix(start))
        for start, count in sorted(dropped.items()):
            said = f"{count:,} tensors of {start[:-1]} are" if count > 1 else f"a tensor of {start[:-1]} is"
            self.notes.append(f"{said} not read: only the text tower is")

    def _rename(self, name: str, new: str) -> None:
        if new in self._shape:
            raise UserError(f"{name} and {new} are both in the source; which one counts is not said.")
        self._shape[new], self._stored[new] = self._shape.pop(name), self._stored.get(name, name)
        if name in self._file:
            self._file[new] = self._file[name]

    def same(self, name: str, other: str) -> bool:
        """True if both tensors hold the same numbers; compared in blocks of rows, so that no whole tensor is in memory."""
        if self[name] != self[other]:
            return False
        if any(one not in self._file or self._stored.get(one, one) in self._scaled for one in (name, other)):  # packed, or with scales
            return np.array_equal(self.read(name), self.read(other))
        rows, count = max(1, _COMPARED // max(1, math.prod(self[name][1:]))), self[name][0]
        blocks = [slice(start, min(start + rows, count)) for start in range(0, count, rows)]
        numbers = ([widened(self._slice(one, block)) for one in (name, other)] for block in blocks)
        return all(np.array_equal(one, two) for one, two in numbers)

    def read(self, name: str, row: int | None = None, *, bits: bool = False) -> np.ndarray:
        """The tensor, or one entry of its first dim, in float32. Raises UserError if a number in it is not finite.

        `bits`: numbers of bfloat16 as they are stored, in uint16, which `copy_widened` reads.
        """
        stored = self._stored.get(name, name)
        if name not in self._file and stored + packed.PACKED in self._file:
            words, scale = self._slice(stored + packed.PACKED, None), widened(self._slice(stored + packed.SCALE, None))
            whole = packed.dequantized(words, scale, self._shape[name])
            value = whole if row is None else whole[row]
        elif stored in self._scaled:
            with _told(self._file[name]):
                values = read_e4m3(self._file[name], stored)
            scale = widened(self._slice(self._scaled[stored], None))
            if self._scaled[stored].endswith(packed.BLOCK_SCALE):
                assert self._blocks is not None, "checked when the file was opened"
                value = packed.scaled_by_block(values, scale, self._blocks)
            else:
                value = values.astype(np.float32) * scale
            value = value if row is None else value[row]
        elif name not in self._file:
            blocks, scales = (self._slice(stored + suffix, row) for suffix in (_BLOCKS, _SCALES))
            value = _dequantise(blocks, scales)
        else:
            value = self._slice(name, row)
        value = value.view(np.uint16) if value.dtype == ml_dtypes.bfloat16 else widened(value)
        if not all_finite(value):
            raise UserError(f"{name} in {self._file.get(name, Path(name)).name} holds numbers that are not finite.")
        return value if bits or value.dtype != np.uint16 else widened(value.view(ml_dtypes.bfloat16))

    def _slice(self, name: str, row: int | slice | None) -> np.ndarray:
        file = self._file[name]
        with _told(file):
            stored = self._handle(file).get_slice(self._stored.get(name, name))
            return stored[:] if row is None else stored[row]

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            _refuse_others(file)
            with _told(file):
                self._open[file] = safe_open(file, framework="numpy")
        return self._open[file]


def read_e4m3(file: Path, name: str) -> np.ndarray:
    """A tensor in e4m3 of a file that the library has opened and checked, but does not read into numpy."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entry = json.loads(stream.read(length))[name]
        first, end = entry["data_offsets"]
        stream.seek(8 + length + first)
        return np.frombuffer(stream.read(end - first), ml_dtypes.float8_e4m3fn).reshape(entry["shape"])


def write_tensors(tensors: dict[str, np.ndarray], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file; the library would leave 0600. Raises OSError, such as a full disk's,
    which the library hides in an error of its own.
    """
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        if (found := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(file)) from error
    file.chmod(mode)


def _listed(folder: Path) -> dict[str, Path]:
    """Name -> file, as the index of a folder says; empty without one."""
    index = folder / INDEX
    if not index.exists():
        return {}
    try:
        entries = json.loads(read_file(index, _MOST_HEADER))["weight_map"]
        names = {str(name): str(file) for name, file in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is no index of safetensors files: {type(error).__name__}.") from error
    for file in set(names.values()):
        if Path(file).name != file or file in ("", ".", ".."):
            raise UserError(f"{index} lists {file!r}, which is not a file of this folder.")
        if not (folder / file).is_file():
            raise UserError(f"{index} lists {file}, which is not there: download it again.")
    if (folder / WHOLE).is_file() and WHOLE not in names.values():
        raise UserError(f"{folder}: {WHOLE} is not listed in {INDEX}, and it is not clear which of both counts: remove one.")
    return {name: folder / file for name, file in names.items()}


def _files(source: Path) -> list[Path]:
    """The safetensors files of a folder without an index: the whole model, else its numbered parts, else all but adapters."""
    if source.is_file():
        return [source]
    found = sorted(source.glob("*.safetensors"))
    whole = [file for file in found if file.name == WHOLE]
    parts = [file for file in found if _PART.fullmatch(file.name)]
    if files := whole or parts or [file for file in found if file.name != ADAPTERS]:
        return files
    pickles = [file.name for pattern in PICKLES for file in source.glob(pattern)]
    rule = f"only pickle files ({some(pickles)}), which can run code when they are read" if pickles else "no safetensors files"
    if found:
        rule = f"only adapters ({ADAPTERS})"
    raise UserError(f"{source} holds {rule}: use a source with safetensors files of the model.")


def _refuse_others(file: Path) -> None:
    with _told(file), open_regular(file) as stream:
        start = stream.read(9)
    if start[8:] != b"{" and (start[:4] == _ZIP or start[:1] == _PICKLE):  # a safetensors file has 8 bytes of length, then a JSON object
        raise UserError(f"{file} is a pickle file, which can run code when it is read: use a source with safetensors files.")


@contextmanager
def _told(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise error_kind(error)(
            f"{file} cannot be read as safetensors: {first_line(error)}; it may be cut short: download it again."
        ) from error


def _dequantise(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 as float32: two numbers a byte, the low half first, 32 a scale, which is a power of two; the last two dims swapped."""
    numbers = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
    scaled = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127)
    return np.swapaxes(scaled.reshape(*scaled.shape[:-2], -1), -1, -2)
