"""Keyed tags of tiles that processes send each other, and the agreement of all processes on which copy is complete.

A tag is keyed BLAKE2b (RFC 7693) under the secret that the processes of a run share; without a secret it finds accidents only. A copy that
a peer keeps is sent by devices, before its bytes are on any host. So both ends compute the tag of what was sent and of what has arrived
while they write it, and these tags are compared when the next copy starts, in the collective that also agrees on times.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxlm.checkpoint.host_copies import Tile
from maxlm.cluster import agree

TAG_BYTES = 16
_WORDS = TAG_BYTES // 4
_NONE = np.zeros(_WORDS, np.int32)  # no tag
_FIGURES = 3


def tag_of(secret: bytes, what: bytes, content: Any) -> np.ndarray:
    """Tag of `content` (a buffer) as `what` it is, `TAG_BYTES` of uint8."""
    key = hashlib.sha256(b"maxlm copies in memory" + secret).digest()
    state = hashlib.blake2b(len(what).to_bytes(4, "big") + what, digest_size=TAG_BYTES, key=key)
    state.update(content)
    return np.frombuffer(state.digest(), np.uint8)


class PartTag:
    """Tag of the tiles that one process sends to its peer. The same at both ends, in whatever order tiles come."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._tiles = secret, dict[Tile, bytes]()

    def add(self, tile: Tile, array: np.ndarray) -> None:
        """Hash the bytes of a tile."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._tiles[tile] = tag_of(self._secret, f"{tile[0]} {tile[1]}".encode(), content.data).tobytes()

    def of(self, state: bytes, run: str, sender: int) -> np.ndarray:
        """The tag as `_WORDS` of int32. `state`: digest of its step and layout (`Layout.content`)."""
        tiles = b"".join(self._tiles[tile] for tile in sorted(self._tiles))
        return tag_of(self._secret, state + f"{run} {sender}".encode(), tiles).view(np.int32)


class Written(NamedTuple):
    """A copy that this process has written: its step, -1 for none; the tags of what it sent to its peer, and of what it received."""

    step: int = -1
    sent: np.ndarray = _NONE
    received: np.ndarray = _NONE


class Agreed(NamedTuple):
    """Step of the newest copy that all processes have and whose peers' parts are proven, -1 for none; the largest figures of all; the
    tag of what was sent to this process.
    """

    complete: int
    figures: np.ndarray
    sent_here: np.ndarray


def proven(written: Written, sent_here: np.ndarray) -> bool:
    """True if what this process received is what was sent to it."""
    return np.array_equal(written.received, sent_here)


def start_agreement(complete: int, written: Written, figures: Sequence[int], to: Sequence[int] | None) -> Any:
    """Begin to agree with all processes, for `agreed`, and do not wait.

    `complete`: as they have agreed before; `written`: the newest copy here; `figures`: three int32; `to`: the peer of each process.
    """
    mine = np.array([complete, written.step, *figures, *written.sent, *written.received], np.int32)
    if jax.process_count() == 1:
        return np.array([max(complete, written.step), *figures], np.int32), _NONE
    row = agree.start_row(mine)
    with jax.set_mesh(row.sharding.mesh):  # training may have set its own
        return _program(row.sharding.mesh, None if to is None else tuple(to))(row)


def agreed(started: Any) -> Agreed:
    """The result of `start_agreement`. In any thread: it only waits and copies."""
    figures, sent_here = map(agree.fetched, started)
    return Agreed(int(figures[0]), figures[1:], sent_here.reshape(-1))


@functools.cache
def _program(mesh: jax.sharding.Mesh, to: tuple[int, ...] | None) -> Any:
    """A copy counts as complete in a process only if the tag that arrives there is that of what it has received."""
    axis = mesh.axis_names[0]

    def agree(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        before, step, figures = rows[0, 0], rows[0, 1], rows[0, 2 : 2 + _FIGURES]
        sent, received = rows[:, 2 + _FIGURES : -_WORDS], rows[:, -_WORDS:]
        sent_here = sent if to is None else jax.lax.ppermute(sent, axis, list(enumerate(to)))
        here = jnp.maximum(before, jnp.where(jnp.all(sent_here == received), step, -1))
        largest = jax.lax.pmax(jnp.concatenate([-here[None], figures]), axis)
        return largest.at[0].multiply(-1), sent_here

    rows, everywhere = PartitionSpec(axis), PartitionSpec()
    return jax.jit(jax.shard_map(agree, mesh=mesh, in_specs=rows, out_specs=(everywhere, rows), check_vma=False))
