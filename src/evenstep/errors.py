"""The exceptions of Evenstep. Messages say what was wrong, what was expected and how to fix it."""


class EvenstepError(Exception):
    """Base class of all Evenstep exceptions."""


class ConfigError(EvenstepError, ValueError):
    """Invalid configuration: a wrong value, an unknown name or options that contradict."""


class InputError(EvenstepError, ValueError):
    """Invalid data from the caller, for example lengths, groups or columns."""


class PlanError(EvenstepError):
    """No plan exists within the limits, or a plan is invalid."""


class FileError(EvenstepError):
    """A file is missing, damaged, truncated or of another format."""


class NotInstalledError(EvenstepError, ModuleNotFoundError):
    """A package that is needed is not installed."""


class SampleError(EvenstepError):
    """A sample could not be read. Never treated as the end of the data."""


class CursorError(EvenstepError, ValueError):
    """A cursor is damaged, or belongs to other data, another seed or another recipe."""


class MicroBatchError(EvenstepError):
    """A micro-batch failed. The message has its shape, step, rank and index."""


class RankError(EvenstepError):
    """Another rank failed or does not respond."""
