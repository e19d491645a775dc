"""The package's exceptions. Every error that user input can cause derives from :class:`Dsv4NpuError`.

Messages name the field, the value that was given and what is allowed. They are raised before anything changes, so a
caller may catch one, mend the input and go on. A failed ``assert`` in this package is a bug, never a reply to input.
"""

from __future__ import annotations


class Dsv4NpuError(Exception):
    """Base of every exception that this package raises on purpose."""


class ConfigError(Dsv4NpuError, ValueError):
    """A model, platform, speculation or deployment setting is not allowed."""


class InputError(Dsv4NpuError, ValueError):
    """An argument of a call (shape, dtype, device, range, aliasing) is not allowed."""


class CapacityError(Dsv4NpuError, RuntimeError):
    """A pool, table or row cannot hold what was asked for; nothing was taken."""


class OwnershipError(Dsv4NpuError, RuntimeError):
    """A page, row or state is released, retained or read by someone who does not hold it; nothing was changed."""


class AuditError(Dsv4NpuError, RuntimeError):
    """An audit found a broken invariant."""


class UnavailableError(Dsv4NpuError, RuntimeError):
    """A device, backend or optional dependency is not there; the message says what to install."""
