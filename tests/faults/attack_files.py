"""Damage token stores, checkpoints and copies in memory in many ways, and check that no damage goes unnoticed.

    python tests/faults/attack_files.py [--trials 2000] [--seed 0] [--directory DIR]

Every trial damages one file or folder of a small store, of the newest of three checkpoints or of the newer of two copies in memory, reads
everything in this process, and puts the files back. Outcomes: `noticed` (one line names the damage; an older state was restored to the
bit), `harmless` (everything read equals what was written), `silent` (different content was read without an error) and `traceback` (an error
of another kind). Exit code 1 if any trial was silent or a traceback. Two things are not damage, since users do them: deleting a
checkpoint, and starting a run from the checkpoint of another.
"""

import collections
import contextlib
import json
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers

from maxlm.base import transient
from maxlm.base.errors import UserError
from maxlm.checkpoint import Checkpoints
from maxlm.config.schema import CheckpointConfig, DataConfig
from maxlm.config.sections.memory_checkpoints import MemoryCheckpointsConfig
from maxlm.data import manifest, storage
from maxlm.data.input_pipeline import Pipeline
from maxlm.data.inspect import describe
from maxlm.data.manifest import SPLITS, StoreInfo
from maxlm.data.token_store import TokenStore
from maxlm.data.tokenizer import open_tokenizer
from maxlm.data.writer import SplitWriter

GOOD, BAD = ("noticed", "harmless"), ("silent", "traceback")
STEPS = (1, 2, 3)
VOCABULARY = 300
END = "<|endoftext|>"


@dataclass(frozen=True)
class Target:
    """A target of damage: `root` is damaged, foreign files come from `other`, `read` returns outcome and reason."""

    name: str
    root: Path
    other: Path
    read: Callable[[], tuple[str, str]]


# --- targets


def make_store(path: Path, seed: int) -> None:
    """A token store of some 3,000 tokens in a dozen small shards, with a tokenizer."""
    rng = np.random.default_rng(seed)
    text = _tokenizer(seed)
    splits = {}
    for split, count in zip(SPLITS, (120, 30), strict=True):
        writer = SplitWriter(str(path), split, np.dtype(np.uint16))
        for _ in range(count):
            writer.add(np.append(rng.integers(1, VOCABULARY, rng.integers(1, 40)), 0).astype(np.uint32))
        writer.finish()
        splits[split] = writer.info
    storage.write_bytes(str(path), manifest.TOKENIZER, text.encode())
    settings: dict[str, Any] = {"data.prepare.tokenizer.end_of_document": END}
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "end_of_document_id": 0, "dtype": "uint16", "splits": splits}
    hashes: dict[str, Any] = {"tokenizer_hash": manifest.fingerprint(json.loads(text)), "fingerprint": manifest.fingerprint(settings)}
    manifest.save(str(path), StoreInfo(**hashes, settings=settings, **sizes))


def _tokenizer(seed: int) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {END: 0, **{char: number + 1 for number, char in enumerate(alphabet)}}
    pairs = random.Random(seed).sample([(a, b) for a in "abcdefgh" for b in "ijklmnop"], VOCABULARY - len(words))
    words |= {a + b: len(words) + number for number, (a, b) in enumerate(pairs)}
    bpe = Tokenizer(models.BPE(vocab=words, merges=pairs))
    bpe.add_special_tokens([END])
    return bpe.to_str()


def read_store(path: Path) -> dict[str, bytes]:
    """Everything that a store returns: manifest, tokens, documents, batches, tokenizer and description."""
    content: dict[str, bytes] = {}
    for split in SPLITS:
        store = TokenStore(str(path), split)
        content[f"{split} facts"] = store.info.model_dump_json().encode()
        content[f"{split} tokens"] = store.read(0, store.n_tokens).tobytes()
        content[f"{split} documents"] = store.read_documents(0, store.size.documents + 1).tobytes()
    pipeline = Pipeline(DataConfig(store=str(path), seq_len=32), global_batch=8, seed=0, vocab_size=VOCABULARY)
    content["batches"] = b"".join(np.asarray(field).tobytes() for step in range(pipeline.n_batches) for field in pipeline.host_batch(step))
    tokenizer = open_tokenizer(str(path))
    content["tokenizer"] = (tokenizer.text + str(tokenizer.encode("ai bj ck dl").tolist())).encode()
    content["described"] = json.dumps({key: value for key, value in describe(str(path)).items() if key != "store"}).encode()
    return content


def make_state(step: int, seed: int) -> dict[str, Any]:
    """A few arrays, all of them random, and the number of updates."""
    rng = np.random.default_rng([step, seed])
    return {
        "params": {"w": jnp.asarray(rng.normal(size=(48, 32)), jnp.float32), "b": jnp.asarray(rng.normal(size=32), jnp.bfloat16)},
        "opt_state": {"mu": jnp.asarray(rng.normal(size=(48, 32)), jnp.float32)},
        "step": jnp.int32(step),
    }


def make_checkpoints(path: Path, seed: int) -> None:
    checkpoints = Checkpoints(path, CheckpointConfig(keep=3), {"model.d_model": "32"})
    for step in STEPS:
        checkpoints.save(step, make_state(step, seed), {"next_step": step})
    checkpoints.close()


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def store_target(folder: Path) -> Target:
    """A token store; everything read must equal what was read before the damage."""
    make_store(folder / "store", 0)
    make_store(folder / "other-store", 1)
    whole = read_store(folder / "store")

    def read() -> tuple[str, str]:
        try:
            damaged = read_store(folder / "store")
        except UserError as error:
            return ("noticed" if "\n" not in str(error) and "store" in str(error) else "traceback"), str(error)
        different = [name for name, content in whole.items() if damaged[name] != content]
        return ("silent", f"{different} differ") if different else ("harmless", "")

    return Target("store", folder / "store", folder / "other-store", read)


def checkpoint_target(folder: Path) -> Target:
    """Three checkpoints; the one restored must equal what was saved under that step, and be the last unless a reason is given."""
    make_checkpoints(folder / "checkpoints", 0)
    make_checkpoints(folder / "other-checkpoints", 1)

    def read() -> tuple[str, str]:
        return _restored(Checkpoints(folder / "checkpoints", CheckpointConfig(keep=3), {"model.d_model": "32"}))

    return Target("checkpoint", folder / "checkpoints", folder / "other-checkpoints", read)


def _restored(checkpoints: Checkpoints) -> tuple[str, str]:
    """Outcome and reason of a restore."""
    try:
        restored = checkpoints.restore(make_state(0, 0))
    except UserError as error:
        return ("noticed" if "\n" not in str(error) else "traceback"), str(error)
    reason = "; ".join(restored.skipped)
    if restored.step not in STEPS or bits(restored.state) != bits(make_state(restored.step, 0)):
        return "silent", f"step {restored.step} is not what was saved; {reason}"
    if restored.data_position != {"next_step": restored.step}:
        return "silent", f"step {restored.step} has another data position; {reason}"
    if restored.step != STEPS[-1] and not reason:
        return "silent", f"step {restored.step} was restored without a reason"
    return ("noticed", reason) if reason else ("harmless", "")


def memory_target(folder: Path) -> Target:
    """Two copies in memory, and a checkpoint of an older step; the state restored must be the last, unless a reason is given."""
    identity = {"model.d_model": "32"}

    def opened(name: str) -> Checkpoints:
        checkpoints = Checkpoints(folder / name, CheckpointConfig(keep=3), identity)
        checkpoints.add_memory(MemoryCheckpointsConfig(every_steps=1, folder=str(folder / f"{name}-memory")))
        return checkpoints

    for seed, name in enumerate(("copied", "other-copied")):
        checkpoints = opened(name)
        assert checkpoints.memory is not None, "added"
        checkpoints.save(STEPS[0], make_state(STEPS[0], seed), {"next_step": STEPS[0]})
        checkpoints.wait()
        for step in STEPS[1:]:
            checkpoints.memory.save(step, make_state(step, seed), {"next_step": step})
        checkpoints.memory.close(remove=False)
    (root,), (other,) = ((folder / f"{name}-memory").glob("*/*") for name in ("copied", "other-copied"))
    return Target("memory", root, other, lambda: _restored(opened("copied")))


# --- kinds of damage: each changes a file or folder below `root` and returns a description


def files_of(target: Target) -> list[Path]:
    """The files of the store, or of the newest checkpoint or copy."""
    root = target.root / {"checkpoint": f"{STEPS[-1]}", "memory": f"{STEPS[-1]}-0"}.get(target.name, "")
    return sorted(path for path in root.rglob("*") if path.is_file())


def pick(target: Target, chance: random.Random) -> Path:
    """A random file, half of the time weighted by size, so that both arrays and small files are hit."""
    files = files_of(target)
    if chance.random() < 0.5:
        return chance.choices(files, [path.stat().st_size + 1 for path in files])[0]
    return chance.choice(files)


def flip_bit(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    content = bytearray(path.read_bytes() or b"\0")
    bit = chance.randrange(len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(content))
    return f"bit {bit} of {path}"


def truncate(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    content = path.read_bytes()
    length = chance.choice([0, len(content) // 2, max(len(content) - 1, 0), chance.randrange(len(content) + 1)])
    path.write_bytes(content[:length])
    return f"{path} cut to {length}"


def delete(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    path.unlink()
    return f"{path} deleted"


def delete_folder(target: Target, chance: random.Random) -> str:
    # Not the whole of checkpoint 3: deleting it is how a user returns to 2.
    path = chance.choice(sorted({path.parent for path in files_of(target)} - {target.root, target.root / str(STEPS[-1])}))
    shutil.rmtree(path)
    return f"{path} deleted"


def swap(target: Target, chance: random.Random) -> str:
    """Exchange two files, of equal size if possible."""
    one = pick(target, chance)
    others = [path for path in files_of(target) if path != one]
    alike = [path for path in others if path.stat().st_size == one.stat().st_size] or others
    two = chance.choice(alike)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return f"{one} and {two} swapped"


def zero_block(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    content = path.read_bytes()
    size = chance.choice([16, 64, 512, 4096])
    start = chance.randrange(len(content) + 1) // size * size
    path.write_bytes(content[:start] + bytes(len(content[start : start + size])) + content[start + size :])
    return f"{path} zero from {start} to {start + size}"


def grow(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 16, 4096])))
    return f"{path} longer"


def edit_json(target: Target, chance: random.Random) -> str:
    """Change one value of a JSON file; the file stays JSON."""
    files = []
    for path in files_of(target):
        with contextlib.suppress(ValueError):
            files.append((path, json.loads(path.read_bytes())))
    path, body = chance.choice([(path, body) for path, body in files if isinstance(body, dict)])
    places = list(_places(body))
    holder, key = chance.choice(places)
    old = holder[key]
    others: list[Any] = [None, True, 0, 1, -1, 2**40, 1.5, "", "x", [], {}, [old], str(old), old + 1 if isinstance(old, int) else "y"]
    holder[key] = chance.choice(others)
    path.write_text(json.dumps(body))
    return f"{path}: {key} = {holder[key]!r}, was {old!r}"[:300]


def _places(body: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in body.items() if isinstance(body, dict) else enumerate(body):
        yield body, key
        if isinstance(value, dict | list):
            yield from _places(value)


def foreign(target: Target, chance: random.Random) -> str:
    """Replace a file by one of another store, of another run's checkpoint, or of another step."""
    path = pick(target, chance)
    relative = path.relative_to(target.root)
    sources = [target.other / relative]
    if target.name == "checkpoint":
        sources += [root / str(step) / Path(*relative.parts[1:]) for root in (target.root, target.other) for step in STEPS[:-1]]
    if target.name == "memory":
        sources += [root / f"{STEPS[-2]}-0" / path.name for root in (target.root, target.other)]
    existing = [source for source in sources if source.is_file() and source != path]
    if not existing:  # array files have names of their own
        existing = [source for source in sorted(target.other.rglob("*")) if source.is_file() and source.parent.name == path.parent.name]
    source = chance.choice(existing or [chance.choice([source for source in sorted(target.other.rglob("*")) if source.is_file()])])
    shutil.copyfile(source, path)
    return f"{source} put in the place of {path}"


def foreign_folder(target: Target, chance: random.Random) -> str:
    """Replace a folder by one of another store, run or step."""
    if target.name == "store":
        relative = chance.choice([Path("train"), Path("eval"), Path("train/tokens"), Path("train/documents"), Path("eval/tokens/c")])
        source, place = chance.choice([target.other / relative, target.root / relative.parent / "documents"]), target.root / relative
    else:
        relative = chance.choice([Path("state"), Path("manifest"), Path("state/d"), Path("state/ocdbt.process_0"), Path()])
        runs = [(target.root, 1), (target.root, 2), (target.other, 1), (target.other, 3)]
        # A complete checkpoint 3 of a run of the same experiment is a good checkpoint 3: users start runs this way.
        root, step = chance.choice(runs[:3] if relative == Path() else runs)
        source, place = root / str(step) / relative, target.root / str(STEPS[-1]) / relative
    if not source.is_dir() or source == place:
        source = target.other / place.relative_to(target.root)
    content = target.root.parent / "moved"
    shutil.copytree(source, content)
    shutil.rmtree(place)
    content.rename(place)
    return f"{source} put in the place of {place}"


def rename_folder(target: Target, chance: random.Random) -> str:
    """Rename a step, an array or a split."""
    if target.name == "checkpoint":
        old, new = chance.choice([("3", "30"), ("3", "03"), ("3", "3.bak"), ("3", "-3"), ("2", "4"), ("3", "0"), ("3", str(10**12))])
    else:
        old, new = chance.choice(
            [("train", "trial"), ("eval", "test"), ("train/tokens", "train/token"), ("train/tokens/c", "train/tokens/d")]
        )
    (target.root / old).rename(target.root / new)
    return f"{old} renamed to {new}"


def duplicate(target: Target, chance: random.Random) -> str:
    """Copy a file or step beside the original."""
    if target.name == "checkpoint":
        new = chance.choice(["4", "03", "3 copy", "10", "3.orbax-checkpoint-tmp"])
        shutil.copytree(target.root / "3", target.root / new)
        return f"3 copied to {new}"
    path = pick(target, chance)
    shutil.copyfile(path, path.with_name(f"{path.name}{chance.choice(['.bak', '~', '0'])}"))
    return f"{path} copied beside itself"


def replace_by_folder(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    path.unlink()
    path.mkdir()
    return f"{path} is a folder"


def replace_by_link(target: Target, chance: random.Random) -> str:
    path = pick(target, chance)
    path.unlink()
    path.symlink_to(chance.choice([path, path.parent, Path("/nowhere"), Path("/dev/null")]))
    return f"{path} is a link to {path.readlink()}"


def no_right(target: Target, chance: random.Random) -> str:
    """Remove the permission to read a file (no effect for root)."""
    path = pick(target, chance)
    path.chmod(0)
    return f"{path} may not be read"


def rewrite(target: Target, chance: random.Random) -> str:
    """Other elements in a range of an array, with CRCs that fit; half of the time the digests of their chunks fit as well."""
    split, name = chance.choice(SPLITS), chance.choice(("tokens", "tokens", "documents"))
    folder = target.root / split / name
    array = storage.open_array(str(folder), write=True)
    start = chance.randrange(array.shape[0])
    stop = chance.randrange(start, min(start + 600, array.shape[0])) + 1
    values = array[start:stop].read().result()
    array[start:stop].write(values ^ values.dtype.type(chance.randrange(1, 256))).result()
    if digests := chance.random() < 0.5:
        layout = {"tokens": storage.TOKENS, "documents": storage.DOCUMENTS}[name]
        for shard in range(start // layout.shard, layout.shards(stop)):
            content = array[shard * layout.shard : min((shard + 1) * layout.shard, array.shape[0])].read().result()
            storage.write_bytes(str(folder), f"digests/{shard}", storage.chunk_digests(content, layout))
    return f"{folder} from {start} to {stop} rewritten with valid checksums{' and digests' if digests else ''}"


OF_FILES = (
    *(flip_bit, flip_bit, flip_bit, truncate, delete, swap, zero_block, grow, edit_json, edit_json, foreign, foreign),
    *(replace_by_folder, replace_by_link, no_right),
)
OF_FOLDERS = (delete_folder, foreign_folder, rename_folder, duplicate)
OF_STORES = (rewrite, rewrite)


# --- the trials


@contextlib.contextmanager
def small_shards() -> Iterator[None]:
    """Tiny stores of many shards, and retries without delay."""
    before = storage.TOKENS, storage.DOCUMENTS, transient.RETRY_DELAYS_S
    storage.TOKENS, storage.DOCUMENTS = storage.ArrayLayout(chunk=64, shard=512), storage.ArrayLayout(chunk=16, shard=64)
    transient.RETRY_DELAYS_S = (0.0,)
    try:
        yield
    finally:
        storage.TOKENS, storage.DOCUMENTS, transient.RETRY_DELAYS_S = before


def attack(trials: int, seed: int, directory: Path, progress: Callable[[int], None] = lambda done: None) -> list[dict[str, str]]:
    """Run the trials; one row each: `target damage outcome what reason`."""
    rows = []
    with small_shards():
        targets = [store_target(directory), checkpoint_target(directory), memory_target(directory)]
        for target in targets:
            assert target.read() == ("harmless", ""), f"the undamaged {target.name} is not read: {target.read()}"
            shutil.copytree(target.root, directory / "undamaged" / target.name)
        for number in range(trials):
            chance = random.Random(f"{seed} {number}")
            target = targets[number % len(targets)]
            further = {"store": OF_FOLDERS + OF_STORES, "checkpoint": OF_FOLDERS, "memory": ()}[target.name]  # a copy is two files
            damages = (*OF_FILES, *further)
            damage = damages[number // len(targets) % len(damages)]
            what = damage(target, chance)
            try:
                outcome, reason = target.read()
            except Exception as error:
                outcome, reason = "traceback", f"{type(error).__name__}: {error}"
            rows.append({"target": target.name, "damage": damage.__name__, "outcome": outcome, "what": what, "reason": reason})
            shutil.rmtree(target.root)
            shutil.copytree(directory / "undamaged" / target.name, target.root)
            progress(number + 1)
    return rows


def table_of(rows: list[dict[str, str]]) -> Table:
    counted = collections.Counter((row["target"], row["damage"], row["outcome"]) for row in rows)
    table = Table("target", "damage", *GOOD, *BAD, title=f"{len(rows):,} damages to files")
    for target, damage in sorted({key[:2] for key in counted}):
        table.add_row(target, damage.replace("_", " "), *(str(counted[target, damage, outcome]) for outcome in (*GOOD, *BAD)))
    table.add_section()
    table.add_row("all", "", *(str(sum(row["outcome"] == outcome for row in rows)) for outcome in (*GOOD, *BAD)))
    return table


def main(trials: int = 2000, seed: int = 0, directory: Path | None = None) -> None:
    """Damage stores and checkpoints in an empty folder, by default a temporary one; exit with 1 if a trial was silent or a traceback."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    console = Console()
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        rows = attack(trials, seed, directory or Path(folder), lambda done: status.update(f"{done:,} of {trials:,}"))
    console.print(table_of(rows))
    bad = [row for row in rows if row["outcome"] in BAD]
    for row in bad[:40]:
        console.print(f"{row['outcome']}: {row['what']}: {row['reason'][:400]}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    typer.run(main)
