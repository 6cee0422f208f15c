"""What Evenstep raises. Every message says the fault, its consequence and the remedy."""


class EvenstepError(Exception):
    """The base of every error that Evenstep raises on purpose."""


class ConfigError(EvenstepError, ValueError):
    """A recipe, layout or topology that contradicts itself or names something unknown."""


class InputError(EvenstepError, ValueError):
    """Lengths, groups or columns that cannot be planned as they are given."""


class PlanError(EvenstepError):
    """No plan exists under these limits, or a plan breaks one of its invariants."""


class FileError(EvenstepError):
    """A file that is missing, damaged, truncated or not ours."""


class SampleError(EvenstepError):
    """A sample that could not be read; never taken for the end of the data."""


class CursorError(EvenstepError, ValueError):
    """A cursor that is damaged, or that belongs to other data, another seed or another recipe."""


class MicroBatchError(EvenstepError):
    """A micro-batch that could not be run, with its shape and its place in the plan."""


class RankError(EvenstepError):
    """Another rank has failed or is gone, so this one cannot go on."""
