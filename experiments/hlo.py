"""Compiled programs as text (optimised HLO): computations, instructions, and how often each of them runs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "tuple": 0, "token": 0, "opaque": 0}
"""Bits of an element, where the digits in the type's name do not say so."""
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|branch_computations|called_computations)=\{?(%[\w.\-]+(?:, ?%[\w.\-]+)*)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
      name: its name, unique in the program.
      shape: type and shape, or a tuple of them in parentheses, as written.
      opcode: what it does, such as `fusion`.
      operands: names of its operands; a constant has its value, a parameter its index.
      attributes: what follows the operands, as written.
      is_root: whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def source(self) -> str:
        """The operation of the traced program that it came from, such as `jit(update)/while/body/dot_general`."""
        return self.attribute("op_name", r'"([^"]*)"')

    @property
    def cycles(self) -> int:
        """The TPU compiler's estimate of the cycles of one execution; 0 where it gives none."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else 0

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return shape_bytes(self.shape)

    def attribute(self, key: str, pattern: str = r"(%?[\w.\-]+)") -> str:
        """Return the first value of an attribute; "" without it."""
        found = re.search(rf"\b{key}={pattern}", self.attributes)
        return found[1] if found else ""

    def computations(self) -> list[str]:
        """Return the computations that it runs, without the condition of a loop."""
        found = _CALLED.search(self.attributes)
        return re.findall(r"%[\w.\-]+", found[1]) if found else []


class Execution(NamedTuple):
    """An instruction of a program that runs `times` times, inside of `loops` (outermost first)."""

    instruction: Instruction
    times: float
    loops: tuple[Instruction, ...]
    in_fusion: bool


def shape_bytes(shape: str) -> int:
    """Return the bytes of an array, or of a tuple of arrays, whose shape is written like `(f32[2,3]{1,0}, s32[])`."""
    total = 0
    for kind, sizes in _ARRAY.findall(shape):
        bits = BITS.get(kind) or int((re.findall(r"\d+", kind) or [0])[0])
        total += math.prod(int(size) for size in sizes.split(",") if size) * bits // 8
    return total


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, and the name of the one that it starts with."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str

    def trips(self, loop: Instruction, caller: str) -> int | None:
        """Return how often the body of a `while` in a computation runs; None if the program does not tell.

        It tells where the loop counts from a constant to a constant by a constant, as those of `lax.scan` do.
        """
        told = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if told:
            return int(told[1])
        condition = self.computations[loop.attribute("condition")]
        test = next(x for x in condition.values() if x.is_root)
        if test.opcode != "compare" or test.attribute("direction") != "LT":
            return None
        counter, bound = (condition.get(name) for name in test.operands)
        if counter is None or bound is None or counter.opcode != "get-tuple-element":
            return None
        place = int(counter.attribute("index"))
        initial = self._tuple(caller, loop.operands[0])
        ends = [self._constant(caller, initial[place]) if initial else None, None, self._step(loop, place)]
        if bound.opcode == "get-tuple-element" and initial:
            ends[1] = self._constant(caller, initial[int(bound.attribute("index"))])
        elif bound.opcode == "constant":
            ends[1] = int(bound.operands[0])
        if any(end is None for end in ends):
            return None
        start, stop, step = (int(end or 0) for end in ends)
        return max(-(-(stop - start) // step), 0) if step > 0 else None

    def _step(self, loop: Instruction, place: int) -> int | None:
        """Return the constant that a loop's body adds to its counter."""
        body = loop.computations()[0]
        result = next(x for x in self.computations[body].values() if x.is_root)
        after = self._tuple(body, result.name)
        total = 0
        name = after[place] if after else ""
        while (made := self.computations[body].get(name)) is not None:
            if made.opcode == "get-tuple-element":
                return total or None
            if made.opcode == "add":
                constants = [self._constant(body, operand) for operand in made.operands]
                name = made.operands[constants.index(None)] if constants.count(None) == 1 else ""
                total += sum(x or 0 for x in constants)
            elif made.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
                name = made.operands[0]
            else:
                return None
        return None

    def _tuple(self, computation: str, name: str) -> tuple[str, ...]:
        """Return the names of a tuple's elements; none if it is not made where it is named."""
        made = self.computations[computation].get(name)
        return made.operands if made is not None and made.opcode == "tuple" else ()

    def _constant(self, computation: str, name: str) -> int | None:
        made = self.computations[computation].get(name)
        while made is not None and made.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
            made = self.computations[computation].get(made.operands[0])
        if made is None or made.opcode != "constant" or not re.fullmatch(r"-?\d+", made.operands[0]):
            return None
        return int(made.operands[0])

    def executions(self, assumed: Mapping[str, float]) -> Iterator[Execution]:
        """Yield every instruction that may run, of a conditional those of all branches, with the number of times.

        Args:
          assumed: trips of loops that the program does not tell, and times that a conditional takes each of its
            branches, by a regular expression of their `source`; the first that matches counts, and 1 where none does.
        """
        yield from self._executions(self.entry, 1.0, (), False, assumed)

    def _executions(
        self, name: str, times: float, loops: tuple[Instruction, ...], in_fusion: bool, assumed: Mapping[str, float]
    ) -> Iterator[Execution]:
        for instruction in self.computations[name].values():
            yield Execution(instruction, times, loops, in_fusion)
            open_times = next((n for text, n in assumed.items() if re.search(text, instruction.source)), 1.0)
            if instruction.opcode == "while":
                told = self.trips(instruction, name)
                trips = open_times if told is None else told
                yield from self._executions(
                    instruction.computations()[0], times * trips, (*loops, instruction), in_fusion, assumed
                )
            elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
                fused = in_fusion or instruction.opcode == "fusion"
                inner_times = times * open_times if instruction.opcode == "conditional" else times
                for inner in instruction.computations():
                    yield from self._executions(inner, inner_times, loops, fused, assumed)

    def untold_loops(self) -> list[Instruction]:
        """Return the loops whose trips the program does not tell."""
        return [
            instruction
            for name, computation in self.computations.items()
            for instruction in computation.values()
            if instruction.opcode == "while" and self.trips(instruction, name) is None
        ]


def parse(text: str) -> Program:
    """Parse the text of a compiled program (`compiled.as_text()`).

    Raises:
      ValueError: there is no ENTRY.
    """
    computations, entry, current = dict[str, dict[str, Instruction]](), "", None
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY ")) and line.rstrip().endswith("{"):
            name = re.findall(r"%[\w.\-]+", line)[0]
            current = computations.setdefault(name, {})
            entry = name if line.startswith("ENTRY ") else entry
        elif line == "}":
            current = None
        elif current is not None and (instruction := _parse_line(line)) is not None:
            current[instruction.name] = instruction
        elif current:  # The attributes of kernels go on over several lines.
            name, last = current.popitem()
            current[name] = last._replace(attributes=last.attributes + line)
    if not entry:
        raise ValueError("no ENTRY in the text of the program")
    return Program(computations, entry)


def _parse_line(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?(%[\w.\-]+) = ", line)
    if found is None:
        return None
    shape, rest = _split(line[found.end() :])
    opcode, _, rest = rest.partition("(")
    inside, attributes = _split("(" + rest)
    values = re.findall(r"%[\w.\-]+", inside) or [inside[1:-1]]
    return Instruction(found[2], shape, opcode.strip(), tuple(values), attributes, bool(found[1]))


def _split(text: str) -> tuple[str, str]:
    """Split a text behind its first parenthesis, if it begins with one, else behind its first word."""
    if not text.startswith("("):
        first, _, rest = text.partition(" ")
        return first, rest
    depth = 0
    for place in (found.start() for found in re.finditer(r"[()]", text)):
        depth += 1 if text[place] == "(" else -1
        if not depth:
            return text[: place + 1], text[place + 1 :].lstrip()
    return text, ""
