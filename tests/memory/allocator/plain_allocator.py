"""A second implementation of the caching allocator, with blocks as linked objects and without optimizations. The model is compared with
it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_advisor.memory.allocator import OutOfMemory

MIB = 2**20
ENDLESS = 2**62


@dataclass(eq=False)
class Block:
    stream: int
    size: int
    pool: int
    ptr: int
    prev: Block | None = None
    next: Block | None = None
    allocated: bool = False
    late: bool = False
    mapped: bool = True

    @property
    def allocatable(self) -> bool:
        return not self.allocated and not self.late

    @property
    def order(self) -> tuple[int, int, int]:
        return self.stream, self.size, self.ptr


class PlainAllocator:
    def __init__(self, *, expandable: bool, limit: int, max_split: int = ENDLESS) -> None:
        self.expandable, self.limit, self.max_split = expandable, limit, max_split
        self.free_blocks: list[list[Block]] = [[], []]
        self.unmapped: list[list[Block]] = [[], []]
        self.heads: list[Block] = []
        self.late: list[Block] = []
        self.top, self.reserved, self.retries = 2 * MIB, 0, 0

    def malloc(self, size: int, stream: int) -> Block:
        pool = int(size > MIB)
        block = self.cached(size, stream, pool) or self.new(size, stream, pool)
        if block is None and self.release_oversize(size, stream, pool):
            block = self.new(size, stream, pool)
        if block is None:
            self.release_cached()
            self.retries += 1
            block = self.new(size, stream, pool)
        if block is None:
            raise OutOfMemory(0, size)
        rest = block.size - size
        small = pool == 0 or self.expandable
        if rest >= 512 if small else size < self.max_split and rest > MIB:
            front = Block(stream, size, pool, block.ptr)
            self.put_before(front, block)
            block.ptr, block.size = block.ptr + size, rest
            self.free_blocks[pool].append(block)
            block = front
        block.allocated = True
        return block

    def free(self, block: Block, *, later: bool) -> None:
        block.allocated = False
        if later:
            block.late = True
            self.late.append(block)
        else:
            self.give_back(block)

    def synchronize(self) -> None:
        while self.late:
            block = self.late.pop(0)
            block.late = False
            self.give_back(block)

    def release_cached(self) -> None:
        self.synchronize()
        for pool in (1, 0):
            for block in sorted(self.free_blocks[pool], key=lambda b: b.order):
                if self.expandable:
                    self.unmap(block)
                elif not block.prev and not block.next:
                    self.release(block)

    def layout(self) -> list[tuple[int, tuple[tuple[int, bool], ...]]]:
        result = []
        for head in self.heads:
            stretch: list[Block] = []
            block: Block | None = head
            while block is not None or stretch:
                if block is None or not block.mapped:
                    if stretch:
                        result.append((stretch[0].ptr, tuple((b.size, not b.allocatable) for b in stretch)))
                    stretch = []
                else:
                    stretch.append(block)
                block = block.next if block is not None else None
        return sorted(result)

    # Parts

    def take(self, n_bytes: int) -> bool:
        if self.reserved + n_bytes > self.limit:
            return False
        self.reserved += n_bytes
        return True

    def put_before(self, new: Block, block: Block) -> None:
        new.prev, new.next = block.prev, block
        if new.prev:
            new.prev.next = new
        else:
            self.heads[self.heads.index(block)] = new
        block.prev = new

    @staticmethod
    def put_after(new: Block, block: Block) -> None:
        new.prev, new.next = block, block.next
        if new.next:
            new.next.prev = new
        block.next = new

    def give_back(self, block: Block) -> None:
        self.merge(block, block.prev)
        self.merge(block, block.next)
        self.free_blocks[block.pool].append(block)

    def merge(self, block: Block, other: Block | None) -> None:
        if other is None or not other.allocatable or block.mapped != other.mapped:
            return
        if block.prev is other:
            block.ptr, block.prev = other.ptr, other.prev
            if block.prev:
                block.prev.next = block
            else:
                self.heads[self.heads.index(other)] = block
        else:
            block.next = other.next
            if block.next:
                block.next.prev = block
        block.size += other.size
        (self.free_blocks if other.mapped else self.unmapped)[block.pool].remove(other)

    def cached(self, size: int, stream: int, pool: int) -> Block | None:
        fitting = [b for b in self.free_blocks[pool] if b.stream == stream and b.size >= size]
        fitting.sort(key=lambda b: b.order)

        def room(block: Block) -> int:
            return block.size + (block.next.size if block.next and not block.next.mapped else 0)

        at = 0
        while self.expandable and at + 1 < len(fitting) and room(fitting[at + 1]) < room(fitting[at]):
            at += 1
        if not fitting or size < self.max_split <= fitting[at].size:
            return None
        if size >= self.max_split and fitting[at].size >= size + 20 * MIB:
            return None
        self.free_blocks[pool].remove(fitting[at])
        return fitting[at]

    def new(self, size: int, stream: int, pool: int) -> Block | None:
        if self.expandable:
            return self.new_expandable(size, stream, pool)
        n_bytes = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if not self.take(n_bytes):
            return None
        block = Block(stream, n_bytes, pool, self.top)
        self.top += n_bytes + 2 * MIB
        self.heads.append(block)
        return block

    def new_expandable(self, size: int, stream: int, pool: int) -> Block | None:
        page = 20 * MIB if pool else 2 * MIB
        first: Block | None = None
        for start in sorted((b for b in self.unmapped[pool] if b.stream == stream), key=lambda b: b.ptr):
            begin = start.prev if start.prev and start.prev.allocatable else start
            total, block = 0, begin
            while block and block.allocatable:
                total, block = total + block.size, block.next
            if total >= size:
                first = begin
                break
        if first is None:
            n_bytes = -(-(2**40) // page) * page
            first = Block(stream, n_bytes, pool, self.top, mapped=False)
            self.top += n_bytes + 2 * MIB
            self.unmapped[pool].append(first)
            self.heads.append(first)
        if not first.mapped and not self.map(first, min(first.size, size), page):
            return None
        while first.size < size:
            following = first.next
            assert following is not None
            if not self.map(following, min(size - first.size, following.size), page):
                return None
            first = following
        self.free_blocks[pool].remove(first)
        return first

    def map(self, block: Block, n_bytes: int, page: int) -> bool:
        n_bytes = -(-n_bytes // page) * page
        if not self.take(n_bytes):
            return False
        self.unmapped[block.pool].remove(block)
        if n_bytes < block.size:
            rest = Block(block.stream, block.size - n_bytes, block.pool, block.ptr + n_bytes, mapped=False)
            self.put_after(rest, block)
            self.unmapped[block.pool].append(rest)
            block.size = n_bytes
        block.mapped = True
        self.give_back(block)
        return True

    def unmap(self, block: Block) -> None:
        page = 20 * MIB if block.pool else 2 * MIB
        head = block
        while head.prev:
            head = head.prev
        low = head.ptr + -(-(block.ptr - head.ptr) // page) * page
        high = head.ptr + (block.ptr + block.size - head.ptr) // page * page
        if high <= low:
            return
        self.free_blocks[block.pool].remove(block)
        if low > block.ptr:
            before = Block(block.stream, low - block.ptr, block.pool, block.ptr)
            self.put_before(before, block)
            self.free_blocks[block.pool].append(before)
        if block.ptr + block.size > high:
            behind = Block(block.stream, block.ptr + block.size - high, block.pool, high)
            self.put_after(behind, block)
            self.free_blocks[block.pool].append(behind)
        block.ptr, block.size, block.mapped = low, high - low, False
        self.reserved -= high - low
        self.merge(block, block.prev)
        self.merge(block, block.next)
        self.unmapped[block.pool].append(block)

    def release(self, block: Block) -> None:
        self.free_blocks[block.pool].remove(block)
        self.heads.remove(block)
        self.reserved -= block.size

    def release_oversize(self, size: int, stream: int, pool: int) -> bool:
        if self.max_split == ENDLESS or self.expandable:
            return False
        target = max(size, self.max_split)
        blocks = sorted((b for b in self.free_blocks[pool] if b.stream == stream), key=lambda b: b.order)
        for block in blocks:
            if block.size >= target:
                self.release(block)
                return True
        released = 0
        while released < target and blocks and blocks[-1].size >= self.max_split:
            released += blocks[-1].size
            self.release(blocks.pop())
        return released >= target
