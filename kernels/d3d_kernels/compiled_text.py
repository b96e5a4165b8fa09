"""What a compiled program does to memory, read from its text (HLO, as `jax.stages.Compiled.as_text` gives it).

XLA's own `bytes accessed` counts a cache that is updated in place as read and written whole, and a weight that is
fetched ahead into on-chip memory as read twice. Here an update counts what it writes, a gather what it takes, and
on-chip memory nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
# Names for values, or the second half of an operation that has been counted: nothing moves.
_NOTHING = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "while", "conditional", "call"}
_NOTHING |= {"after-all", "optimization-barrier", "copy-done", "slice-done", "async-done", "partition-id"}
_MOVES = {"copy", "transpose", "reverse", "slice", "concatenate", "pad", "reshape", "convert"}
_EXCHANGES = {"all-gather", "all-to-all", "collective-permute"}  # these add nothing up
_IDLE = {"parameter", "bitcast", "constant", "broadcast", "tuple", "get-tuple-element"}


class Array(NamedTuple):
    """Part of a result: its size in bytes, and whether it lies in the device's main memory."""

    size: int
    main: bool


class Instruction(NamedTuple):
    name: str
    op: str
    arrays: tuple[Array, ...]  # of the result
    operands: tuple[str, ...]
    called: tuple[str, ...]  # computations
    number: int  # of a parameter


class Program(NamedTuple):
    """Computations by name, each with its instructions by name."""

    entry: str
    computations: dict[str, dict[str, Instruction]]

    def executed(self) -> Iterator[dict[str, Instruction]]:
        """The entry and what it calls: loops, which count as one turn, and branches, but not fusions."""
        waiting, seen = [self.entry], set()
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            yield self.computations[name]
            for instruction in self.computations[name].values():
                if instruction.op in ("while", "conditional", "call"):
                    waiting += instruction.called


def parse(text: str) -> Program:
    """Raises ValueError for a text without an entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = None, {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif found := _LINE.match(line):
            name, result, op, rest = found.groups()
            inside = _until_closed(rest)
            called = [*_CALLED.findall(rest)]
            for branches in _BRANCHES.findall(rest):
                called += re.findall(r"%?([\w.\-]+)", branches)
            number = int(inside) if op == "parameter" else -1
            operands = tuple(re.findall(r"%([\w.\-]+)", inside))
            current[name] = Instruction(name, op, _arrays(result), operands, tuple(called), number)
    if entry is None:
        raise ValueError("the text of a compiled program has an ENTRY computation; this one has none")
    return Program(entry, computations)


def _until_closed(rest: str) -> str:
    depth = 1
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return rest[:i]
    return rest


def _arrays(result: str) -> tuple[Array, ...]:
    found = []
    for kind, dims, layout in _ARRAY.findall(result):
        if kind in _BYTES:
            size = _BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n)
            found.append(Array(size, "S(" not in layout or "S(5)" in layout))
    return tuple(found)


def collectives(program: Program) -> Counter[str]:
    """How many of each kind of exchange between devices one run (one turn of a loop) makes."""
    found: Counter[str] = Counter()
    for computation in program.executed():
        for instruction in computation.values():
            kind = instruction.op.removesuffix("-start")
            if kind in COLLECTIVES:
                found[kind] += 1
    return found


def copies(program: Program, least: int) -> list[tuple[str, int]]:
    """(name, bytes) of results of at least `least` bytes with nothing new in them: copies, transposes, gathered parts.

    Fetching ahead from main memory into on-chip memory is none of them: it is how a weight is read. Writing back is.
    """
    found = []
    for computation in program.executed():
        for one in computation.values():
            size = max((array.size for array in one.arrays), default=0)
            if size < least:
                continue
            if one.op == "copy-start":
                moved = one.arrays[0].main
            elif one.op == "fusion":
                inside = {part.op for part in program.computations[one.called[0]].values()} - _IDLE
                moved = bool(inside) and inside <= _MOVES
            else:
                moved = one.op in _MOVES or one.op.removesuffix("-start") in _EXCHANGES
            if moved:
                found.append((one.name, size))
    return found


def main_memory_bytes(program: Program) -> int:
    """Bytes that cross between main memory and the chip in one run, or one turn of a loop.

    A kernel (custom call) counts its operands and results whole.
    """
    return sum(
        _traffic(one, computation, program) for computation in program.executed() for one in computation.values()
    )


def _traffic(one: Instruction, around: dict[str, Instruction], program: Program) -> int:
    if one.op in _NOTHING or one.op.endswith("-done"):
        return 0
    if one.op == "copy-start":
        return sum(array.size for array in one.arrays[:2] if array.main)
    sources = [around[name].arrays for name in one.operands if name in around]
    if one.op == "slice-start":  # (the whole operand, the slice, ...): the slice is what is read
        sliced = (one.arrays[1:-1] or one.arrays)[-1]
        return sliced.size * ((sources[0][0].main if sources else False) + sliced.main)
    if one.op == "dynamic-update-slice":
        return _size(sources[1]) + (sum(array.size for array in sources[1]) if one.arrays[0].main else 0)
    if one.op != "fusion":
        return sum(map(_size, sources)) + _size(one.arrays)
    inside, results, total = program.computations[one.called[0]], list(one.arrays), 0
    updates = _updated(inside)
    for part in inside.values():
        if part.op != "parameter" or not _size(arrays := sources[part.number]):
            continue
        uses = [other for other in inside.values() if part.name in other.operands]
        if part.name in updates:
            total += 2 * updates[part.name]
            results.remove(arrays[0])  # the same memory
        elif uses and all(other.op in ("gather", "dynamic-slice") for other in uses):
            total += sum(array.size for other in uses for array in other.arrays)
        else:
            total += _size(arrays)
    return total + _size(tuple(results))


def _updated(inside: dict[str, Instruction]) -> dict[str, int]:
    """Parameters of a fusion that it updates in place, with the bytes of the update."""
    found = {}
    for part in inside.values():
        if part.op == "dynamic-update-slice":
            whole = part.operands[0]
            while inside[whole].op == "bitcast":
                whole = inside[whole].operands[0]
            update = inside[part.operands[1]].arrays
            if inside[whole].op == "parameter":
                found[whole] = sum(array.size for array in update)
    return found


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.size for array in arrays if array.main)
