"""Which slots of a pool are free: ranges, handed out first fit, joined when they come back."""

from bisect import bisect_left

from ..core.errors import ConfigError


class Extents:
    """The free ranges of ``size`` slots, ascending, no two of which touch.

    >>> pool = Extents(10)
    >>> pool.allocate(4), pool.allocate(5), pool.allocate(2)
    (0, 4, None)
    >>> pool.free(0, 4)
    >>> pool.allocate(2), pool.used
    (0, 7)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (first, one past last)

    @property
    def used(self) -> int:
        return self.size - sum(end - first for first, end in self._free)

    def allocate(self, n: int) -> int | None:
        """The first slot of ``n`` free ones in a row, which are taken now; None without room."""
        if n < 1:
            raise ConfigError(f"an extent has at least one slot, not {n}")
        for i, (first, end) in enumerate(self._free):
            if end - first >= n:
                self._free[i : i + 1] = [(first + n, end)] if end - first > n else []
                return first
        return None

    def extend(self, base: int, n: int, size: int) -> bool:
        """Make ``n`` slots from ``base`` on a range of ``size``, if what follows them is free."""
        end, wanted = base + n, base + size
        at = bisect_left(self._free, (end, 0))
        if at == len(self._free) or self._free[at][0] != end or self._free[at][1] < wanted:
            return False
        _, last = self._free[at]
        self._free[at : at + 1] = [(wanted, last)] if last > wanted else []
        return True

    def reallocate(self, base: int, n: int, size: int) -> int | None:
        """`allocate` ``size`` slots for the owner of ``n`` from ``base`` on, in place of these and
        perhaps over them; None without room, and then the owner keeps what it has."""
        before = list(self._free)
        self.free(base, n)
        new = self.allocate(size)
        if new is None:
            self._free = before
        return new

    def free(self, base: int, n: int) -> None:
        end = base + n
        at = bisect_left(self._free, (base, end))
        before, after = self._free[at - 1 : at] if at else [], self._free[at : at + 1]
        overlaps = (before and before[0][1] > base) or (after and after[0][0] < end)
        if n < 1 or base < 0 or end > self.size or overlaps:
            raise ConfigError(f"slots {base} to {end - 1} are not taken: they cannot be given back")
        low, high = at, at
        if before and before[0][1] == base:
            base, low = before[0][0], at - 1
        if after and after[0][0] == end:
            end, high = after[0][1], at + 1
        self._free[low:high] = [(base, end)]

    def grow(self, size: int) -> None:
        old, self.size = self.size, size
        if self._free and self._free[-1][1] == old:
            self._free[-1] = (self._free[-1][0], size)
        else:
            self._free.append((old, size))
