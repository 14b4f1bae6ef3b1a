"""A patch of vLLM as data: what it replaces, why no hook will do, and when it can go."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_ula.errors import PatchError

_MARK = "__vllm_ula_original__"


@dataclass(frozen=True)
class Patch:
    """One replaced attribute.

    Attributes:
        target: `module` or `module:Class` whose attribute is replaced.
        attribute: its name.
        defined_in: module in which the original is defined; differs from the target's module where
            a function was imported by name.
        parameters: names of the original's parameters, checked before anything is replaced.
        replace: makes the replacement from the original function.
        versions: vLLM versions it was written for.
        why: what goes wrong without it, and which hook is missing.
        remove_when: what upstream must do for it to go.
        needed: true while upstream still needs it; a test calls it unpatched.
    """

    target: str
    attribute: str
    defined_in: str
    parameters: tuple[str, ...]
    replace: Callable[[Callable[..., Any]], Callable[..., Any]]
    versions: str
    why: str
    remove_when: str
    needed: Callable[[], bool]

    @property
    def name(self) -> str:
        """`module:Class.attribute`, for messages."""
        separator = "." if ":" in self.target else ":"
        return f"{self.target}{separator}{self.attribute}"

    def apply(self) -> None:
        """Replace the attribute; does nothing if it already is.

        Raises:
            PatchError: the target is missing, its signature changed, or somebody else replaced it.
        """
        owner = self._owner()
        raw = inspect.getattr_static(owner, self.attribute, None)
        if raw is None:
            raise PatchError(f"{self.name} does not exist in this vLLM; {self._advice()}")
        function = getattr(raw, "__func__", raw)
        if hasattr(function, _MARK):
            return
        if getattr(function, "__module__", None) != self.defined_in:
            raise PatchError(
                f"{self.name} was replaced by {getattr(function, '__module__', '?')}; "
                f"{self._advice()}"
            )
        parameters = tuple(inspect.signature(function).parameters)
        if parameters != self.parameters:
            raise PatchError(
                f"{self.name} takes {parameters}, expected {self.parameters}; {self._advice()}"
            )
        replacement = self.replace(function)
        setattr(replacement, _MARK, raw)
        wrap = type(raw) if isinstance(raw, classmethod | staticmethod) else lambda f: f
        setattr(owner, self.attribute, wrap(replacement))

    def revert(self) -> None:
        """Put the original back; does nothing if it is there."""
        owner = self._owner()
        raw = inspect.getattr_static(owner, self.attribute)
        original = getattr(getattr(raw, "__func__", raw), _MARK, None)
        if original is None:
            return
        delattr(owner, self.attribute)
        if inspect.getattr_static(owner, self.attribute, None) is not original:  # not inherited
            setattr(owner, self.attribute, original)

    def applied(self) -> bool:
        """Whether the attribute is replaced right now."""
        raw = inspect.getattr_static(self._owner(), self.attribute)
        return hasattr(getattr(raw, "__func__", raw), _MARK)

    def _owner(self) -> Any:
        module, _, cls = self.target.partition(":")
        try:
            owner = importlib.import_module(module)
            return getattr(owner, cls) if cls else owner
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self.target} does not exist in this vLLM: {error}") from error

    def _advice(self) -> str:
        return f"vllm-ula supports vLLM {self.versions}"
