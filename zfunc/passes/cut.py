"""Cut: what to keep under a byte budget so that making the rest again costs least.

At a price per byte the best choice is a closure of least weight in a graph of implications, and so
a minimum cut (Picard 1976, "Maximal closure of a graph and applications to combinatorial
problems"). The search walks the lower hull of (bytes, cost) from both ends to the budget: the next
price is the slope between the best choice that fits and the best that does not, until no choice
lies below that line. What is left of the budget is spent by the same search, with what was chosen
taken as given, and branch and bound closes the gap that remains. All numbers are whole, so that
every rank finds the same choice.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Choice", "Item", "Problem", "Unit", "choose", "evaluate", "smallest"]


# How many items all the searches of one choice may look at together.
_EFFORT = 3_000


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A value that may be needed again.

    Attributes:
        nbytes: what keeping it takes; None if it cannot be kept.
        maker: the unit that makes it again; None if nothing can.
    """

    nbytes: int | None
    maker: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """A computation that can be repeated.

    Attributes:
        cost: what it costs, 0 or more.
        reads: the items that it needs.
    """

    cost: int
    reads: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What may be kept and what can be made again.

    Attributes:
        items: the values.
        units: the computations.
        targets: the items that are needed.
    """

    items: tuple[Item, ...]
    units: tuple[Unit, ...]
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A way to have every target.

    Attributes:
        kept: the items that are kept.
        nbytes: their bytes.
        cost: of the units that run again.
    """

    kept: frozenset[int]
    nbytes: int
    cost: int


def choose(problem: Problem, budget: int) -> Choice | None:
    """The choice that fits a budget and costs least, as far as bounded effort finds it.

    Branch and bound: the line through the two vertices around the budget bounds the cost from
    below, and an item that only one of them keeps is kept in one branch and not in the other.
    Small problems are solved exactly; in large ones, whose items are small beside the budget, the
    first vertex leaves little.

    Args:
        problem: what may be kept and made again.
        budget: bytes.

    Returns:
        The choice; None if nothing fits.

    Example:
        >>> item, unit = Item(8, 0), Unit(5, ())
        >>> choose(Problem((item,), (unit,), (0,)), 7)
        Choice(kept=frozenset(), nbytes=0, cost=5)
    """
    if smallest(problem).nbytes > budget:
        return None
    return evaluate(problem, _search(_distinct(problem), budget).kept)


def smallest(problem: Problem) -> Choice:
    """Of the choices that keep fewest bytes, the one that costs least."""
    return _priced(problem, price=1 + sum(unit.cost for unit in problem.units), weight=1)


def evaluate(problem: Problem, kept: Iterable[int]) -> Choice:
    """What a choice takes: the units that run again, and the items whose keeping serves."""
    kept = frozenset(kept)
    needed, used, ran = set(problem.targets), set(), set()
    stack = list(needed)
    while stack:
        item = stack.pop()
        if item in kept:
            used.add(item)
            continue
        maker = problem.items[item].maker
        assert maker is not None
        if maker not in ran:
            ran.add(maker)
            fresh = [read for read in problem.units[maker].reads if read not in needed]
            needed.update(fresh)
            stack += fresh
    cost = sum(problem.units[unit].cost for unit in ran)
    return Choice(frozenset(used), sum(problem.items[i].nbytes or 0 for i in used), cost)


def _search(problem: Problem, budget: int) -> Choice:
    """Branch and bound."""
    best = _filled(problem, budget)
    nobody: frozenset[int] = frozenset()
    heap = [(0, 0, nobody, nobody)]
    for turn in range(0, 2 * max(1, _EFFORT // len(problem.items)), 2):
        if not heap or heap[0][0] >= best.cost:
            break
        _, _, kept, banned = heapq.heappop(heap)
        left = budget - _nbytes(problem, kept)
        rest = _given(problem, kept, banned, left)
        if left < 0 or smallest(rest).nbytes > left:
            continue
        fits, beyond = _around(rest, left)
        best = min(best, evaluate(problem, kept | fits.kept), key=lambda choice: choice.cost)
        if beyond is not fits:
            slope = (fits.cost - beyond.cost) * (left - fits.nbytes)
            least = fits.cost - slope // (beyond.nbytes - fits.nbytes)
            item = max(beyond.kept - fits.kept, key=lambda item: (problem.items[item].nbytes, item))
            heapq.heappush(heap, (least, turn, kept | {item}, banned))
            heapq.heappush(heap, (least, turn + 1, kept, banned | {item}))
    return best


def _distinct(problem: Problem) -> Problem:
    """The same costs with ties broken, so that of equal layers some may be kept and some not.

    A later unit counts as dearer: what it makes is kept for a shorter time.
    """
    num = len(problem.units)
    scale = 1 + num * num
    units = tuple(
        dataclasses.replace(unit, cost=unit.cost * scale + place)
        for place, unit in enumerate(problem.units)
    )
    return dataclasses.replace(problem, units=units)


def _nbytes(problem: Problem, kept: Iterable[int]) -> int:
    return sum(problem.items[item].nbytes or 0 for item in kept)


def _filled(problem: Problem, budget: int) -> Choice:
    """A choice that fits: one search after the other, each on what is left of the budget."""
    best = smallest(problem)
    kept: frozenset[int] = frozenset()
    while True:
        left = budget - _nbytes(problem, kept)
        fits, _ = _around(_given(problem, kept, frozenset(), left), left)
        better = evaluate(problem, kept | fits.kept)
        if better.cost >= best.cost:
            return best
        best, kept = better, better.kept


def _given(problem: Problem, kept: frozenset[int], banned: frozenset[int], left: int) -> Problem:
    """The problem that remains when some items are there anyway and others are not kept."""

    def without(index: int, item: Item) -> Item:
        if item.nbytes is None or (index not in banned and item.nbytes <= left):
            return item
        return dataclasses.replace(item, nbytes=None if item.maker is not None else left + 1)

    items = tuple(without(index, item) for index, item in enumerate(problem.items))
    units = tuple(
        dataclasses.replace(unit, reads=tuple(read for read in unit.reads if read not in kept))
        for unit in problem.units
    )
    return Problem(items, units, tuple(item for item in problem.targets if item not in kept))


def _around(problem: Problem, budget: int) -> tuple[Choice, Choice]:
    """The vertices of the lower hull of (bytes, cost) on both sides of a budget.

    The last one twice if that fits.
    """
    fits = smallest(problem)
    beyond = _priced(problem, price=1, weight=1 + _nbytes(problem, range(len(problem.items))))
    if beyond.nbytes <= budget:
        return beyond, beyond
    while True:
        price, weight = fits.cost - beyond.cost, beyond.nbytes - fits.nbytes
        between = _priced(problem, price, weight)
        line = weight * fits.cost + price * fits.nbytes
        if weight * between.cost + price * between.nbytes == line:
            return fits, beyond
        if between.nbytes <= budget:
            fits = between
        else:
            beyond = between


def _priced(problem: Problem, price: int, weight: int) -> Choice:
    """The choice of least `weight * cost + price * bytes`.

    Per item a variable says that it is there, per unit one that it runs; an item that is there
    though its maker does not run is kept. A unit that runs implies what it reads and makes. With
    the sign of each variable's weight that is a closure problem, and its cut is a set of variables
    on the source's side.
    """
    made: list[list[int]] = [[] for _ in problem.units]
    for index, item in enumerate(problem.items):
        if item.maker is not None:
            made[item.maker].append(index)
    num = len(problem.items)
    flow = _Flow(num + len(problem.units) + 2)
    source, sink = flow.num - 2, flow.num - 1
    infinite = 1 + sum(weight * unit.cost for unit in problem.units)
    infinite += price * _nbytes(problem, range(num))
    for index, item in enumerate(problem.items):
        if item.nbytes is not None:
            flow.add(index, sink, price * item.nbytes)
        elif item.maker is not None:
            flow.add(index, num + item.maker, infinite)
        else:
            flow.add(index, sink, infinite)
    for index, unit in enumerate(problem.units):
        saved = price * sum(problem.items[item].nbytes or 0 for item in made[index])
        gain = saved - weight * unit.cost
        flow.add(source, num + index, max(0, gain))
        flow.add(num + index, sink, max(0, -gain))
        for item in dict.fromkeys((*unit.reads, *made[index])):
            flow.add(num + index, item, infinite)
    for item in problem.targets:
        flow.add(source, item, infinite)
    side = flow.cut(source, sink)
    kept = [i for i, item in enumerate(problem.items) if side[i] and not _runs(item, side, num)]
    return evaluate(problem, kept)


def _runs(item: Item, side: Sequence[bool], num: int) -> bool:
    return item.maker is not None and side[num + item.maker]


class _Flow:
    """Maximum flow by blocking flows in layers (Dinic 1970)."""

    def __init__(self, num: int):
        self.num = num
        self.edges: list[list[int]] = [[] for _ in range(num)]
        self.heads: list[int] = []
        self.room: list[int] = []

    def add(self, tail: int, head: int, capacity: int) -> None:
        """An edge; its partner, one apart in number, takes flow back."""
        if capacity:
            for one, other, room in ((tail, head, capacity), (head, tail, 0)):
                self.edges[one].append(len(self.heads))
                self.heads.append(other)
                self.room.append(room)

    def cut(self, source: int, sink: int) -> list[bool]:
        """Which nodes are on the source's side of a minimum cut."""
        while (layer := self._layers(source))[sink] >= 0:
            self._block(source, sink, layer)
        return [depth >= 0 for depth in layer]

    def _layers(self, source: int) -> list[int]:
        """The distance of each node from the source, -1 where it has no way."""
        layer = [-1] * self.num
        layer[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for head in self._open(node):
                if layer[head] < 0:
                    layer[head] = layer[node] + 1
                    queue.append(head)
        return layer

    def _open(self, node: int) -> Iterator[int]:
        return (self.heads[edge] for edge in self.edges[node] if self.room[edge])

    def _block(self, source: int, sink: int, layer: list[int]) -> None:
        """Fills ways that go one layer further with every edge until there are none."""
        heads, room = self.heads, self.room
        turn = [0] * self.num
        way: list[int] = []
        node = source
        while True:
            if node == sink:
                sent = min(room[edge] for edge in way)
                for edge in way:
                    room[edge] -= sent
                    room[edge ^ 1] += sent
                full = next(place for place, edge in enumerate(way) if not room[edge])
                node = heads[way[full] ^ 1]
                del way[full:]
            elif turn[node] < len(self.edges[node]):
                edge = self.edges[node][turn[node]]
                if room[edge] and layer[heads[edge]] == layer[node] + 1:
                    way.append(edge)
                    node = heads[edge]
                else:
                    turn[node] += 1
            elif way:
                node = heads[way.pop() ^ 1]
                turn[node] += 1
            else:
                return
