"""Trees: steps in which samples with a common prefix compute it once.

    samples a b c d | e f   ->   forks 0, 2, 2 | 0, 3   ->   a forest, cut into pieces that move

Samples stand in the order of their prefixes. `forks[i]` are the leading tokens that leaf i shares
with the leaf before it: one less than the equal tokens, so that every slot has one label. Running
minima of the forks of any subset are the forks of that subset, so one kernel grows the forest of a
step and of every micro-batch.

forest    leaves and shared nodes; a node that does not save time is not shared
pieces    leaves of one tree that fit together, first whole trees, packed like other units
refine    leaves change packs; a pack pays for a node once, and for a path again where it is divided
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenstep.core.layout import Packed
from evenstep.core.prefixes import Prefixes
from evenstep.core.ragged import (
    FloatArray,
    IntArray,
    Segments,
    by_first_appearance,
    divided_up,
    offsets_of,
    rounded_up,
    sum_by,
)
from evenstep.core.recipe import Recipe
from evenstep.errors import ConfigError, PlanError
from evenstep.planning.kernels import kernel
from evenstep.planning.step import DecidedStep, decide_step, search_packs
from evenstep.planning.units import Problem, Units

_COUNTED = 2**26  # packs x nodes up to which leaves change packs: their counts take 256 MiB
_TRIES = 2_000  # of each of three phases of exchanges, from each start, and one per leaf
_STARTS, _FEW = 4, 256  # starts for few atoms, which even out less by themselves


def check_trees(recipe: Recipe, lengths: IntArray, names: IntArray, prefixes: Prefixes) -> None:
    """Raise if steps of this recipe cannot share prefixes, or if these do not fit the samples."""
    prefixes.check(lengths)
    layout, topology = recipe.layout, recipe.topology
    if not isinstance(layout, Packed):
        raise ConfigError("prefixes cannot be shared in a padded layout. Use layout=Packed(...).")
    reason = ""
    if layout.static:
        reason = "rows of a fixed width. Set layout.max_tokens instead of pad_to"
    elif recipe.capacity is None:
        reason = "micro-batches without a budget. Set layout.max_tokens"
    elif topology.cp > 1:
        reason = f"topology.cp={topology.cp}. Set topology.cp to 1"
    elif topology.equal_widths:
        reason = "one width for all micro-batches. Set topology.variable_seq_lengths"
    elif recipe.balance != "refined" or layout.packer is not None:
        reason = "a balance or packer by name. Leave recipe.balance and layout.packer at defaults"
    elif recipe.equal_sizes or recipe.equal_tokens:
        reason = "equal_sizes or equal_tokens. Unset them"
    elif recipe.second_work is not None:
        reason = "second_work. Unset it"
    if reason:
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
    several = units.count > 1
    large = units.size > (recipe.capacity or 0)
    large |= (units.extra > units.caps * (1 + 1e-12)).any(axis=1)
    if (several & large).any():  # a group that fits only with a shared prefix
        if shared is None:
            raise PlanError(
                f"the samples of this step do not fit into {wanted} micro-batches per rank. Raise "
                f"steps.micro_batches or layout.max_tokens."
            )
        return _lay_trees(forest, shared[0], shared[1], recipe)
    alone = recipe.cost.of_lengths(rounded_up(segments.length, recipe.topology.alignment))
    fewest = shared[2] if shared is not None else np.inf
    if fewest <= float(alone.sum()) / recipe.topology.dp + recipe.cost.per_micro_batch:
        assert shared is not None
        return _lay_trees(forest, shared[0], shared[1], recipe)
    apart = decide_step(segments, units, recipe, wanted)
    if shared is None or _time_apart(apart, recipe) <= fewest:
        return apart
    return _lay_trees(forest, shared[0], shared[1], recipe)


def with_shared_sizes(
    units: Units, segments: Segments, recipe: Recipe, prefixes: Prefixes
) -> Units:
    """The units with what each takes of a pack by itself: a group shares its prefixes."""
    if int(units.count.max(initial=1)) == 1:
        return units
    forest = grow_forest(segments, recipe, prefixes)
    atoms = _atoms_of(forest, units, recipe)
    sums = _sums_of(np.arange(len(units)), len(units), atoms, forest)
    unit = units.of_segment[forest.segment[atoms.leaf[atoms.offsets[:-1]]]]
    size, extra = np.empty_like(units.size), np.empty((len(units), len(atoms.caps)))
    size[unit], extra[unit] = sums[0], sums[2:].T
    return replace(
        units, size=size, extra=extra, caps=atoms.caps, limits=(*units.limits, "gathered")
    )


def _time_apart(step: DecidedStep, recipe: Recipe) -> float:
    """The modelled time of a step without shared prefixes."""
    aligned = rounded_up(step.segments.length, recipe.topology.alignment)
    columns = aligned, recipe.cost.of_lengths(aligned), np.zeros(len(aligned))
    one, none = np.ones(len(aligned), np.int64), np.zeros((len(aligned), 0))
    units = Units(np.arange(len(aligned)), *columns, one, aligned, none, np.zeros(0), ())
    problem = Problem(recipe, units, aligned, recipe.capacity or 0)
    waves, ranks = step.per_rank, recipe.topology.dp
    address = step.micro % waves * ranks + step.micro // waves
    return problem.time(problem.works(address, waves))


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """The leaves of a step in the order of their prefixes, and the nodes that they share.

    segment       the segment of each leaf
    forks         the leading tokens that each leaf shares with the one before
    nodes         node i is tokens `start[i]` to `end[i]` behind node `parent[i]`, -1 for none
    node_of_leaf  the node of each leaf's own tokens
    """

    segments: Segments
    segment: IntArray
    forks: IntArray
    start: IntArray
    end: IntArray
    parent: IntArray
    node_of_leaf: IntArray

    @property
    def tree_of_leaf(self) -> IntArray:
        """The tree of each leaf, numbered by order: forks [0, 5, 0] -> [0, 0, 1]."""
        return np.cumsum(self.forks == 0) - 1


def grow_forest(segments: Segments, recipe: Recipe, prefixes: Prefixes) -> Forest:
    """The forest of these segments, without nodes that save no time."""
    capacity, n = recipe.capacity or 0, len(segments)
    position = np.empty(len(prefixes.order), np.int64)
    position[prefixes.order] = np.arange(len(prefixes.order))
    # Segments that exceed the budget run alone, after all others.
    alone = segments.length > capacity
    order = np.lexsort((segments.start, position[segments.sample], alone))
    ends = segments.start + segments.length
    forks = running_forks(prefixes.shared, position[segments.sample[order]], np.zeros(n, np.int64))
    forks[1:] = np.minimum(forks[1:], np.minimum(ends[order][1:], ends[order][:-1]))
    forks = np.maximum(forks - 1, 0)
    forks[alone[order] | (segments.start[order] > 0)] = 0
    starts = segments.start[order]
    start, end, parent, _, at_fork = _grow(forks, starts, ends[order])
    forks = _worth_sharing(start, end, parent, at_fork, forks, recipe)
    start, end, parent, leaves, _ = _grow(forks, starts, ends[order])
    return Forest(segments, order, forks, start, end, parent, leaves)


def _worth_sharing(
    start: IntArray,
    end: IntArray,
    parent: IntArray,
    at_fork: IntArray,
    forks: IntArray,
    recipe: Recipe,
) -> IntArray:
    """The forks at nodes that save time; a node costs `per_segment` and its alignment."""
    cost, alignment = recipe.cost, recipe.topology.alignment
    if cost.per_segment == 0 and alignment == 1 and cost.per_token + cost.per_pair > 0:
        return forks
    children = np.bincount(parent[parent >= 0], minlength=len(start))
    # From the root on: a node begins where the nearest node in front of it that stays ends.
    depth = np.zeros(len(start) + 1, np.int64)  # the last entry is that of parent -1
    for node in np.argsort(start, kind="stable"):
        before = depth[parent[node]]
        repeated = cost.of_lengths(end[node] - before, before) - cost.per_segment
        saved = repeated * (children[node] - 1)
        stays = saved > cost.per_segment and end[node] - before >= alignment
        depth[node] = end[node] if stays else before
    return depth[at_fork]


@kernel
def running_forks(shared: IntArray, position: IntArray, owner: IntArray) -> IntArray:
    """What consecutive members of a subset share: minima of what lies between their positions.

    shared [0, 5, 2, 7] at positions [0, 1, 3] -> [0, 5, 2]; 0 where the owner changes
    """
    forks = np.zeros(len(position), np.int64)
    for i in range(1, len(position)):
        if owner[i] != owner[i - 1] or position[i] <= position[i - 1]:
            continue
        least = shared[position[i]]
        for at in range(position[i - 1] + 1, position[i]):
            if least == 0:
                break
            least = min(least, shared[at])
        forks[i] = least
    return forks


@kernel
def _grow(
    forks: IntArray, starts: IntArray, ends: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """(start, end and parent of each node, node of each leaf, node at each fork) of a forest.

    Leaves of 5, 6 and 4 tokens with forks [0, 3, 2] -> nodes 3-5, 2-3, 3-6, 0-2, 2-4. A stack
    holds the path of the leaf before. A fork inside a node divides it.
    """
    n = len(forks)
    start, end = np.zeros(2 * n, np.int64), np.zeros(2 * n, np.int64)
    parent = np.full(2 * n, -1, np.int64)
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
            start[cut], parent[cut] = fork, count
            stack[top] = count
            top, count = top + 1, count + 1
        above = stack[top - 1] if top > 0 else -1
        at_fork[i] = above
        start[count], end[count], parent[count] = fork if above >= 0 else starts[i], ends[i], above
        of_leaf[i], stack[top] = count, count
        top, count = top + 1, count + 1
    return start[:count], end[:count], parent[:count], of_leaf, at_fork


def _lay_trees(forest: Forest, pack: IntArray, waves: int, recipe: Recipe) -> DecidedStep:
    """The step with leaf i in pack `pack[i]`: nodes in preorder, each once per micro-batch."""
    ranks, segments = recipe.topology.dp, forest.segments
    order = np.argsort(pack, kind="stable")
    leaves, owner = forest.segment[order], pack[order]
    forks = running_forks(forest.forks, order, owner)
    ends = (segments.start + segments.length)[leaves]
    start, end, parent, of_leaf, _ = _grow(forks, segments.start[leaves], ends)
    # The first leaf below each node, which names it. Nodes of one leaf differ in their start.
    first = _first_leaves(parent, of_leaf)
    preorder = np.lexsort((start, first))
    number = np.empty(len(start) + 1, np.int64)
    number[preorder], number[-1] = np.arange(len(start)), -1
    owner = owner[first[preorder]]
    begin = np.searchsorted(owner, owner)
    above = number[parent[preorder]]
    nodes = Segments(
        segments.sample[leaves[first[preorder]]],
        start[preorder],
        (end - start)[preorder],
        np.where(above < 0, -1, above - begin),
    )
    micro = owner % ranks * waves + owner // ranks
    return DecidedStep(nodes, micro, np.zeros(len(nodes), np.int64), waves, None)


@kernel
def _first_leaves(parent: IntArray, of_leaf: IntArray) -> IntArray:
    """The first leaf below each node."""
    first = np.full(len(parent), -1, np.int64)
    for leaf in range(len(of_leaf)):
        node = of_leaf[leaf]
        while node >= 0 and first[node] < 0:
            first[node] = leaf
            node = parent[node]
    return first


@dataclass(frozen=True, slots=True, eq=False)
class _Atoms:
    """What changes packs as a whole: a leaf, or the leaves of a group; trees one after the other.

    `nodes` are the nodes of an atom's leaves, `offsets` where those of each atom begin. `cluster`
    numbers trees, and trees that a group connects. Of each node: `size`, `cost`, and in `extra`
    what it takes of each limit of a pack, `caps`, of which the last are the keys gathered.
    """

    leaf: IntArray
    nodes: IntArray
    offsets: IntArray
    cluster: IntArray
    size: IntArray
    cost: FloatArray
    extra: FloatArray
    caps: FloatArray


def _atoms_of(forest: Forest, units: Units, recipe: Recipe) -> _Atoms:
    atom = units.of_segment[forest.segment]
    cluster = _connected(forest.tree_of_leaf, atom)
    leaf = np.lexsort((np.arange(len(atom)), by_first_appearance(atom)[0], cluster[atom]))
    numbers, counts = np.unique(by_first_appearance(atom[leaf])[0], return_counts=True)
    size = rounded_up(forest.end - forest.start, recipe.topology.alignment)
    behind = forest.parent >= 0
    begin = np.where(behind, forest.start, 0)
    cost = recipe.cost.of_lengths(size, begin)
    # A sample takes its share once, with its own tokens; every node costs.
    extra = np.zeros((len(size), len(units.caps) + 1))
    share = units.extra / units.count[:, None] if len(units.caps) else units.extra
    extra[forest.node_of_leaf, :-1] = share[atom]
    for at, name in enumerate(units.limits):
        if name == "cost":
            extra[:, at] = cost
    extra[behind, -1] = (begin + size)[behind]
    caps = np.append(units.caps, float(recipe.gathered or 0))
    firsts = offsets_of(counts)
    nodes = forest.node_of_leaf[leaf]
    of_atom = cluster[atom[leaf[firsts[:-1]]]]
    assert len(numbers) == len(of_atom)
    return _Atoms(
        leaf,
        nodes,
        firsts,
        by_first_appearance(of_atom)[0],
        size,
        cost,
        extra,
        caps,
    )


def _may_bind(
    extra: FloatArray, size: IntArray, caps: FloatArray, recipe: Recipe
) -> NDArray[np.bool_]:
    """Which limits packs that hold the budget, or a segment alone, may exceed."""
    most = (extra / np.maximum(size, 1)[:, None]).max(axis=0, initial=0.0)
    exceeded: NDArray[np.bool_] = most * max(recipe.capacity or 0, int(size.max(initial=0))) > caps
    return exceeded


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
        recipe, (used,) = (
            self.recipe,
            self.loads(address, waves, self.units.size.astype(np.float64)),
        )
        (cost,) = self.loads(address, waves, self.units.cost)
        widths = recipe.layout.widths(used.ravel().astype(np.int64), recipe.width_unit)
        padding = recipe.cost.per_token * (widths.reshape(used.shape) - used)
        return [cost + padding + recipe.cost.per_micro_batch]

    def floor(self, waves: int) -> float:
        """The mean of the ranks."""
        mean = float(self.units.cost.sum()) / self.ranks
        return mean + waves * self.recipe.cost.per_micro_batch


def _search(
    forest: Forest, units: Units, recipe: Recipe, wanted: int | None
) -> tuple[IntArray, int, float] | None:
    """(pack of each leaf, waves, modelled time) of the fastest trees; None if none fit."""
    atoms = _atoms_of(forest, units, recipe)
    binds = _may_bind(atoms.extra, atoms.size, atoms.caps, recipe)
    atoms = replace(atoms, extra=atoms.extra[:, binds], caps=atoms.caps[binds])
    ranks, capacity = recipe.topology.dp, recipe.capacity or 0
    volume = divided_up(int(atoms.size.sum()), capacity * ranks)
    waves = wanted or rounded_up(max(volume, 1), recipe.topology.multiple)
    loads = ranks if recipe.sync_every == "step" else ranks * waves
    level = float(atoms.cost.sum()) / loads
    piece = _divide(
        atoms.nodes, atoms.offsets, atoms.cluster, forest.parent, atoms.size, atoms.cost,
        atoms.extra, atoms.caps, capacity, level,
    )  # fmt: skip
    count = int(piece.max(initial=-1)) + 1
    sums = _sums_of(piece, count, atoms, forest)
    one, none = np.ones(count, np.int64), np.empty(0, np.int64)
    size = sums[0].astype(np.int64)
    limits = tuple(f"limit {at}" for at in range(len(atoms.caps)))
    packed = Units(
        none, size, sums[1], np.zeros(count), one, size, sums[2:].T.copy(), atoms.caps, limits
    )
    problem = _Pieces(recipe, packed, size, capacity)
    try:
        address, waves = search_packs(problem, wanted)
    except PlanError:
        return None
    pack_of = address[piece]
    if waves * ranks * len(forest.start) <= _COUNTED:
        starts = _STARTS if len(atoms.cluster) <= _FEW else 1
        pack_of = _refine(
            atoms.nodes, atoms.offsets, atoms.cluster, forest.parent, atoms.size, atoms.cost,
            atoms.extra, atoms.caps, capacity, ranks, waves, problem.by_rank(waves), pack_of,
            _TRIES + len(atoms.cluster), starts, problem.floor(waves),
        )  # fmt: skip
    packs = _sums_of(pack_of, ranks * waves, atoms, forest)
    widths = recipe.layout.widths(packs[0].astype(np.int64), recipe.width_unit)
    work = packs[1] + recipe.cost.per_token * (widths - packs[0]) + recipe.cost.per_micro_batch
    pack = np.empty(len(forest.segment), np.int64)
    pack[atoms.leaf] = np.repeat(pack_of, np.diff(atoms.offsets))
    return pack, waves, problem.time([work.reshape(waves, ranks)])


def _sums_of(owner: IntArray, count: int, atoms: _Atoms, forest: Forest) -> FloatArray:
    """Size, cost and extras of the nodes of each owner's atoms, each node once."""
    leaf_owner = np.repeat(owner, np.diff(atoms.offsets))
    pair = _pairs_of(leaf_owner, atoms.nodes, forest.parent)
    nodes = len(forest.parent)
    pair = np.unique(pair)
    of_owner, node = pair // nodes, pair % nodes
    columns = [atoms.size, atoms.cost, *atoms.extra.T]
    return np.array([sum_by(of_owner, column[node], count) for column in columns])


@kernel
def _pairs_of(owner: IntArray, nodes: IntArray, parent: IntArray) -> IntArray:
    """`owner * number of nodes + node` of every node on the path of each leaf."""
    total, count = 0, len(parent)
    for node in nodes:
        while node >= 0:
            total += 1
            node = parent[node]
    pairs, at = np.empty(total, np.int64), 0
    for i in range(len(nodes)):
        node = nodes[i]
        while node >= 0:
            pairs[at] = owner[i] * count + node
            at += 1
            node = parent[node]
    return pairs


@kernel
def _divide(
    nodes: IntArray,
    offsets: IntArray,
    cluster: IntArray,
    parent: IntArray,
    size: IntArray,
    cost: FloatArray,
    extra: FloatArray,
    caps: FloatArray,
    capacity: int,
    level: float,
) -> IntArray:
    """The piece of each atom: whole trees, or runs of atoms of trees beyond a limit or two levels.

    A tree of 5.3 levels gives five pieces of about equal cost. What pieces repeat does not count.
    """
    n = len(cluster)
    piece, stamp = np.zeros(n, np.int64), np.full(len(parent), -1, np.int64)
    seen = np.zeros(len(parent), np.bool_)
    # The cost of each cluster, every node once.
    whole = np.zeros(n)
    for a in range(n):
        for at in range(offsets[a], offsets[a + 1]):
            node = nodes[at]
            while node >= 0 and stamp[node] < 0:
                stamp[node] = 0
                whole[cluster[a]] += cost[node]
                node = parent[node]
    stamp[:] = -1
    current, used, paid, goal = -1, 0, 0.0, 0.0
    taken = np.zeros(len(caps))
    added = np.zeros(len(caps))
    for a in range(n):
        parts = int(whole[cluster[a]] / level + 1e-9) if level > 0 else 1
        target = whole[cluster[a]] / parts if parts > 1 else np.inf
        if a == 0 or cluster[a] != cluster[a - 1]:
            paid, goal = 0.0, target
        # Try to add the atom to the current piece; begin a new one if it does not fit.
        for fresh in range(2):
            if fresh == 1 or a == 0 or cluster[a] != cluster[a - 1]:
                current, used = current + 1, 0
                taken[:] = 0
            more, price = 0, 0.0
            added[:] = 0
            for at in range(offsets[a], offsets[a + 1]):
                node = nodes[at]
                while node >= 0 and stamp[node] != current:
                    price += 0.0 if seen[node] else cost[node]
                    stamp[node] = current
                    more += size[node]
                    for d in range(len(caps)):
                        added[d] += extra[node, d]
                    node = parent[node]
            fits = used + more <= capacity and paid + price / 2 <= goal
            for d in range(len(caps)):
                fits = fits and taken[d] + added[d] <= caps[d] * (1 + 1e-12)
            if fits or used == 0:
                break
            goal += target
        piece[a] = current
        used, paid = used + more, paid + price
        taken += added
        for at in range(offsets[a], offsets[a + 1]):
            node = nodes[at]
            while node >= 0 and not seen[node]:
                seen[node] = True
                node = parent[node]
    return piece


@kernel
def _refine(
    nodes: IntArray,
    offsets: IntArray,
    cluster: IntArray,
    parent: IntArray,
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
    counts = np.zeros((packs, len(parent)), np.int32)  # atoms of a pack that need a node
    used, held, number = np.zeros(packs, np.int64), np.zeros((packs, limits)), np.zeros(packs)
    load, powers = np.zeros(loads), np.zeros(loads)
    scale, total, norm = np.ones(groups), np.zeros(groups), np.zeros(groups)
    heaviest, top = np.zeros(groups), np.zeros(groups, np.int64)
    # The atoms of each pack as a linked list, and the first atom of each cluster.
    head, after, before = np.full(packs, -1), np.full(n, -1), np.full(n, -1)
    first = np.full(n + 1, n)
    for a in range(n - 1, -1, -1):
        first[cluster[a]] = a
    clusters = cluster[n - 1] + 1
    first[clusters] = n
    moved, came = np.empty(2 * n, np.int64), np.empty(2 * n, np.int64)
    state, squarings = 25214903917, np.array([4])

    def load_of(p: int) -> int:
        return int(p % ranks if by_rank else p)

    def power(ratio: float) -> float:
        ratio = min(max(ratio, 0.0), 1.9)
        for _ in range(squarings[0]):
            ratio = ratio * ratio
        return ratio

    def root(value: float) -> float:
        for _ in range(squarings[0]):
            value = np.sqrt(value)
        return value

    def enter(a: int, p: int) -> None:
        """Put an atom into a pack, which pays for the nodes that it does not have yet."""
        pack[a] = p
        before[a], after[a] = -1, head[p]
        if head[p] >= 0:
            before[head[p]] = a
        head[p] = a
        number[p] += 1
        for at in range(offsets[a], offsets[a + 1]):
            node = nodes[at]
            while node >= 0:
                counts[p, node] += 1
                if counts[p, node] == 1:
                    used[p] += size[node]
                    load[load_of(p)] += cost[node]
                    for d in range(limits):
                        held[p, d] += extra[node, d]
                node = parent[node]

    def leave(a: int) -> None:
        """Take an atom out of its pack."""
        p = pack[a]
        if before[a] >= 0:
            after[before[a]] = after[a]
        else:
            head[p] = after[a]
        if after[a] >= 0:
            before[after[a]] = before[a]
        number[p] -= 1
        for at in range(offsets[a], offsets[a + 1]):
            node = nodes[at]
            while node >= 0:
                counts[p, node] -= 1
                if counts[p, node] == 0:
                    used[p] -= size[node]
                    load[load_of(p)] -= cost[node]
                    for d in range(limits):
                        held[p, d] -= extra[node, d]
                node = parent[node]

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
        total[group] = 0.0
        for at in range(group * ranks, (group + 1) * ranks):
            powers[at] = power(load[at] / largest)
            total[group] += powers[at]
        scale[group], heaviest[group], top[group] = largest, load[peak], peak
        norm[group] = largest * root(total[group])

    def change(p: int, q: int) -> float:
        """What the norms rise by since they were computed, if packs p and q changed."""
        i, j = load_of(p), load_of(q)
        g, h = i // ranks, j // ranks
        one = power(load[i] / scale[g]) - powers[i]
        two = power(load[j] / scale[h]) - powers[j]
        if g == h:
            return float(scale[g] * root(max(total[g] + one + two, 0.0)) - norm[g])
        rise = scale[g] * root(max(total[g] + one, 0.0)) - norm[g]
        return float(rise + scale[h] * root(max(total[h] + two, 0.0)) - norm[h])

    def member(p: int, number_of: int) -> int:
        """One of the atoms of a pack."""
        a = head[p]
        for _ in range(number_of % int(number[p])):
            a = after[a]
        return int(a)

    for a in range(n):
        enter(a, pack_of[a])
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
                    leave(a)
                    enter(a, back)
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
        # Another pack q: one with a part of the same tree, the lightest of the group, or any.
        state = (state * 25214903917 + 11) & 281474976710655
        draw = state >> 16
        low, high = first[cluster[a]], first[cluster[a] + 1]
        where = draw % 4
        q = draw // 4 % packs
        if where < 2:
            q = pack[low + draw // 4 % (high - low)]
        elif where == 2:
            light = group * ranks
            for at in range(group * ranks, (group + 1) * ranks):
                if load[at] < load[light]:
                    light = at
            q = light + draw // 64 % waves * ranks if by_rank else light
        if load_of(p) == load_of(q):
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
                leave(b)
                enter(b, q)
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
            if kind == 2 and where < 2:
                b = low + draw // 4 % (high - low)
                if pack[b] != q:
                    continue
            if kind == 3 and cluster[a] == cluster[b]:
                continue
            for k in range(2):
                c, source, target = (a, p, q) if k == 0 else (b, q, p)
                left, right = c, c + 1
                if kind == 3:
                    left, right = first[cluster[c]], first[cluster[c] + 1]
                for atom in range(left, right):
                    if pack[atom] == source:
                        leave(atom)
                        enter(atom, target)
                        moved[done], came[done] = atom, source
                        done += 1
            if fits(p) and fits(q):
                rise, chosen = change(p, q), done
        if not rise < (allowed - 1e-12) * norm[group]:
            chosen = 0
        while done > chosen:
            done -= 1
            leave(moved[done])
            enter(moved[done], came[done])
        if chosen:
            measure(load_of(p) // ranks)
            measure(load_of(q) // ranks)
            if heaviest.sum() < least * (1 - 1e-12):
                least = heaviest.sum()
                best[:] = pack
    return best
