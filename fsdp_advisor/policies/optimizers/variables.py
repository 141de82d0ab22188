"""The storages that the local variables of an optimizer's loop over the parameters hold.

Python computes a new value before it frees the old one, and a variable keeps the value of one parameter's update into the update of the
next. So the temporaries of an optimizer that is written in plain PyTorch depend on the order of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass
class Variables:
    """Variables by name with the bytes of their storages, and the storages that lived at the highest point so far.

    >>> variables = Variables()
    >>> variables.assign("update", 100)
    >>> variables.assign("update", 60)
    >>> variables.peak.exact, variables.alive
    (160, 60)
    """

    _held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _highest: tuple[int, ...] = ()

    @property
    def alive(self) -> int:
        """The bytes that the variables hold now."""
        return sum(map(sum, self._held.values()))

    @property
    def peak(self) -> Storages:
        """The storages at the highest point."""
        return sum((Storages.of(n_bytes) for n_bytes in self._highest), NO_STORAGES)

    def assign(self, name: str, *n_bytes: int) -> None:
        """Allocate storages, then free those that the variable held."""
        self.use(*n_bytes)
        self._held[name] = n_bytes

    def use(self, *n_bytes: int) -> None:
        """Allocate storages and free them at once."""
        if self.alive + sum(n_bytes) > sum(self._highest):
            self._highest = (*(each for held in self._held.values() for each in held), *n_bytes)

    def drop(self, *names: str) -> None:
        """Free what the variables hold."""
        for name in names:
            self._held.pop(name, None)
