"""Everything vllm-ula raises on purpose.

UlaError
├── ConfigError        a setting is refused at start: key, value, rule, a value that works
├── VersionError       vLLM is outside the supported range
├── PatchError         a vLLM seam is not what its patch record says
├── HostMemoryError    the host pool could not be allocated or pinned
├── NotEnoughVictims   a planner was asked for more device rows than may be given up
├── LogicalIdError     a field of a logical id is out of range
├── NoSequenceNumber   every sequence number belongs to a live sequence
├── TraceError         a trace cannot be read or written
└── IntegrityError     an invariant of the address space does not hold
"""


class UlaError(Exception):
    """Base of all errors of this package."""


class ConfigError(UlaError):
    """A setting is refused before anything is loaded.

    Args:
        key: The setting as the user wrote it.
        value: What it was set to.
        rule: The rule it breaks, with the numbers that decide.
        works: A value that would be accepted, or what to do instead.
    """

    def __init__(self, key: str, value: object, rule: str, works: object) -> None:
        super().__init__(f"{key}={value}: {rule}; use {works}")
        self.key = key
        self.value = value


class VersionError(UlaError):
    """The installed vLLM is outside the supported range."""


class PatchError(UlaError):
    """A patch target is missing, has changed, or was already replaced by somebody else."""


class HostMemoryError(UlaError):
    """The operating system refused the memory of the host pool, or the driver to pin it."""


class NotEnoughVictims(UlaError):
    """A planner cannot give up as many device rows as it was asked for; it changed nothing."""

    def __init__(self, asked: int, available: int) -> None:
        super().__init__(f"{asked} victims asked, {available} device rows may be given up")
        self.asked = asked
        self.available = available


class LogicalIdError(UlaError):
    """A field of a logical id does not fit its bits."""

    def __init__(self, field: str, value: object, highest: int) -> None:
        super().__init__(f"{field}={value}: must be a whole number 0..{highest}")
        self.field = field
        self.value = value


class NoSequenceNumber(UlaError):
    """Every sequence number belongs to a live sequence."""

    def __init__(self, num_live: int) -> None:
        super().__init__(f"all {num_live} sequence numbers are live")


class TraceError(UlaError):
    """A trace cannot be read or written: which file, and why, in one line."""


class IntegrityError(UlaError):
    """An invariant of the address space does not hold."""
