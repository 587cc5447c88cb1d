"""Damage to one file, and what a command comes to with it.

``python -m tests.damage.damages KIND FOLDER COUNT`` makes a world, damages each of its files in
every way, runs every command on each damage in a fork, and prints a line of JSON for each that
neither refused nor answered as before. COUNT cases are drawn; 0 stands for all.
"""

import json
import math
import os
import shutil
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

import whiten_index
from tests.damage import worlds
from tests.damage.worlds import READERS, WRITERS, RefusedError

ARTIFACT = 5
_BLOCK = 64
COMMANDS = {**READERS, **WRITERS}


def damages(path: Path, others: list[Path]) -> Iterator[tuple[str, bytes | None]]:
    """Yield the name of a damage and what it leaves of the file, None for nothing.

    Args:
        path: the file.
        others: files of the same name elsewhere.
    """
    whole = path.read_bytes()
    if whole:
        for name, at in (("start", 0), ("middle", len(whole) // 2), ("end", len(whole) - 1)):
            flipped = bytearray(whole)
            flipped[at] ^= 1
            yield f"flip {name}", bytes(flipped)
        rng = np.random.default_rng(len(whole))
        for at in rng.integers(0, len(whole), 2).tolist():
            flipped = bytearray(whole)
            flipped[at] ^= 1 << at % 8
            yield f"flip {at}", bytes(flipped)
        yield "truncated", whole[: len(whole) // 2]
        yield "empty", b""
        half = len(whole) // 2
        yield (
            "zeros",
            whole[:half] + bytes(len(whole[half : half + _BLOCK])) + whole[half + _BLOCK :],
        )
    for other in others:
        if other.read_bytes() != whole:
            yield f"swapped with {other.parent.name}", other.read_bytes()
            break
    yield "deleted", None


def files_of(root: Path) -> list[Path]:
    """Return every file of the index, its store, its exports and what was pushed."""
    found = [path for name in ("index", "exports") for path in (root / name).rglob("*")]
    found += root.glob("rows.*")
    return sorted(path.relative_to(root) for path in found if path.is_file())


def cases(root: Path) -> Iterator[tuple[Path, str, bytes | None, str]]:
    """Yield a file, a damage, what it leaves, and a command."""
    files = files_of(root)
    for path in files:
        alike = [
            root / each
            for each in files
            if each != path
            and each.suffix == path.suffix
            and (each.name == path.name or each.parent == path.parent)
        ]
        for damage, data in damages(root / path, alike):
            for command in COMMANDS:
                yield path, damage, data, command


def drawn(every: list[Any], count: int) -> list[Any]:
    """Return some cases drawn at random, of each command as many as of another."""
    by_command = dict[str, list[Any]]()
    for place in np.random.default_rng(0).permutation(len(every)):
        by_command.setdefault(every[place][3], []).append(every[place])
    rounds = zip_longest(*by_command.values())
    return [case for each in rounds for case in each if case is not None][:count]


def put(path: Path, data: bytes | None) -> None:
    """Make a file what a damage leaves of it."""
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


def in_fork(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what work answers, how it was refused, or how the process died."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            answer = {"answer": work()}
        except RefusedError as refused:
            answer = {"status": refused.status, "stderr": refused.stderr}
        except BaseException as error:
            from whiten_index.errors import WhitenIndexError

            known = isinstance(error, WhitenIndexError)
            answer = {"leaked": traceback.format_exc()[-1500:]}
            if known:
                answer = {"status": error.exit_code, "stderr": f"Error: {error}\n"}
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(json.dumps(answer, default=str).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(data) if status == 0 and data else {"died": status}


def same(one: Any, other: Any, *, within: float) -> bool:
    """Tell whether two answers are the same; texts encoded again differ in the last bits."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=within)
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() == other.keys()
        return keys and all(same(one[key], other[key], within=within) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(lambda *p: same(*p, within=within), one, other))
    return bool(one == other)


class Fuzzer:
    """A world, and what every command answers there while nothing is damaged."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.within = 2e-3 if kind == "text" else 1e-6
        self.world, self.copy = folder / "world", folder / "copy"
        self.world.mkdir(parents=True)
        made = in_fork(lambda: worlds.prepare(self.world, kind))
        assert made == {"answer": None}, made
        # Manifests hold absolute paths, so that every command works where the world was made.
        shutil.copytree(self.world, self.copy)
        self.expected: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        for name, command in COMMANDS.items():
            answer = in_fork(lambda command=command: command(self.world))
            assert "answer" in answer, (name, answer)
            self.expected[name] = answer["answer"]
            self.kept[name] = in_fork(self.searchable)["answer"]
            self.restore()

    def restore(self) -> None:
        """Make the world what it was."""
        shutil.rmtree(self.world)
        shutil.copytree(self.copy, self.world)

    def searchable(self) -> dict[str, Any]:
        """Return what each version finds whose rows are all ranked by the store."""
        from whiten_index.versions.published import read_current

        index, found = self.world / "index", {}
        published = read_current(index).version
        for version in sorted(path.name for path in (index / "versions").iterdir()):
            if version != published:
                worlds.run("rollback", index, "--to", version)
                published = version
            ranked = worlds.found(self.world, "--rerank", "300", "--rerank-by", "embeddings")
            found[version.partition("-")[0]] = ranked
        return found

    def try_out(self, path: Path, damage: str, data: bytes | None, command: str) -> str | None:
        """Return what is wrong with what a command does about a damage, None where nothing is."""
        whole = (self.copy / path).read_bytes()
        put(self.world / path, data)
        found = in_fork(lambda: COMMANDS[command](self.world))
        try:
            return self._wrong(path, data, command, found)
        finally:
            if command in WRITERS:
                self.restore()
            else:
                self._clean(path, whole)

    def _clean(self, path: Path, whole: bytes) -> None:
        put(self.world / path, whole)
        for name in ("again", "again.safetensors", *self.pushed()):
            made, before = self.world / name, self.copy / name
            shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
            if before.exists():
                shutil.copyfile(before, made)

    def pushed(self) -> list[str]:
        return [path.name for path in self.copy.glob("rows.*")]

    def _wrong(
        self, path: Path, data: bytes | None, command: str, found: dict[str, Any]
    ) -> str | None:
        if "status" in found:
            lines = found["stderr"].splitlines()
            errors = [line for line in lines if line.startswith("Error: ")]
            if command == "verify" and found["status"] == ARTIFACT:
                return None
            if found["status"] != ARTIFACT or len(errors) != 1 or "Traceback" in found["stderr"]:
                return f"refused oddly: {found}"
        elif "answer" not in found:
            return f"failed: {found}"
        elif command == "versions":
            if not self._listed_alike(path, found["answer"]):
                return f"another answer: {found['answer']}"
        elif not same(self.expected[command], found["answer"], within=self.within):
            return f"another answer: {str(found['answer'])[:300]}"
        elif command == "verify" and path.parts[0] == "index" and path.name != ".lock":
            return "verify does not see it"
        return self._lost(path, data, command) if command in WRITERS else None

    def _listed_alike(self, path: Path, answer: dict[str, Any]) -> bool:
        expected = self.expected["versions"]
        may_miss = {name for name in expected if name in path.parts}
        if path.name == "CURRENT":
            return answer.keys() <= expected.keys()
        return all(
            answer[name] == row if name in answer else name in may_miss
            for name, row in expected.items()
        )

    def _lost(self, path: Path, data: bytes | None, command: str) -> str | None:
        """Return what cannot be searched any more once the damaged file is restored."""
        there = self.world / path
        left = there.read_bytes() if there.exists() else None
        if left == data and there.parent.is_dir():
            there.write_bytes((self.copy / path).read_bytes())
        after = in_fork(self.searchable)
        if "answer" not in after:
            return f"lost: {after}"
        for version, rows in after["answer"].items():
            expected = self.kept[command].get(version) or self.kept["search"].get(version)
            if expected is not None and not same(expected, rows, within=self.within):
                return f"version {version} has other rows"
        return None


def main(kind: str, folder: str, count: str, *only: str) -> int:
    """Try out the damages."""
    # Imported once, and not in every fork.
    for name in whiten_index.__all__:
        getattr(whiten_index, name)
    import faiss

    os.environ["TQDM_DISABLE"] = "1"
    faiss.omp_set_num_threads(1)
    if kind == "text":
        import torch

        torch.set_num_threads(1)
    fuzzer = Fuzzer(kind, Path(folder))
    every = [case for case in cases(fuzzer.copy) if not only or case[3] in only]
    if int(count):
        every = drawn(every, int(count))
    tried = Counter[str]()
    for path, damage, data, command in every:
        tried[command] += 1
        wrong = fuzzer.try_out(path, damage, data, command)
        if wrong is not None:
            found = {"file": str(path), "damage": damage, "command": command, "wrong": wrong}
            print(json.dumps(found), flush=True)
    files = len({case[0] for case in every})
    print(json.dumps({"files": files, "cases": len(every), "commands": tried}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
