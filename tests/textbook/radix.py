"""SGLang's radix tree as a textbook would write it: every token in a list, every node looked at."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from sarathi_sim.policies.request import Sequence
from tests.textbook.blocks import TextbookBlock, TextbookBlocks

Page = tuple[Hashable, ...]


def pages_of(sequence: Sequence, tokens: int, size: int) -> list[Page]:
    """The full pages of a sequence's first tokens: each token with its place, and whose it is."""
    named: list[Hashable] = []
    for place in range(tokens // size * size):
        names = [name for name, until in sequence.prefix if place < until]
        named.append((names[0] if names else sequence, place))
    return [tuple(named[i : i + size]) for i in range(0, len(named), size)]


@dataclass(eq=False)
class TextbookNode:
    """A run of pages after those of its parent."""

    pages: list[Page]
    parent: TextbookNode | None
    locks: int = 0
    used: int = 0
    children: list[TextbookNode] = field(default_factory=list)


class TextbookRadix(TextbookBlocks):
    """A paged KV cache with a radix tree: ``unused`` pages, those of the tree, and those of each
    sequence's table that are not in the tree."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size, caching=True)
        self.unused = self.capacity
        self.root = TextbookNode([], None)
        self.ends: dict[Sequence, TextbookNode] = {}
        self.clock = 0

    @property
    def blank(self) -> int:
        return self.unused

    @property
    def nodes(self) -> list[TextbookNode]:
        """All but the root."""
        found, rest = [], list(self.root.children)
        while rest:
            found.append(rest.pop())
            rest += found[-1].children
        return found

    @property
    def free(self) -> int:
        return self.unused + sum(len(node.pages) for node in self.nodes if not node.locks)

    def path(self, node: TextbookNode) -> list[TextbookNode]:
        return [] if node.parent is None else [*self.path(node.parent), node]

    def length(self, node: TextbookNode) -> int:
        return sum(len(each.pages) for each in self.path(node))

    def use(self, node: TextbookNode) -> None:
        self.clock += 1
        node.used = self.clock

    def walk(self, pages: list[Page], *, inserting: bool) -> TextbookNode:
        """The node that the longest cached beginning of these pages ends with."""
        node, rest = self.root, pages
        while rest:
            child = next((each for each in node.children if each.pages[0] == rest[0]), None)
            if child is None:
                break
            if inserting:
                self.use(child)
            same = 0
            while same < min(len(child.pages), len(rest)) and child.pages[same] == rest[same]:
                same += 1
            if same < len(child.pages):
                upper = TextbookNode(child.pages[:same], node, child.locks, 0, [child])
                node.children[node.children.index(child)] = upper
                child.parent, child.pages = upper, child.pages[same:]
                self.use(upper)
                self.use(child)
                child = upper
            node, rest = child, rest[same:]
        if not inserting:
            for each in self.path(node):
                self.use(each)
        return node

    def insert(self, pages: list[Page]) -> tuple[TextbookNode, int]:
        node = self.walk(pages, inserting=True)
        cached = self.length(node)
        if cached < len(pages):
            new = TextbookNode(pages[cached:], node)
            node.children.append(new)
            self.use(new)
            node = new
        return node, cached

    def lookup(self, sequence: Sequence) -> tuple[TextbookBlock, ...]:
        pages = pages_of(sequence, sequence.target - 1, self.block_size)
        return (TextbookBlock(),) * self.length(self.walk(pages, inserting=False))

    def touch(self, sequence: Sequence) -> int:
        pages = pages_of(sequence, sequence.target, self.block_size)
        return self.length(self.walk(pages, inserting=False)) * self.block_size

    def need(self, sequence: Sequence, tokens: int, hits: tuple[TextbookBlock, ...] = ()) -> int:
        held = len(self.tables.get(sequence, ())) or len(hits)
        return max(self.blocks(tokens) - held, 0) + sum(
            len(node.pages) for node in self.path(self.hit(sequence, len(hits))) if not node.locks
        )

    def hit(self, sequence: Sequence, pages: int) -> TextbookNode:
        """The node with which the sequence's first pages end; no use of it."""
        node, wanted = self.root, pages_of(sequence, pages * self.block_size, self.block_size)
        while wanted:
            node = next(each for each in node.children if each.pages[0] == wanted[0])
            wanted = wanted[len(node.pages) :]
        return node

    def take(self, sequence: Sequence, tokens: int, hits: tuple[TextbookBlock, ...] = ()) -> None:
        if sequence not in self.tables:
            self.tables[sequence] = list(hits)
            self.ends[sequence] = self.hit(sequence, len(hits))
            for node in self.path(self.ends[sequence]):
                node.locks += 1
        table = self.tables[sequence]
        while len(table) < self.blocks(tokens):
            table.append(TextbookBlock())
            self.unused -= 1

    def reserve(self, pages: int) -> None:
        while self.unused < pages:
            leaves = [each for each in self.nodes if not each.children and not each.locks]
            if not leaves:
                return
            oldest = min(leaves, key=lambda each: each.used)
            assert oldest.parent is not None
            oldest.parent.children.remove(oldest)
            self.unused += len(oldest.pages)

    def enter(self, sequence: Sequence, tokens: int) -> None:
        """Nothing is found before it has been computed."""

    def computed(self, sequence: Sequence, tokens: int) -> None:
        old = self.ends[sequence]
        before = self.length(old)
        node, cached = self.insert(pages_of(sequence, tokens, self.block_size))
        self.unused += max(cached - before, 0)
        self.insert(pages_of(sequence, min(sequence.prompt_tokens, tokens), self.block_size))
        for each in self.path(node):
            each.locks += 1
        for each in self.path(old):
            each.locks -= 1
        self.ends[sequence] = node

    def release(self, sequence: Sequence) -> None:
        node = self.ends.pop(sequence)
        self.unused += len(self.tables.pop(sequence)) - self.length(node)
        for each in self.path(node):
            each.locks -= 1

    def check(self) -> None:
        """Every page is blank, in the tree, or a sequence's own; locks are those of sequences."""
        own = sum(len(self.tables[each]) - self.length(end) for each, end in self.ends.items())
        assert self.unused >= 0
        assert self.unused + sum(len(node.pages) for node in self.nodes) + own == self.capacity
        for node in self.nodes:
            assert node.locks == sum(node in self.path(end) for end in self.ends.values())
