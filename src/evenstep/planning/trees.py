"""Trees: steps in which samples with a common prefix compute it once.

    samples a b c d | e f   ->   forks 0, 2, 2, 1 | 0, 3   ->   pieces of trees, which move

Samples stand in the order of their prefixes. `forks[i]` are the leading tokens that leaf i shares
with the leaf before it: one less than the equal tokens, so that every slot has one label. Running
minima of the forks of any subset are the forks of that subset, and they say what it takes: a leaf
adds the tokens behind the longest fork that it has with a leaf of its pack.

pieces    whole trees, or parts of those that are too large, are packed like other units
refine    leaves change packs: a tree is divided, and repeats a path, where that evens out loads
lay       each micro-batch gets the nodes of its leaves
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evenstep.core.layout import Packed
from evenstep.core.measures import time_of_works
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import (
    BoolArray,
    FloatArray,
    IntArray,
    Ragged,
    Segments,
    by_first_appearance,
    rounded_up,
    sum_by,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.exchange import Shape
from evenstep.planning.kernels import kernel
from evenstep.planning.step import THOROUGH, DecidedStep, decide_step, search_packs
from evenstep.planning.units import Problem, Units

_LARGE = 2  # mean loads from which on a tree is divided before it is packed
_TRIES = 12_000  # of each round of exchanges, or one per unit if those are more
_ROUNDS = 6  # at most, with other random numbers; the fastest counts
_FRESH = 3  # of them begin with the packed pieces; later ones go on from the fastest
_NEAR = 1.0175  # times the mean of the ranks at which rounds end
_LOOSE = 0.3  # 128 times the share of a load by which a norm may rise at first
_ROUNDING = 1 + 1e-12
_COUNTED = 2**26  # packs x nodes up to which leaves change packs: their counts take 256 MiB


def check_trees(recipe: Recipe, lengths: IntArray, names: IntArray, prefixes: Prefixes) -> None:
    """Raise if steps of this recipe cannot share prefixes, or if these do not fit the samples."""
    if not isinstance(prefixes, Prefixes):
        raise InputError(
            f"prefixes must be Prefixes, got {type(prefixes).__name__}. Use find_prefixes."
        )
    prefixes.check(lengths)
    layout, topology = recipe.layout, recipe.topology
    by_name = recipe.balance != "refined" or layout.packer is not None
    for refused, reason in (
        (not isinstance(layout, Packed), "a padded layout. Use layout=Packed(...)"),
        (layout.static, "rows of a fixed width. Set layout.max_tokens instead of pad_to"),
        (recipe.capacity is None, "micro-batches without a budget. Set layout.max_tokens"),
        (topology.cp > 1, f"topology.cp={topology.cp}. Set topology.cp to 1"),
        (topology.equal_widths, "one width for all. Set topology.variable_seq_lengths"),
        (by_name, "a balance or packer by name. Leave balance and layout.packer at defaults"),
        (recipe.equal_sizes or recipe.equal_tokens, "equal_sizes or equal_tokens. Unset them"),
        (recipe.second_work is not None, "second_work. Unset it"),
    ):
        if refused:
            raise ConfigError(f"prefixes cannot be shared with {reason}, or plan without prefixes.")
    if recipe.overflow == "split" and recipe.longest_segment is not None:
        # A sample shares tokens with the one before it or with the one after it.
        shared = np.maximum(prefixes.shared, np.append(prefixes.shared[1:], 0)) > 1
        split = shared & (lengths[prefixes.order] > recipe.longest_segment)
        if split.any():
            sample = names[prefixes.order[np.argmax(split)]]
            raise PlanError(
                f"sample {sample} shares a prefix and is longer than a micro-batch, so it cannot "
                f"be split. Raise layout.max_tokens, or set overflow to truncate or drop."
            )


def share_prefixes(
    segments: Segments, units: Units, recipe: Recipe, wanted: int | None, prefixes: Prefixes
) -> DecidedStep:
    """Decide one step with shared prefixes, or without where that is as fast.

    Sample numbers of `prefixes` are those of `segments`.
    """
    leaves = _Leaves.of(segments, units, recipe, prefixes)
    shared = _search(leaves, recipe, wanted) if leaves.forks.any() else None
    needed = bool((_too_large(units, recipe) & (units.count > 1)).any())
    if needed and shared is None:
        raise PlanError(
            "a group fits into a micro-batch only with its shared prefix, and no such plan of its "
            "step was found. Raise layout.max_tokens or steps.micro_batches, or set groups='step'."
        )
    if shared is None:
        return decide_step(segments, units, recipe, wanted)
    time, least = time_of(shared, recipe), float(units.cost.sum()) / recipe.topology.dp
    if needed or time <= least + recipe.cost.per_micro_batch:
        return shared
    apart = decide_step(segments, units, recipe, wanted)
    return apart if time_of(apart, recipe) <= time else shared


def _too_large(units: Units, recipe: Recipe) -> BoolArray:
    """Which units exceed a pack without shared prefixes."""
    large: BoolArray = units.size > (recipe.capacity or 0)
    return large | (units.extra > units.caps * _ROUNDING).any(1)


def time_of(step: DecidedStep, recipe: Recipe) -> float:
    """The modelled time of a step of packed rows."""
    ranks, layout = recipe.topology.dp, recipe.layout
    aligned = rounded_up(step.segments.length, recipe.topology.alignment)
    used = sum_by(step.micro, aligned, ranks * step.per_rank).astype(np.int64)
    widths, rows = layout.widths(used, recipe.width_unit), np.ones_like(used)
    behind = step.segments.behind
    work = layout.micro_batch_costs(recipe.cost, rows, widths, step.micro, aligned, behind)
    return time_of_works([work.reshape(ranks, -1)], recipe.sync_every)


def with_shared_sizes(
    units: Units, segments: Segments, recipe: Recipe, prefixes: Prefixes
) -> Units:
    """The units with what each takes of a pack by itself: a group that does not fit otherwise
    shares its prefixes."""
    shares = _too_large(units, recipe) & (units.count > 1)
    if not shares.any():
        return units
    leaves = _Leaves.of(segments, units, recipe, prefixes)
    takes = np.empty((len(units), len(leaves.names)))
    takes[units.of_segment[leaves.segment]] = leaves.sums(leaves.unit)[leaves.unit]
    size = np.where(shares, takes[:, 0].astype(np.int64), units.size)
    apart = np.column_stack((units.extra, np.zeros(len(units))))  # gathers nothing
    extra = np.where(shares[:, None], takes[:, 2:], apart)
    return replace(units, size=size, extra=extra, caps=leaves.caps[2:], limits=leaves.names[2:])


@dataclass(frozen=True, slots=True, eq=False)
class _Leaves:
    """The samples of a step in the order of their prefixes.

    segment  the segment of each leaf
    forks    the leading tokens that each leaf shares with the one before
    unit     its unit, which changes packs as a whole; numbered by first appearance
    names    what a pack holds `caps` of: slots, cost, limits and gathered keys
    extra    what a sample takes of these once, with its own tokens; every node takes more (`adds`)
    """

    recipe: Recipe
    segments: Segments
    segment: IntArray
    forks: IntArray
    unit: IntArray
    names: tuple[str, ...]
    extra: FloatArray
    caps: FloatArray

    @classmethod
    def of(cls, segments: Segments, units: Units, recipe: Recipe, prefixes: Prefixes) -> _Leaves:
        """The leaves of these segments. Only nodes that save time are shared."""
        # Segments that exceed the budget run alone.
        alone = segments.length > (recipe.capacity or 0)
        segment, forks = prefixes.forks(segments, np.where(alone, 1 + np.arange(len(alone)), 0))
        cost, alignment = recipe.cost, recipe.topology.alignment
        forks = forks // alignment * alignment  # so that only the ends of samples are padded
        forks = _worth_sharing(forks, cost.of_lengths(forks) - cost.per_segment, cost.per_segment)
        unit = units.of_segment[segment]
        extra = np.zeros((len(unit), 3 + len(units.limits)))
        extra[:, 2:-1] = (units.extra / units.count[:, None])[unit]
        names = ("slots", "cost", *units.limits, "gathered")
        caps = np.array([recipe.capacity, np.inf, *units.caps, recipe.gathered], np.float64)
        unit, _ = by_first_appearance(unit)
        return cls(recipe, segments, segment, forks, unit, names, extra, caps)

    def nodes(self, owner: IntArray) -> tuple[IntArray, Segments, IntArray]:
        """(owner, segment and first leaf) of the nodes of each owner's leaves, in preorder."""
        order = np.argsort(owner, kind="stable")
        forks = np.zeros(len(order), np.int64)
        forks[1:] = Prefixes(np.arange(len(order)), self.forks).between(order[:-1], order[1:])
        forks[1:][np.diff(owner[order]) != 0] = 0
        whole = self.segments.take(self.segment[order])
        leaf, start, end, parent = _nodes_of(forks, whole.start, whole.start + whole.length)
        nodes = Segments(whole.sample[leaf], start, end - start, parent)
        return owner[order][leaf], nodes, order[leaf]

    def adds(self, nodes: Segments, leaf: IntArray) -> FloatArray:
        """What each node takes of `names`."""
        size = rounded_up(nodes.length, self.recipe.topology.alignment)
        behind = np.zeros_like(size) if nodes.behind is None else nodes.behind
        last = np.append(np.diff(leaf) != 0, True)  # a leaf's own tokens come last
        adds = np.where(last[:, None], self.extra[leaf], 0.0)
        adds[:, 0], adds[:, 1] = size, self.recipe.cost.of_lengths(size, behind)
        if "cost" in self.names[2:]:
            adds[:, self.names.index("cost", 2)] = adds[:, 1]
        adds[:, -1] = np.where(behind > 0, behind + size, 0)
        return adds

    def sums(self, owner: IntArray) -> FloatArray:
        """What the nodes of each owner take together: owners x names."""
        of_node, nodes, leaf = self.nodes(owner)
        count = int(owner.max(initial=-1)) + 1
        return np.column_stack([sum_by(of_node, part, count) for part in self.adds(nodes, leaf).T])


@kernel
def _worth_sharing(forks: IntArray, cost: FloatArray, per_segment: float) -> IntArray:
    """The forks at nodes that save more than the segment that they cost.

    `cost` is that of the tokens in front of each fork. Forks 0 9 8 9 where three tokens are worth
    a segment -> 0 9 8 8.
    """
    kept, path, top = np.zeros_like(forks), np.empty(len(forks), np.int64), 0
    for leaf in range(len(forks)):
        while top > 0 and forks[path[top - 1]] > forks[leaf]:
            top -= 1
        if cost[leaf] - (cost[path[top - 1]] if top > 0 else 0.0) > per_segment:
            path[top] = leaf
            top += 1
        kept[leaf] = forks[path[top - 1]] if top > 0 else 0
    return kept


def _lay(leaves: _Leaves, pack: IntArray, waves: int) -> DecidedStep:
    """The step with leaf i in pack `pack[i]`."""
    ranks, (owner, nodes, _) = leaves.recipe.topology.dp, leaves.nodes(pack)
    if nodes.parent is not None:  # counted from the first segment of the micro-batch
        above = np.where(nodes.parent < 0, -1, nodes.parent - np.searchsorted(owner, owner))
        nodes = replace(nodes, parent=above)
    micro = owner % ranks * waves + owner // ranks
    return DecidedStep(nodes, micro, np.zeros(len(nodes), np.int64), waves, None)


@kernel
def _nodes_of(
    forks: IntArray, starts: IntArray, ends: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(first leaf, start, end and parent) of the nodes of a forest, in preorder.

    Leaves of 5, 6 and 4 tokens with forks 0, 3, 2 -> 0-2, 2-3, 3-5 of the first leaf, 3-6 and 2-4.
    From the last leaf to the first, a stack holds the forks that divide the path of a leaf.
    """
    n, at = len(forks), 2 * len(forks)
    nodes, stack, top = np.full((4, 2 * n), -1, np.int64), np.empty(n, np.int64), 0
    leaf, start, end, parent = nodes[0], nodes[1], nodes[2], nodes[3]
    for i in range(n - 1, -1, -1):
        stop = ends[i]
        while stop > forks[i]:
            at -= 1
            leaf[at], end[at] = i, stop
            stop = forks[i]
            if top > 0 and stack[top - 1] > stop:
                top -= 1
                stop = stack[top]
            start[at] = stop if stop > 0 else starts[i]
        if forks[i] > 0 and (top == 0 or stack[top - 1] < forks[i]):
            stack[top] = forks[i]
            top += 1
    for node in range(at + 1, 2 * n):
        # The parent is the node before, or one that it sees.
        above = node - 1 if forks[leaf[node]] > 0 or leaf[node] == leaf[node - 1] else -1
        while above >= 0 and end[above] != start[node]:
            above = parent[above]
        parent[node] = above
    parent[at:] = np.maximum(parent[at:] - at, -1)
    return leaf[at:], start[at:], end[at:], parent[at:]


class _Pieces(Problem):
    """Pieces of trees as units. What a micro-batch costs is the sum of their costs."""

    def works(self, address: IntArray, waves: int) -> list[FloatArray]:
        """The works of the micro-batches, waves x ranks."""
        recipe, sizes = self.recipe, self.units.size.astype(np.float64)
        used, cost = self.loads(address, waves, sizes, self.units.cost)
        widths = recipe.layout.widths(used.ravel().astype(np.int64), recipe.width_unit)
        padding = recipe.cost.per_token * (widths.reshape(used.shape) - used)
        return [cost + padding + recipe.cost.per_micro_batch]

    def floor(self, waves: int) -> float:
        """The mean of the ranks."""
        mean = float(self.units.cost.sum()) / self.ranks
        return mean + waves * self.recipe.cost.per_micro_batch


def _search(leaves: _Leaves, recipe: Recipe, wanted: int | None) -> DecidedStep | None:
    """The fastest step of trees that was found; None if none fits."""
    caps, ranks = leaves.caps, recipe.topology.dp
    _, nodes, leaf = leaves.nodes(np.zeros_like(leaves.forks))
    adds = leaves.adds(nodes, leaf)
    # The tree in which each unit begins: a group may have leaves of several.
    begins = (np.cumsum(leaves.forks == 0) - 1)[np.unique(leaves.unit, return_index=True)[1]]
    tree = by_first_appearance(begins)[0]
    piece = _pieces(leaves, tree, adds, leaf, wanted)
    problem = _problem(leaves, piece, adds)
    try:
        address, waves = search_packs(problem, wanted)
    except PlanError:
        return None
    if waves > (recipe.steps.micro_batches or waves):
        return None
    goal = float(adds[:, 1].sum()) / ranks
    address = problem.exchange(address, waves, THOROUGH, goal)
    if waves * ranks * len(adds) <= _COUNTED:
        own = np.flatnonzero(np.append(np.diff(leaf) != 0, True))
        parents = np.full(len(adds), -1) if nodes.parent is None else nodes.parent
        members, shape = Ragged.group(leaves.unit, len(piece)), problem.shape(waves, address)
        start, piece, least = address[piece], np.arange(len(piece)), np.inf
        for seed in range(_ROUNDS):
            found, time = _refine(
                parents,
                adds,
                caps,
                own[members.values],
                members.offsets,
                tree,
                shape,
                start,
                max(_TRIES, len(piece)),
                goal,
                seed,
            )
            if time < least:
                address, least = found, time
            start = start if seed + 1 < _FRESH else address
            if least <= goal * _NEAR:
                break
    pack = address[piece][leaves.unit]
    over = leaves.sums(pack) > caps * _ROUNDING
    if (over.any(axis=1) & (np.bincount(pack) > 1)).any():
        return None  # a group may fit only if samples of other steps make a node worth its segment
    return _lay(leaves, pack, waves)


def _problem(leaves: _Leaves, piece: IntArray, adds: FloatArray) -> _Pieces:
    """Pieces as units to pack, with the limits that may bind."""
    capacity, caps = int(leaves.caps[0]), leaves.caps
    sums = leaves.sums(piece[leaves.unit])
    # Limits that packs which hold the budget, or a segment alone, may exceed.
    binds = (adds / adds[:, :1]).max(axis=0) * max(capacity, adds[:, 0].max()) > caps
    binds[:2] = False
    one, size = np.ones(len(sums), np.int64), sums[:, 0].astype(np.int64)
    limits = tuple(np.array(leaves.names)[binds].tolist())
    packed = Units(
        one[:0],
        size,
        sums[:, 1].copy(),
        np.zeros(len(sums)),
        one,
        size,
        sums[:, binds].copy(),
        caps[binds],
        limits,
    )
    return _Pieces(leaves.recipe, packed, size, capacity)


def _pieces(
    leaves: _Leaves, tree: IntArray, adds: FloatArray, leaf: IntArray, wanted: int | None
) -> IntArray:
    """The piece of each unit: whole trees; halves of those beyond a limit or several mean loads."""
    recipe, caps, unit, piece = leaves.recipe, leaves.caps.copy(), leaves.unit, tree
    slots, ranks = sum_by(unit[leaf], adds[:, 0], 0), recipe.topology.dp
    waves = 1 if recipe.sync_every == "step" else wanted or np.ceil(slots.sum() / caps[0] / ranks)
    caps[1] = _LARGE * adds[:, 1].sum() / ranks / waves
    while True:
        sums = leaves.sums(piece[unit])
        large = (sums > caps * _ROUNDING).any(axis=1) & (np.bincount(piece) > 1)
        if not large.any():
            return piece
        ends = np.cumsum(sum_by(piece, slots, 0))
        middle = (ends + np.append(0, ends[:-1])) / 2
        second = large[piece] & (np.cumsum(slots) - slots / 2 > middle[piece])
        piece = by_first_appearance(2 * piece + second)[0]


@kernel
def _refine(
    parent: IntArray,
    adds: FloatArray,
    caps: FloatArray,
    own: IntArray,
    offsets: IntArray,
    tree: IntArray,
    shape: Shape,
    pack_of: IntArray,
    tries: int,
    goal: float,
    seed: int,
) -> tuple[IntArray, float]:
    """(the pack of each unit after exchanges, their time); never slower, no pack becomes empty.

    A pack pays once for each node that its units need, so moving a second unit of a tree to a pack
    is cheaper than the first. Each try takes a unit of a heavy load and moves it and those after it
    in its tree to another pack, as many as pay: the tree is divided, or two parts of it join. A
    quarter of the tries first move something the other way: the part of another tree, or one unit
    of the same. As in `exchange`, tries lower the sum over groups of loads of their p-norms, with
    p = 128, and the share by which a norm may rise falls to 0. Stops at a time of `goal`.

    `own` are the last nodes of the leaves of each unit, from `offsets` on; `tree` numbers trees.
    """
    ranks, packs, by_rank = shape.ranks, shape.ranks * shape.waves, shape.by_rank
    n, columns, loads = len(tree), len(caps), ranks if by_rank else packs
    groups, load_of = loads // ranks, np.arange(packs) % loads
    pack, best = pack_of.copy(), pack_of.copy()
    counts = np.zeros((packs, len(parent)), np.int32)  # children of each node, its leaf included
    held, number, load = np.zeros((packs, columns)), np.zeros(packs, np.int64), np.zeros(loads)
    # Of each group: its heaviest load, and the derivative of its norm by a power, times p.
    heaviest, price, powers = np.zeros(groups), np.zeros(groups), np.zeros(loads)
    moved, came = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    first = np.searchsorted(tree, np.arange(tree[n - 1] + 2))  # unit of each tree

    def power(load: float, largest: float) -> float:
        """The 128th power of their ratio; a ratio over 1.9 counts as 1.9, to stay finite."""
        ratio = min(max(load / max(largest, 1e-300), 0.0), 1.9)
        for _ in range(7):
            ratio = ratio * ratio
        return ratio

    def count(u: int, p: int, sign: int) -> None:
        """Put a unit into a pack (1) or take it out (-1); a pack pays for a node once."""
        number[p] += sign
        before = held[p, 1]
        for at in range(offsets[u], offsets[u + 1]):
            node = own[at]
            while node >= 0:
                counts[p, node] += sign
                if 2 * counts[p, node] != 1 + sign:
                    break  # other leaves need it, and all above it
                for d in range(columns):
                    held[p, d] += sign * adds[node, d]
                node = parent[node]
        load[load_of[p]] += held[p, 1] - before

    def move(u: int, p: int) -> None:
        count(u, pack[u], -1)
        pack[u] = p
        count(u, p, 1)

    def fits(p: int) -> bool:
        for d in range(columns):
            if held[p, d] > caps[d] * (1 + 1e-12):
                return False
        return True

    def measure(group: int) -> None:
        """Compute the powers of one group again."""
        low, high = group * ranks, (group + 1) * ranks
        heaviest[group] = load[low:high].max()
        for at in range(low, high):
            powers[at] = power(load[at], heaviest[group])
        price[group] = heaviest[group] / max(powers[low:high].sum(), 1.0)

    def change(p: int, q: int) -> float:
        """What the norms rise by, times p, since they were measured, if packs p and q changed."""
        rise = 0.0
        for k in (load_of[p], load_of[q]):
            group = k // ranks
            rise += price[group] * (power(load[k], heaviest[group]) - powers[k])
        return rise

    def time() -> float:
        """The time of the step, and a little for all work: of plans as fast, the least counts."""
        return float(heaviest.sum() + 1e-6 * load.sum())

    for u in range(n):
        count(u, pack[u], 1)
    for group in range(groups):
        measure(group)
    least, state = time(), seed * 2 + 1
    for attempt in range(tries):
        if least <= goal:
            break
        # A unit of a heavy load.
        state = (state * 25214903917 + 11) & 281474976710655
        a = (state >> 18) % n
        p = pack[a]
        group = load_of[p] // ranks
        if (state >> 16) % 4 and load[load_of[p]] < heaviest[group] * (1 - 1e-9):
            continue
        # Another pack: one with a part of the same tree, else any.
        low, high = first[tree[a]], first[tree[a] + 1]
        state = (state * 25214903917 + 11) & 281474976710655
        q = pack[low + (state >> 16) % (high - low)]
        state = (state * 25214903917 + 11) & 281474976710655
        if load_of[p] == load_of[q]:
            q = (state >> 18) % packs
        left = right = 0
        if (state >> 16) % 4 == 0:
            # First the part of a tree in q, or one unit if it is the same tree, moves to p.
            left = (state >> 18) % n
            q, right = pack[left], left + 1
            if tree[left] != tree[a]:
                left, right = first[tree[left]], first[tree[left] + 1]
        if load_of[p] == load_of[q]:
            continue
        done, chosen, rise = 0, 0, np.inf
        for u in range(left, right):
            if pack[u] == q:
                move(u, p)
                moved[done], came[done] = u, q
                done += 1
        # Units of the tree from a on, until the packs are even.
        for k in range(high - low):
            u = low + (a - low + k) % (high - low)
            if pack[u] != p:
                continue
            if number[p] == 1:
                break
            move(u, q)
            moved[done], came[done] = u, p
            done += 1
            if not fits(q):
                break
            if load[load_of[p]] < 1.02 * heaviest[group]:  # else the norm rises far
                now = change(p, q)
                if now < rise and fits(p):
                    rise, chosen = now, done
            if load[load_of[q]] > load[load_of[p]]:
                break
        if not rise < (_LOOSE * (1 - attempt / tries) - 1e-12) * heaviest[group]:
            chosen = 0
        while done > chosen:
            done -= 1
            move(moved[done], came[done])
        if chosen:
            measure(group)
            measure(load_of[q] // ranks)
            if time() < least * (1 - 1e-12):
                least = time()
                best[:] = pack
    return best, least
