"""A tile program as the text of an expert program of TileLang-Ascend.

The text follows from the program's operations: each core has the operations of its queues in program order, each slot
of a ring a flag for each direction, and each ring in global memory a workspace and two flags between the cores.  A wait
for a flag between cores stops the core's scalar unit, as on the devices of this language; program order is a legal
order of execution, so that no core waits forever.  A program that the language cannot state is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.config.family import registered
from npusim.errors import ProgramError
from npusim.late_methods import dataclass
from npusim.machines.ascend.group import AIC, AIV
from npusim.machines.ascend.text_buffers import Buffers, Tensors, TextNames, mixed_radix
from npusim.machines.ascend.text_lines import Indented, Node, Slot, Sum, TextLine, UnlikeError, as_one
from npusim.machines.ascend.vector_words import called, refuse_rounding, vector_line
from npusim.program.ir.families import shapes_of
from npusim.program.ir.op import Opcode, TileOp
from npusim.program.ir.opaque import Coordinate, OpaqueRange, Symbol, constant_of, symbols_in, terms_of, twin
from npusim.program.ir.tile import GlobalTile, RingTile, Tile, memory_of
from npusim.program.ir.tile_program import Loop
from npusim.program.ir.walk import Walker

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import SupportsInt

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.buffers import Ring
    from npusim.program.ir.op import Step
    from npusim.program.ir.tile import Operand
    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram
    from npusim.program.ir.walk import Endpoint

#: Pipes of the language by the engine of a queue.
_PIPES = MappingProxyType({"MTE1": "MTE1", "MTE2": "MTE2", "MTE3": "MTE3", "CUBE": "M", "FIXP": "FIX", "VECTOR": "V"})
_CORES = (AIC, f"{AIV}0", f"{AIV}1")
#: Pairs of memories for which the language has a word for copies.
_COPIES = frozenset({("GM", "L1"), ("GM", "UB"), ("UB", "GM"), ("L1", "L0A"), ("L1", "L0B"), ("L0C", "GM")})
#: Names of a block's numbers on the axes of a tensor.
_AXES = ("batch", "head", "row", "column")
Streams = Mapping[str, list[Node]]


@dataclass(frozen=True, slots=True)
class KernelText:
    """The text of a kernel: the lines of its parameters and of its body, and its outputs and workspaces by number."""

    parameters: tuple[TextLine, ...]
    body: tuple[Node, ...]
    outputs: tuple[int, ...]
    workspaces: tuple[int, ...]
    notes: tuple[str, ...] = ()

    def with_growing(self, longer: KernelText, variable: str, start: int, steps: int) -> KernelText:
        """Return the text whose numbers grow with a variable, from this text and the text for ``steps`` more steps.

        Raises `UnlikeError` if the two differ in more than numbers.
        """
        if (self.outputs, self.workspaces) != (longer.outputs, longer.workspaces):
            raise UnlikeError("the texts have different tensors")
        parameters = as_one(self.parameters, longer.parameters, variable, start, steps)
        body = as_one(self.body, longer.body, variable, start, steps)
        lines = tuple(x for x in parameters if isinstance(x, TextLine))
        return KernelText(lines, body, self.outputs, self.workspaces, self.notes)


def kernel_text(program: TileProgram, device: DeviceSpec, *, grows: bool = False) -> KernelText:
    """Return the text of a program on a device; ``grows``: it becomes part of a text for all
    lengths.

    Raises `ProgramError`, which names the operation, for anything that the language cannot state.
    """
    if len(program.phases) != 1 or program.clears:
        raise ProgramError(
            f"{program.name}: it has several launches, but the text is that of one kernel, which has one launch"
        )
    (phase,) = program.phases
    queues = {q.name for q in program.queues}
    if {name.partition(".")[0] for name in queues} != set(_CORES):
        raise ProgramError(f"{program.name}: its core groups do not consist of one {AIC} and two {AIV}")
    return _KernelWriter(program, phase, device, grows=grows).text()


class _KernelWriter:
    """Writes the text of one phase."""

    def __init__(self, program: TileProgram, phase: ProgramPhase, device: DeviceSpec, *, grows: bool) -> None:
        self.program, self.phase, self.device, self.grows = program, phase, device, grows
        self.names = TextNames()
        self.walker = Walker(program)
        self.rings: tuple[Ring, ...] = program.rings
        self.buffers, self.tensors = Buffers(self.names), Tensors(self.names)
        self.cursors = dict[int, Sum]()
        self.ids, self.used_ids = dict[tuple[object, ...], int](), Counter[tuple[str, str]]()
        self._numbers = {id(ring): i for i, ring in enumerate(program.rings)}
        self.looped, self._depth = set[int](), 0
        self.notes = list[str]()
        self.symbols = dict[Symbol, Sequence[int]]()
        self.variables = dict[Symbol, Sum]()
        self.groups = min(device.group_count.value, len(phase.blocks))

    # ------------------------------------------------------------ the kernel
    def text(self) -> KernelText:
        """Return the kernel's text."""
        block = self._common_block()
        self._name_places(self._items_once(self.phase.body(block)))
        self._start({})
        self._stream(block)  # this determines the buffers, and the distance by which each ring moves in a block
        moves, looped = dict(self.cursors), set(self.looped)
        begins, firsts = self._task_firsts(moves, looped)
        self._start(firsts)
        streams = self._stream(block)
        tasks = [*self._task_lines(), *begins]
        matrix = self._scope(_CORES[0], streams, tasks)
        vectors = [self._scope(core, streams, tasks) for core in _CORES[1:]]
        try:
            joined = as_one(vectors[0], vectors[1], "vid")
        except UnlikeError as error:
            raise ProgramError(f"{self.program.name}: the two vector cores do not run the same text: {error}") from None
        scopes = [
            Indented(TextLine(f'with T.Scope("{name}"):'), lines)
            for name, core, lines in (("C", _CORES[0], matrix), ("V", _CORES[1], joined))
            if streams[core]
        ]
        head = TextLine("with T.Kernel({}, is_npu=True) as (cid, vid):", (Sum(self.groups),))
        body = (Indented(head, (*self.buffers.allocations(), *scopes)),)
        used = list(self.tensors.used.values())
        inputs, outputs = [[t for t in used if (t.role == "input") is is_in] for is_in in (True, False)]
        parameters = [self.tensors.parameter(t) for t in (*inputs, *outputs)]
        spaces = self.buffers.workspaces()
        for b in spaces:
            sizes = (self.groups, b.slots, b.rows, b.cols) if b.slots > 1 else (self.groups, b.rows, b.cols)
            shape = ", ".join(["{}"] * len(sizes))
            parameters.append(TextLine(f'{b.name}: T.Tensor(({shape}), "{b.fmt}"),', tuple(map(Sum, sizes))))
        count = len(used)
        numbers = range(count + len(spaces))
        places = tuple(numbers[len(inputs) : count]), tuple(numbers[count:])
        return KernelText(tuple(parameters), body, *places, tuple(self.notes))

    def _common_block(self) -> object:
        """Return the common block; raise `ProgramError` if blocks differ in more than coordinates."""
        phase, blocks = self.phase, list(self.phase.blocks)
        if phase.dealt:
            raise ProgramError(f"{self.program.name}: its blocks are not assigned to the cores in turn")
        if phase.succession is not None:
            raise ProgramError(
                f"{self.program.name}: a block begins while the last tiles of the block before are in progress; this "
                "cannot be written as text yet: use -t pipeline=block"
            )
        shapes = shapes_of(phase)
        if len(shapes) > 1:
            raise ProgramError(
                f"{self.program.name}: its blocks have {len(shapes)} shapes (tiles with a mask, ragged tails), but "
                "the text can describe only one"
            )
        try:
            return twin(blocks, "block", symbols_in(self.symbols))
        except TypeError:
            raise ProgramError(f"{self.program.name}: its blocks differ in more than coordinates") from None

    def _items_once(self, items: Iterable[Item]) -> list[TileOp]:
        """Return the operations of items, with the body of each loop once."""
        result = list[TileOp]()
        for item in items:
            if isinstance(item, Loop):
                index = item.indices[0] if len(item.indices) else None
                result += [] if index is None else self._items_once(item.body(index))
            else:
                result.append(item)
        return result

    def _start(self, firsts: Mapping[int, Sum]) -> None:
        self.cursors = {e.index: firsts.get(e.index, Sum()) for e in self.walker.endpoints}
        self.variables = {symbol: Sum.of(0, {self._coordinate(symbol): 1}) for symbol in self.symbols}

    def _coordinate(self, symbol: Symbol) -> str:
        return self.names.of(symbol, symbol.name.rpartition(".")[2])

    def _name_places(self, ops: Iterable[TileOp]) -> None:
        """Name each tile that one unit uses by the shortest name of the values that steps write there; name a block's
        numbers by the tensor's axis to which they belong.
        """
        for step in (step for op in ops for step in op.steps):
            if isinstance(step.dst, Tile) and step.name:
                self.buffers.suggest(step.dst, step.name)
            for x in step.operands():
                for axis, value in zip(_AXES, x.corner, strict=True) if isinstance(x, GlobalTile) else ():
                    for symbol in terms_of(value):
                        self.names.of(symbol, axis)

    def _stream(self, block: object) -> Streams:
        return self._items(self.phase.body(block))

    @property
    def _has_tasks(self) -> bool:
        return len(self.phase.blocks) > self.groups

    def _task_firsts(self, moves: Mapping[int, Sum], looped: set[int]) -> tuple[list[TextLine], dict[int, Sum]]:
        """Return the lines and the generations with which the slots of each ring begin in a task.

        A ring within a core whose slots a loop fills begins each task at slot 0, because all of its flags are
        equivalent.  A flag between cores counts slots in order, so that a ring between cores continues with the next
        slot.
        """
        lines, firsts, numbers = list[TextLine](), dict[int, Sum](), dict[Sum, Sum]()
        for e in self.walker.endpoints if self._has_tasks else ():
            move = moves[e.index]
            restarts = e.index in looped and not e.is_cross_core
            is_whole = move.is_constant and move.constant % e.depth == 0 and not self.grows
            if e.depth == 1 or restarts or is_whole:
                continue
            if move == Sum(1):
                numbers[move] = Sum.of(0, {"task": 1})
            if move not in numbers:
                name = self.names.of(("first", move), "filled")
                lines.append(TextLine(f"{name} = task * {{}}", (move,)))
                numbers[move] = Sum.of(0, {name: 1})
            firsts[e.index] = numbers[move]
        return lines, firsts

    def _task_lines(self) -> list[TextLine]:
        """Return the lines that state a block's coordinates."""
        count = len(self.phase.blocks)
        lines = [TextLine("block = task * {} + cid", (Sum(self.groups),))] if self._has_tasks else []
        number = "block" if self._has_tasks else "cid"
        every = {symbol: [int(v) for v in values] for symbol, values in self.symbols.items()}
        texts = {symbol: mixed_radix(values, number) for symbol, values in every.items()}
        # the blocks differ only in their coordinates, so that their order changes neither values nor the time
        if None in texts.values():
            order = sorted(range(count), key=lambda i: [values[i] for values in every.values()])
            texts = {symbol: mixed_radix([values[i] for i in order], number) for symbol, values in every.items()}
            self.notes.append(
                "The blocks differ only in their coordinates; core groups run them in the order of the coordinates."
            )
        if None in texts.values():
            odd = next(symbol.name for symbol, text in texts.items() if text is None)
            raise ProgramError(f"{self.program.name}: no formula gives {odd} for all {count:,} blocks")
        return [*lines, *(TextLine(f"{self._coordinate(symbol)} = {text}") for symbol, text in texts.items())]

    def _scope(self, core: str, streams: Streams, tasks: Sequence[TextLine]) -> tuple[Node, ...]:
        """Return the lines of a core: flags that are set first, the tasks, waits for the flags that remain set."""
        sets, waits = list[Node](), list[Node]()
        body = streams[core]
        for e in self.walker.endpoints:
            if not e.peers or not self._is_used(e):
                continue
            is_own = e.queue.startswith(f"{core}.")
            for generation in range(e.depth) if is_own else ():
                if e.is_producer:
                    waits.append(self._wait(e, Sum(generation)))
                else:
                    sets.append(self._set(e, Sum(generation)))
        if not self._has_tasks:
            return (*sets, *tasks, *body, *waits)
        count, rest = divmod(len(self.phase.blocks), self.groups)
        own = "T.ceildiv({} - cid, {})" if rest else "{}"
        numbers = (Sum(len(self.phase.blocks)), Sum(self.groups)) if rest else (Sum(count),)
        loop = Indented(TextLine(f"for task in T.serial({own}):", numbers), (*tasks, *body))
        return (*sets, loop, *waits)

    def _is_used(self, e: Endpoint) -> bool:
        return any(("flag", e.ring_number, side) in self.ids for side in (True, False))

    # ------------------------------------------------------------ items
    def _items(self, items: Iterable[Item]) -> Streams:
        result: dict[str, list[Node]] = {core: [] for core in _CORES}
        listed = list(items)
        turned = _turned([x for x in listed if not isinstance(x, Loop)])
        self._refuse_pieces(listed)
        for item in listed:
            if isinstance(item, Loop):
                self._loop(item, result)
            else:
                self._operation(item, result[item.queue.partition(".")[0]], turned)
        return result

    def _refuse_pieces(self, items: Iterable[Item]) -> None:
        """Raise `ProgramError` for products that add to one result without a loop: only loops are read as one sum."""
        sums = Counter[str]()
        for item in items:
            if isinstance(item, Loop):
                sums.clear()
                continue
            for step in (s for s in item.steps if s.opcode is Opcode.MATMUL and isinstance(s.dst, RingTile)):
                assert isinstance(step.dst, RingTile)
                name = step.dst.ring.name
                sums[name] = sums[name] * step.attributes.accumulate + 1
                if step.attributes.accumulate and sums[name] > 1:
                    raise ProgramError(
                        f"{self.program.name}: {item.label} on {item.queue}: npusim cannot read back the text of a "
                        "sum of several pieces without a loop; set block_k= and load_k= to the same size, or use "
                        "more or fewer pieces"
                    )

    def _loop(self, loop: Loop, made: Streams) -> None:
        if not isinstance(loop.indices, range | OpaqueRange) or not loop.name:
            for index in loop.indices:
                for core, lines in self._items(loop.body(index)).items():
                    made[core].extend(lines)
            return
        if not isinstance(loop.indices, range):
            raise ProgramError(f"{self.program.name}: the length of a loop over {loop.name} depends on the block")
        if not (count := len(loop.indices)):
            return
        self._depth += 1
        symbol = Symbol(loop.name)
        variable = self.names.of(("loop", self._depth, loop.name), loop.name)
        self.variables[symbol] = Sum.of(0, {variable: 1})
        at = Coordinate({symbol: loop.indices.step}, loop.indices.start)
        before = dict(self.cursors)
        self._items(loop.body(at))
        moves = {e: n.plus(before[e], -1) for e, n in self.cursors.items()}
        self.looped |= {e for e, n in moves.items() if n != Sum()}
        self.cursors = {e: n.plus(Sum.of(0, {variable: moves[e].constant})) for e, n in before.items()}
        body = self._items(loop.body(at))
        self.cursors = {e: n.plus(moves[e].constant * count) for e, n in before.items()}
        self._depth -= 1
        for core, lines in body.items():
            if lines:
                head = TextLine(f"for {variable} in T.serial({{}}):", (Sum(count),))
                made[core].append(Indented(head, tuple(lines)))

    def _operation(self, op: TileOp, lines: list[Node], turned: Collection[int]) -> None:
        handshakes = self.walker.handshakes(op)
        ends = {i: self.walker.endpoints[i] for i in handshakes}
        lines += [
            self._wait(ends[i], self.cursors[i]) for i, (first, _) in handshakes.items() if first and ends[i].peers
        ]
        generations = {(e.ring_number, e.is_producer): self.cursors[i] for i, e in ends.items()}
        try:
            for step in op.steps:
                lines += self._step(step, generations, turned)
        except UnlikeError:
            raise
        except ProgramError as error:
            raise ProgramError(f"{self.program.name}: {op.label} on {op.queue}: {error}") from None
        for i, (_, last) in handshakes.items():
            lines += [self._set(ends[i], self.cursors[i])] if last and ends[i].peers else []
            self.cursors[i] = self.cursors[i].plus(int(last))

    def _step(
        self, step: Step, generations: Mapping[tuple[int, bool], Sum], turned: Collection[int]
    ) -> Iterator[TextLine]:
        """Yield the lines of a step."""

        def text(x: Operand, *, is_turned: bool = False) -> TextLine:
            return self._operand(x, generations, is_turned=is_turned)

        self._refuse_choice(step)
        memories = [memory_of(x) for x in step.operands()]
        if step.opcode is Opcode.MATMUL:
            a, b = (x for x in step.srcs if not isinstance(x, float))
            if memories[1:] != ["L0A", "L0B"] or memories[0] != "L0C":
                raise ProgramError(
                    "TileLang-Ascend has no text for a product unless its operands are in L0A and L0B, and its result "
                    "in L0C"
                )
            how = step.attributes
            yield called(
                "T.mma", text(a, is_turned=how.transpose_a), text(b, is_turned=how.transpose_b), text(step.dst)
            ).then(f", init={not how.accumulate})")
        elif len(set(memories)) > 1:
            if step.opcode not in (Opcode.COPY, Opcode.CAST) or (memories[1], memories[0]) not in _COPIES:
                what = f"{step.opcode.value} from {' and '.join(memories[1:])} to {memories[0]}"
                raise ProgramError(f"{what} has no TileLang-Ascend text")
            refuse_rounding(step)
            (source,) = step.srcs
            assert not isinstance(source, float)
            is_turned = id(step) in turned
            ending = ", transpose=True)" if is_turned else ")"
            yield called("T.copy", text(source), text(step.dst, is_turned=is_turned)).then(ending)
        else:
            yield vector_line(step, text)

    def _refuse_choice(self, step: Step) -> None:
        """Raise `ProgramError` for a function, order or arithmetic that differs from the meaning of the text's
        words.
        """
        how, device = step.attributes, self.device
        chosen, own = how.variant, ""
        if step.opcode is Opcode.EXP:
            own = registered(device.family).preset("exp_variant")
        elif step.opcode is Opcode.ROW_SUM and device.row_sum is not None:
            chosen, own = how.order, str(device.row_sum.value)
        elif step.opcode is Opcode.MATMUL:
            chosen, own = how.arithmetic, device.matrix_engine(AIC).arithmetic_of(step.operands()[1].fmt)
        if chosen != own:
            what = f"{step.opcode.value} with {chosen}, which the text does not state"
            raise ProgramError(f"{what}; the device's is {own or 'plain'}")

    # ------------------------------------------------------------ operands and flags
    def _operand(self, x: Operand, generations: Mapping[tuple[int, bool], Sum], *, is_turned: bool) -> TextLine:
        if isinstance(x, GlobalTile):
            return self.tensors.part(x, [self._number(n) for n in x.corner])
        if isinstance(x, Tile):
            return self.buffers.of_tile(x).part(0, x.rows, 0, x.cols, Sum())
        if x.is_peek:
            raise ProgramError(f"a read of ring {x.ring.name} before its turn cannot be written as text")
        buffer, (row, col) = self.buffers.of_ring(x, is_turned=is_turned), Buffers.place(x)
        rows, cols = (x.cols, x.rows) if is_turned else (x.rows, x.cols)
        generation = generations[self._numbers[id(x.ring)], x.is_producer]
        first = [TextLine("cid")] if buffer.memory == "GM" else []
        return buffer.part(row, rows, col, cols, generation, *first)

    def _number(self, value: SupportsInt) -> Sum:
        """Return a coordinate with the names of its loops and of the block's own numbers."""
        if isinstance(value, Coordinate) and not value.is_affine:
            raise ProgramError("a coordinate that is not a sum of loop numbers cannot be written as text")
        result = Sum(constant_of(value))
        for symbol, factor in terms_of(value).items():
            result = result.plus(self.variables[symbol], factor)
        return result

    def _wait(self, e: Endpoint, generation: Sum) -> TextLine:
        """Return the line that waits for the other side of a ring."""
        if e.is_cross_core:
            return TextLine(f"T.wait_cross_flag({self._cross_id(e, is_ready=not e.is_producer)})")
        source, target, slot = self._flag(e, generation, is_ready=not e.is_producer)
        return TextLine(f'T.wait_flag("{source}", "{target}", {{}})', (slot,))

    def _set(self, e: Endpoint, generation: Sum) -> TextLine:
        """Return the line that signals to the other side of a ring that a slot is filled, or free."""
        if e.is_cross_core:
            return TextLine(f'T.set_cross_flag("{_pipe(e.queue)}", {self._cross_id(e, is_ready=e.is_producer)})')
        source, target, slot = self._flag(e, generation, is_ready=e.is_producer)
        return TextLine(f'T.set_flag("{source}", "{target}", {{}})', (slot,))

    def _cross_id(self, e: Endpoint, *, is_ready: bool) -> int:
        ring = self.rings[e.ring_number]
        if ring.period != 1:
            raise ProgramError(f"{ring.name}: a flag for several slots at a time cannot be written as text")
        key = "flag", e.ring_number, is_ready
        return self.ids.setdefault(key, sum(k[0] == "flag" and self._is_cross(k) for k in self.ids))

    def _is_cross(self, key: tuple[object, ...]) -> bool:
        return self.rings[int(str(key[1]))].flag == "counter"

    def _flag(self, e: Endpoint, generation: Sum, *, is_ready: bool) -> tuple[str, str, Slot]:
        """Return the pipe that sets a flag, the pipe that waits for it, and its number: one for each slot."""
        ring = self.rings[e.ring_number]
        if len(ring.producers) != 1 or len(ring.consumers) != 1:
            raise ProgramError(
                f"{ring.name}: a ring of several producers or consumers in a core cannot be written as text"
            )
        ends = ring.producers[0], ring.consumers[0]
        source, target = ends if is_ready else ends[::-1]
        key = "flag", e.ring_number, is_ready
        if key not in self.ids:
            self.ids[key] = self.used_ids[source, target]
            self.used_ids[source, target] += ring.depth
        return _pipe(source), _pipe(target), Slot(generation, ring.depth, self.ids[key])


def _pipe(queue: str) -> str:
    return _PIPES[queue.rpartition(".")[2]]


def _turned(ops: Sequence[TileOp]) -> set[int]:
    """Return the steps that load the factor of a product that reads this factor transposed."""
    loads, found = dict[str, int](), set[int]()
    for op in ops:
        for step in op.steps:
            how = step.attributes
            if step.opcode is Opcode.MATMUL:
                for source, is_turned in zip(step.srcs, (how.transpose_a, how.transpose_b), strict=True):
                    if is_turned and isinstance(source, RingTile) and source.ring.name in loads:
                        found.add(loads[source.ring.name])
            elif isinstance(step.dst, RingTile):
                loads[step.dst.ring.name] = id(step)
    return found
