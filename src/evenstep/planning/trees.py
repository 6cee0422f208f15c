"""Trees: steps in which samples with a common prefix compute it once.

    samples a b c d | e f   ->   forks 0, 2, 2 | 0, 3   ->   a forest, cut into pieces that move

Samples stand in the order of their prefixes. `forks[i]` are the leading tokens that leaf i shares
with the leaf before it: one less than the equal tokens, so that every slot has one label. Running
minima of the forks of any subset are the forks of that subset, so one kernel grows the forest of a
step and of every micro-batch.

forest    leaves and shared nodes; a node that does not save time is not shared
atoms     what changes packs as a whole: a leaf, or the leaves of a group, with all nodes it needs
pieces    atoms of one tree that fit together, first whole trees, packed like other units
refine    atoms change packs; a pack pays for a node once, and for a path again where it is divided
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
    Segments,
    by_first_appearance,
    divided_up,
    rounded_up,
    sum_by,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, InputError, PlanError
from evenstep.planning.kernels import kernel
from evenstep.planning.step import THOROUGH, DecidedStep, decide_step, search_packs
from evenstep.planning.units import Problem, Units

_COUNTED = 2**26  # packs x nodes up to which atoms change packs: their counts take 256 MiB
_TRIES = 2_000  # of each of three phases of exchanges, from each start, and one per atom
_STARTS, _FEW = 3, 256  # starts for few atoms, which even out less by themselves
_MORE = 3  # times as many exchanges of pieces as of units
_ROUNDING = 1 + 1e-12


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
    forest = grow_forest(segments, recipe, prefixes)
    if not forest.forks.any():
        return decide_step(segments, units, recipe, wanted)
    shared = _search(forest, units, recipe, wanted)
    most = recipe.steps.micro_batches
    if shared is not None and (
        shared.per_rank > (most or shared.per_rank) or _over(shared, recipe)
    ):
        shared = None
    large = _too_large(units, recipe) & (units.count > 1)
    needed = bool(large.any())  # a group fits only with a shared prefix
    if shared is None:
        if needed:
            raise PlanError(
                "a group fits into a micro-batch only with its shared prefix, and no such plan of "
                "its step was found. Raise layout.max_tokens or steps.micro_batches, or set "
                "groups='step'."
            )
        return decide_step(segments, units, recipe, wanted)
    time, alone = time_of(shared, recipe), rounded_up(segments.length, recipe.topology.alignment)
    least = float(recipe.cost.of_lengths(alone).sum()) / recipe.topology.dp
    if needed or time <= least + recipe.cost.per_micro_batch:
        return shared
    apart = decide_step(segments, units, recipe, wanted)
    return apart if time_of(apart, recipe) <= time else shared


def _too_large(units: Units, recipe: Recipe) -> BoolArray:
    """Which units exceed a pack without shared prefixes."""
    large: BoolArray = units.size > (recipe.capacity or 0)
    return large | (units.extra > units.caps * _ROUNDING).any(1)


def _over(step: DecidedStep, recipe: Recipe) -> bool:
    """Whether a micro-batch of several segments exceeds the budget, `limits.cost` or `gathered`.

    A group may fit by the nodes of all samples, and not by those that are worth it in its step. And
    where alignment pads a node, it and its only child cost less apart than as one segment.
    """
    aligned = rounded_up(step.segments.length, recipe.topology.alignment)
    several = np.bincount(step.micro) > 1
    over = several & (sum_by(step.micro, aligned, 0) > (recipe.capacity or 0))
    if recipe.limits.cost is not None:
        costs = sum_by(step.micro, recipe.cost.of_lengths(aligned, step.segments.behind), 0)
        most = recipe.limits.cost * _ROUNDING
        over |= several & (costs + recipe.cost.per_micro_batch > most)
    if (behind := step.segments.behind) is not None:
        keys = sum_by(step.micro, np.where(behind > 0, behind + aligned, 0), 0)
        over |= keys > (recipe.gathered or 0)
    return bool(over.any())


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
    if int(units.count.max(initial=1)) == 1:
        return units
    forest = grow_forest(segments, recipe, prefixes)
    atoms = _atoms_of(forest, units, recipe)
    sums = atoms.sums(np.arange(len(units)), len(units))
    atom = np.empty(len(units), np.int64)
    atom[units.of_segment[forest.segment]] = atoms.of_leaf
    fits = ~_too_large(units, recipe)
    size = np.where(fits, units.size, sums[0, atom].astype(np.int64))
    apart = np.column_stack((units.extra, np.zeros(len(units))))  # gathers nothing
    extra = np.where(fits[:, None], apart, sums[2:, atom].T)
    return replace(
        units, size=size, extra=extra, caps=atoms.caps, limits=(*units.limits, "gathered")
    )


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The leaves of a step in the order of their prefixes, and the nodes that they share.

    segment  the segment of each leaf
    forks    the leading tokens that each leaf shares with the one before
    start, end, parent  node i is tokens `start[i]` to `end[i]` behind node `parent[i]`, -1 for none
    of_leaf  the node of each leaf's own tokens
    """

    segments: Segments
    segment: IntArray
    forks: IntArray
    start: IntArray
    end: IntArray
    parent: IntArray
    of_leaf: IntArray


def grow_forest(segments: Segments, recipe: Recipe, prefixes: Prefixes) -> Forest:
    """The forest of these segments, without nodes that save no time."""
    # Segments that exceed the budget run alone.
    alone = segments.length > (recipe.capacity or 0)
    order, forks = prefixes.forks(segments, np.where(alone, 1 + np.arange(len(alone)), 0))
    start = segments.start[order]
    end = start + segments.length[order]
    cost, alignment = recipe.cost, recipe.topology.alignment
    if cost.per_segment > 0 or alignment > 1 or cost.per_token + cost.per_pair == 0:
        forks = _worth_sharing(_grow(forks, start, end), recipe)
    nodes, of_leaf, _, _ = _grow(forks, start, end)
    return Forest(segments, order, forks, nodes[0], nodes[1], nodes[2], of_leaf)


def _worth_sharing(
    grown: tuple[IntArray, IntArray, IntArray, IntArray], recipe: Recipe
) -> IntArray:
    """The forks at nodes that save time; a node costs `per_segment` and its alignment."""
    (start, end, parent), _, at_fork, _ = grown
    cost, children = recipe.cost, np.bincount(parent[parent >= 0], minlength=len(start))
    # From the root on: a node begins where the nearest node in front of it that stays ends.
    depth = np.zeros(len(start) + 1, np.int64)  # the last entry is that of parent -1
    for node in np.argsort(start, kind="stable"):
        before = depth[parent[node]]
        repeated = cost.of_lengths(end[node] - before, before) - cost.per_segment
        saves = repeated * (children[node] - 1) > cost.per_segment
        stays = saves and end[node] - before >= recipe.topology.alignment
        depth[node] = end[node] if stays else before
    return depth[at_fork]


@kernel
def _grow(
    forks: IntArray, starts: IntArray, ends: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(start, end and parent of each node; node of each leaf, node at each fork, first leaf of each
    node) of a forest.

    Leaves of 5, 6 and 4 tokens with forks [0, 3, 2] -> nodes 3-5, 2-3, 3-6, 0-2, 2-4. A stack
    holds the path of the leaf before. A fork inside a node divides it.
    """
    n = len(forks)
    nodes, first = np.full((3, 2 * n), -1, np.int64), np.empty(2 * n, np.int64)
    start, end, parent = nodes[0], nodes[1], nodes[2]
    of_leaf, at_fork = np.empty(n, np.int64), np.full(n, -1, np.int64)
    stack, top, count = np.empty(2 * n + 1, np.int64), 0, 0
    for i in range(n):
        fork, cut = forks[i], -1
        while top > 0 and end[stack[top - 1]] > fork:
            top -= 1
            cut = stack[top]
        if fork > 0 and (top == 0 or end[stack[top - 1]] < fork):
            # Divide the node `cut`: its first part is shared.
            start[count], end[count], parent[count] = start[cut], fork, parent[cut]
            start[cut], parent[cut], first[count] = fork, count, first[cut]
            stack[top] = count
            top, count = top + 1, count + 1
        above = stack[top - 1] if top > 0 else -1
        at_fork[i] = above
        start[count], end[count], parent[count] = fork if above >= 0 else starts[i], ends[i], above
        of_leaf[i], stack[top], first[count] = count, count, i
        top, count = top + 1, count + 1
    return nodes[:, :count], of_leaf, at_fork, first[:count]


def _lay_trees(forest: Forest, pack: IntArray, waves: int, recipe: Recipe) -> DecidedStep:
    """The step with leaf i in pack `pack[i]`: nodes in preorder, each once per micro-batch."""
    ranks, segments, n = recipe.topology.dp, forest.segments, len(pack)
    order = np.argsort(pack, kind="stable")
    leaves, owner, forks = forest.segment[order], pack[order], np.zeros(n, np.int64)
    forks[1:] = Prefixes(np.arange(n), forest.forks).between(order[:-1], order[1:])
    forks[1:][owner[1:] != owner[:-1]] = 0
    ends = (segments.start + segments.length)[leaves]
    (start, end, parent), _, _, first = _grow(forks, segments.start[leaves], ends)
    # Nodes whose first leaf is the same, which names them, differ in their start.
    preorder = np.lexsort((start, first))
    number = np.full(len(start) + 1, -1)
    number[preorder] = np.arange(len(start))
    owner, above = owner[first[preorder]], number[parent[preorder]]
    above = np.where(above < 0, -1, above - np.searchsorted(owner, owner))
    sample = segments.sample[leaves[first[preorder]]]
    nodes = Segments(sample, start[preorder], (end - start)[preorder], above)
    micro = owner % ranks * waves + owner // ranks
    return DecidedStep(nodes, micro, np.zeros(len(nodes), np.int64), waves, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms:
    """What changes packs as a whole: a leaf, or the leaves of a group; trees one after the other.

    Atom i needs the nodes `nodes[offsets[i]:offsets[i + 1]]`: its own and all in front of them.
    `of_leaf` is the atom of each leaf. `cluster` numbers trees, and trees that a group connects. Of
    each node: `size`, `cost`, and in `extra` what it takes of each limit of a pack, `caps`, of
    which the last are the keys gathered.
    """

    of_leaf: IntArray
    nodes: IntArray
    offsets: IntArray
    cluster: IntArray
    size: IntArray
    cost: FloatArray
    extra: FloatArray
    caps: FloatArray

    def sums(self, owner: IntArray, count: int) -> FloatArray:
        """Size, cost and extras of the nodes of each owner's atoms, each node once."""
        pair = np.repeat(owner, np.diff(self.offsets)) * len(self.size) + self.nodes
        of_owner, node = np.divmod(np.unique(pair), len(self.size))
        columns = [self.size, self.cost, *self.extra.T]
        return np.array([sum_by(of_owner, column[node], count) for column in columns])


def _atoms_of(forest: Forest, units: Units, recipe: Recipe) -> _Atoms:
    unit, first = by_first_appearance(units.of_segment[forest.segment])
    tree = _connected(np.cumsum(forest.forks == 0) - 1, unit)
    order = np.lexsort((first, tree))
    of_leaf = np.argsort(order)[unit]
    # The nodes of each atom, from the leaves up.
    node, atom, pairs = forest.of_leaf, of_leaf, list[IntArray]()
    while len(node):
        pairs.append(atom * len(forest.parent) + node)
        node, atom = forest.parent[node], atom[forest.parent[node] >= 0]
        node = node[node >= 0]
    owner, nodes = np.divmod(np.unique(np.concatenate(pairs)), len(forest.parent))
    offsets = np.searchsorted(owner, np.arange(len(order) + 1))
    size = rounded_up(forest.end - forest.start, recipe.topology.alignment)
    behind = np.where(forest.parent >= 0, forest.start, 0)
    cost = recipe.cost.of_lengths(size, behind)
    # A sample takes its share once, with its own tokens; every node costs.
    extra = np.zeros((len(size), len(units.caps) + 1))
    extra[forest.of_leaf, :-1] = (units.extra / units.count[:, None])[
        units.of_segment[forest.segment]
    ]
    if "cost" in units.limits:
        extra[:, units.limits.index("cost")] = cost
    extra[:, -1] = np.where(behind > 0, behind + size, 0)
    caps = np.append(units.caps, float(recipe.gathered or 0))
    cluster = by_first_appearance(tree[order])[0]
    return _Atoms(of_leaf, nodes, offsets, cluster, size, cost, extra, caps)


def _connected(tree: IntArray, atom: IntArray) -> IntArray:
    """The least tree that each atom is connected with, through trees and atoms."""
    label, atoms = np.arange(int(tree.max(initial=-1)) + 1), int(atom.max(initial=-1)) + 1
    while True:
        least = np.full(atoms, len(label))
        np.minimum.at(least, atom, label[tree])
        before = label.copy()
        np.minimum.at(label, tree, least[atom])
        if np.array_equal(before, label):
            return least


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


def _search(forest: Forest, units: Units, recipe: Recipe, wanted: int | None) -> DecidedStep | None:
    """The fastest step of trees that was found; None if none fits."""
    atoms, ranks, capacity = _atoms_of(forest, units, recipe), recipe.topology.dp, recipe.capacity
    assert capacity is not None
    # Limits that packs which hold the budget, or a segment alone, may exceed.
    per_slot = (atoms.extra / np.maximum(atoms.size, 1)[:, None]).max(axis=0)
    binds = per_slot * max(capacity, int(atoms.size.max())) > atoms.caps
    extra = np.ascontiguousarray(atoms.extra[:, binds])  # kernels are compiled for one layout
    atoms = replace(atoms, extra=extra, caps=atoms.caps[binds])
    piece = _divide(atoms, recipe, wanted)
    count = int(piece.max()) + 1
    sums = atoms.sums(piece, count)
    one, size = np.ones(count, np.int64), sums[0].astype(np.int64)
    limits = tuple(f"limit {at}" for at in range(len(atoms.caps)))
    packed = Units(
        one[:0], size, sums[1], np.zeros(count), one, size, sums[2:].T.copy(), atoms.caps, limits
    )
    problem = _Pieces(recipe, packed, size, capacity)
    try:
        address, waves = search_packs(problem, wanted)
    except PlanError:
        return None
    address = problem.exchange(address, waves, THOROUGH, problem.floor(waves), times=_MORE)
    pack_of = address[piece]
    if waves * ranks * len(forest.start) <= _COUNTED:
        starts = _STARTS if len(atoms.cluster) <= _FEW else 1
        pack_of = _refine(
            atoms.nodes, atoms.offsets, atoms.cluster, atoms.size, atoms.cost, atoms.extra,
            atoms.caps, capacity, ranks, waves, problem.by_rank(waves), pack_of,
            _TRIES + len(atoms.cluster), starts, problem.floor(waves),
        )  # fmt: skip
    return _lay_trees(forest, pack_of[atoms.of_leaf], waves, recipe)


def _divide(atoms: _Atoms, recipe: Recipe, wanted: int | None) -> IntArray:
    """The piece of each atom: whole trees, or runs of atoms of trees beyond a limit or two levels.

    A level is the mean load. A tree of 5.3 levels gives five pieces of about equal cost.
    """
    ranks, capacity, clusters = recipe.topology.dp, recipe.capacity or 0, atoms.cluster.max() + 1
    volume = divided_up(int(atoms.size.sum()), capacity * ranks)
    waves = wanted or rounded_up(max(volume, 1), recipe.topology.multiple)
    loads = ranks if recipe.sync_every == "step" else ranks * waves
    # What each atom adds to those before it, and the sum in its tree up to its middle.
    node, entry = np.unique(atoms.nodes, return_index=True)
    owner = np.searchsorted(atoms.offsets, entry, "right") - 1
    price = sum_by(owner, atoms.cost[node], len(atoms.cluster))
    whole = np.maximum(sum_by(atoms.cluster, price, clusters), 1e-300)
    before = np.concatenate(([0.0], np.cumsum(whole)))[atoms.cluster]
    share = (np.cumsum(price) - price / 2 - before) / whole[atoms.cluster]
    level = max(float(whole.sum()) / loads, 1e-300)
    parts = np.maximum(whole / level + 1e-9, 1).astype(np.int64)
    most = np.bincount(atoms.cluster)
    while True:
        parts = np.minimum(parts, most)
        of_tree = np.minimum(
            (share * parts[atoms.cluster]).astype(np.int64), parts[atoms.cluster] - 1
        )
        of_tree = np.where(
            parts[atoms.cluster] == most[atoms.cluster], np.arange(len(share)), of_tree
        )
        key = np.column_stack((atoms.cluster, of_tree))
        piece = np.concatenate(([0], np.cumsum((key[1:] != key[:-1]).any(axis=1))))
        sums = atoms.sums(piece, int(piece[-1]) + 1)
        over = (sums[0] > capacity) | (atoms.caps * _ROUNDING < sums[2:].T).any(axis=1)
        large = np.unique(atoms.cluster[over[piece]])
        large = large[parts[large] < most[large]]
        if not len(large):
            return piece
        parts[large] += np.maximum(parts[large] // 8, 1)


@kernel
def _refine(
    nodes: IntArray,
    offsets: IntArray,
    cluster: IntArray,
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    ranks: int,
    waves: int,
    by_rank: bool,
    pack_of: IntArray,
    tries: int,
    starts: int,
    goal: float,
) -> IntArray:
    """The pack of each atom after exchanges between packs; never slower, no pack becomes empty.

    A pack pays once for each node of its atoms, so moving a second atom of a tree to a pack is
    cheaper than the first. Each try takes an atom of a heavy load and either moves it and those
    after it in its tree to another pack, as many as pay (the tree is divided, or two parts of it
    join), or exchanges it for an atom there, or exchanges whole parts of two trees. As in
    `exchange`, tries lower the sum over groups of loads of their p-norms. From one of three phases
    to the next p grows (64, 128, 512), and the share by which a norm may rise falls. Each start has
    other random numbers. Stops at a time of `goal`.
    """
    n, packs, limits = len(cluster), ranks * waves, len(caps)
    loads = ranks if by_rank else packs
    groups = loads // ranks
    pack, best = pack_of.copy(), pack_of.copy()
    counts = np.zeros((packs, len(size)), np.int32)  # atoms of a pack that need a node
    used, held, number = np.zeros(packs, np.int64), np.zeros((packs, limits)), np.zeros(packs)
    load, powers = np.zeros(loads), np.zeros(loads)
    scale, norm, price = np.ones(groups), np.zeros(groups), np.zeros(groups)
    heaviest, top = np.zeros(groups), np.zeros(groups, np.int64)
    first = np.searchsorted(cluster, np.arange(cluster[n - 1] + 2))  # atom of each cluster
    moved, came = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    state, squarings, stride = 25214903917, np.array([4]), int(0.62 * n) | 1

    def load_of(p: int) -> int:
        return int(p % ranks if by_rank else p)

    def power(ratio: float) -> float:
        ratio = min(max(ratio, 0.0), 1.9)
        for _ in range(squarings[0]):
            ratio = ratio * ratio
        return ratio

    def count(a: int, p: int, sign: int) -> None:
        """Put an atom into a pack (1) or take it out (-1); a pack pays for each node once."""
        number[p] += sign
        for at in range(offsets[a], offsets[a + 1]):
            node = nodes[at]
            counts[p, node] += sign
            if 2 * counts[p, node] == 1 + sign:
                used[p] += sign * size[node]
                load[load_of(p)] += sign * cost[node]
                for d in range(limits):
                    held[p, d] += sign * extra[node, d]

    def move(a: int, p: int) -> None:
        count(a, pack[a], -1)
        pack[a] = p
        count(a, p, 1)

    def fits(p: int) -> bool:
        if used[p] > capacity:
            return False
        for d in range(limits):
            if held[p, d] > caps[d] * (1 + 1e-12):
                return False
        return True

    def measure(group: int) -> None:
        """Compute the norm of one group again."""
        peak = group * ranks
        for at in range(group * ranks, (group + 1) * ranks):
            if load[at] > load[peak]:
                peak = at
        largest = load[peak] if load[peak] > 0 else 1.0
        total = 0.0
        for at in range(group * ranks, (group + 1) * ranks):
            powers[at] = power(load[at] / largest)
            total += powers[at]
        root = total
        for _ in range(squarings[0]):
            root = np.sqrt(root)
        scale[group], heaviest[group], top[group] = largest, load[peak], peak
        norm[group] = largest * root
        # The derivative of the norm by the sum of powers. The norm is concave in that sum.
        price[group] = norm[group] / max(total, 1.0) / 2 ** squarings[0]

    def change(p: int, q: int) -> float:
        """What the norms rise by at most since they were computed, if packs p and q changed."""
        rise = 0.0
        for k in (load_of(p), load_of(q)):
            rise += price[k // ranks] * (power(load[k] / scale[k // ranks]) - powers[k])
        return rise

    def member(p: int, draw: int) -> int:
        """One of the atoms of a pack that is not empty; strides of 0.62 n meet all packs soon."""
        a = draw % n
        for _ in range(n):
            if pack[a] == p:
                return int(a)
            a = a + stride if a + stride < n else a + stride - n
        return -1

    for a in range(n):
        count(a, pack[a], 1)
    for group in range(groups):
        measure(group)
    least = heaviest.sum()
    for step in range(3 * starts * tries):
        if least <= goal:
            break
        phase, since = step // tries % 3, step % tries
        if since == 0:
            squarings[0] = 6 if phase == 0 else 7 if phase == 1 else 9
            loose = 0.005 if phase == 0 else 0.001 if phase == 1 else 0.0
            for a in range(n):
                back = pack_of[a] if phase == 0 else best[a]
                if pack[a] != back:
                    move(a, back)
            for group in range(groups):
                measure(group)
        allowed = loose * (1 - since / tries)
        # A heavy load, a pack p of it and an atom there.
        state = (state * 25214903917 + 11) & 281474976710655
        draw = state >> 16
        group = step % groups
        here = top[group] if draw % 4 else group * ranks + draw // 4 % ranks
        p = here + draw // 64 % waves * ranks if by_rank else here
        if number[p] == 0:
            continue
        a = member(p, draw // 1024)
        if a < 0:
            continue
        # Another pack q, as often as not one with a part of the same tree.
        state = (state * 25214903917 + 11) & 281474976710655
        draw = state >> 16
        low, high = first[cluster[a]], first[cluster[a] + 1]
        q = pack[low + draw // 4 % (high - low)]
        if draw % 2 or load_of(p) == load_of(q):
            q = draw // 4 % packs
        if load_of(p) == load_of(q):
            continue
        state = (state * 25214903917 + 11) & 281474976710655
        draw = state >> 16
        kind, done, chosen, rise = draw % 4, 0, 0, np.inf
        if kind < 2 or number[q] == 0:
            # Atoms of the tree from a on, until the packs are even.
            for k in range(high - low):
                b = low + (a - low + k) % (high - low)
                if pack[b] != p:
                    continue
                if number[p] == 1:
                    break
                move(b, q)
                moved[done], came[done] = b, p
                done += 1
                if not fits(q):
                    break
                now = change(p, q)
                if now < rise:
                    rise, chosen = now, done
                if load[load_of(q)] > load[load_of(p)]:
                    break
        else:
            b = member(q, draw // 4)
            if b < 0 or (kind > 2 and cluster[a] == cluster[b]):
                continue
            for k in range(2):
                c, source, target = (a, p, q) if k == 0 else (b, q, p)
                left, right = c, c + 1
                if kind > 2:
                    left, right = first[cluster[c]], first[cluster[c] + 1]
                for atom in range(left, right):
                    if pack[atom] == source:
                        move(atom, target)
                        moved[done], came[done] = atom, source
                        done += 1
            if fits(p) and fits(q):
                rise, chosen = change(p, q), done
        if not rise < (allowed - 1e-12) * norm[group]:
            chosen = 0
        while done > chosen:
            done -= 1
            move(moved[done], came[done])
        if chosen:
            measure(load_of(p) // ranks)
            measure(load_of(q) // ranks)
            if heaviest.sum() < least * (1 - 1e-12):
                least = heaviest.sum()
                best[:] = pack
    return best
