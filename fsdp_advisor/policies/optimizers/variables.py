"""The storages of the local variables in an optimizer's loop over the parameters.

Python computes a new value before it frees the old one, and a variable keeps the value of one parameter's update into the update of the
next. So the temporaries of an optimizer that is written in plain PyTorch depend on the order of the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_advisor.program.storages import NO_STORAGES, Storages


@dataclass
class Variables:
    """Variables by name with their storages, and the storages that lived at the highest point so far.

    `events`: allocations (storage number, bytes) and frees (storage number, 0), in order. The number of a freed gradient is -1 minus the
    position of its tensor.

    >>> variables = Variables()
    >>> variables.assign("update", 100)
    >>> variables.assign("update", 60)
    >>> variables.peak.exact, variables.alive
    (160, 60)
    >>> variables.events
    [(0, 100), (1, 60), (0, 0)]
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    _held: dict[str, dict[int, int]] = field(default_factory=dict)
    _highest: tuple[int, ...] = ()
    _highest_bytes: int = 0
    _released_bytes: int = 0
    _count: int = 0

    @property
    def alive(self) -> int:
        """The bytes that the variables hold now."""
        return sum(sum(storages.values()) for storages in self._held.values())

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the loop adds: bytes of the variables minus bytes of the gradients that it has freed."""
        return self._highest_bytes

    @property
    def peak(self) -> Storages:
        """The storages that the variables hold at the highest point."""
        return sum((Storages.of(n_bytes) for n_bytes in self._highest), NO_STORAGES)

    def assign(self, name: str, *n_bytes: int) -> None:
        """Allocate storages, then free those that the variable had."""
        storages = self._allocated(n_bytes)
        self.drop(name)
        self._held[name] = storages

    def use(self, *n_bytes: int) -> None:
        """Allocate storages and free them immediately."""
        self._free(self._allocated(n_bytes))

    def drop(self, *names: str) -> None:
        """Free what the variables hold."""
        for name in names:
            self._free(self._held.pop(name, {}))

    def drop_all(self) -> None:
        """Free everything, as the end of the function does."""
        self.drop(*self._held)

    def release_gradient(self, position: int, n_bytes: int) -> None:
        """Free the gradient of the tensor at this position. It was allocated before the loop.

        >>> variables = Variables()
        >>> variables.release_gradient(0, 100)
        >>> variables.assign("update", 160)
        >>> variables.events, variables.peak_bytes
        ([(-1, 0), (0, 160)], 60)
        """
        self.events.append((-1 - position, 0))
        self._released_bytes += n_bytes

    def _allocated(self, n_bytes: tuple[int, ...]) -> dict[int, int]:
        storages = {self._count + i: size for i, size in enumerate(n_bytes) if size}
        self._count += len(n_bytes)
        self.events += storages.items()
        added = self.alive + sum(n_bytes) - self._released_bytes
        if added > self._highest_bytes:
            held = (size for each in self._held.values() for size in each.values())
            self._highest, self._highest_bytes = (*held, *n_bytes), added
        return storages

    def _free(self, storages: dict[int, int]) -> None:
        self.events += [(number, 0) for number in storages]
