"""How long the packs of a step are searched. Larger numbers of units, tries and counts make plans
faster and planning slower; so do shares closer to 1."""

from typing import TypeAlias

Phases: TypeAlias = tuple[tuple[int, float, int], ...]
"""Of each phase of exchanges: the norm as a power of two, looseness, tries."""

# Units up to which something is tried.
TINY = 24  # all assignments, ALL of them at most: proves the optimum of most such steps
SMALL = 64  # exchanges that may go far, as one unit is much of a load: up to 2 % of the time
FEW = 256  # exchanges until a time is NEAR its floor, and MORE_TRIES times as many: 0.2 %, 10 ms
SEARCHED = 4096  # further ways and exchanges at all: 0.5 % of the time, for 2 to 20 ms
MOST = 2**17  # more waves than the fewest, or ways once NEARLY even: up to 1 %, for twice the time

# Times over the floor that are good enough.
EVEN = 1 + 1e-9  # final
NEARLY = 1 + 1e-4  # once per step: only two further ways are tried, which take 1 ms
NEAR = 1.002  # no exchanges
FAIR = 1.01  # unless few units are searched for more: no exchanges, which take 0.5 ms
FAR = 1.0125  # likewise: no thorough exchanges, which take 2 ms

# What is tried.
ROOMY = 1.03  # packs over their volume, from which on these are not counted: 0.2 ms
LOOK = 4  # counts from the lower bound on, before bins are counted
ALL = 100_000  # assignments of a unit: up to 10 ms
MORE_TRIES = 3
QUICK: Phases = ((5, 0.0, 2_000),)
THOROUGH: Phases = ((5, 0.02, 3_000), (7, 0.005, 2_500), (9, 0.001, 2_500))
ANYWHERE: Phases = ((4, 0.3, 2_000), (6, 0.1, 2_000), (8, 0.02, 1_000))
