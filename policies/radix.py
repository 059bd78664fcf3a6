"""SGLang's prefix cache: a radix tree whose nodes hold runs of pages.

Source: SGLang 0.5.23, ``sglang/srt/mem_cache/unified_radix_cache.py`` and
``unified_cache/unified_tree_core.py``. A request's pages enter the tree when they are computed. If
another request has entered the same tokens meanwhile, its own pages are given back. A node that a
running request begins with is locked. Of the others, leaves are evicted as a whole, those first
that were used longest ago.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from .kv import Block, Blocks
from .request import Sequence

_PAGE = Block()


@dataclass(eq=False, slots=True)
class Node:
    """Pages ``start`` to ``end`` of every sequence that agrees with ``key`` so far.

    ``locks`` is the number of running sequences that begin with it, ``used`` grows with every use.
    """

    parent: Node | None
    key: Sequence
    start: int
    end: int
    locks: int = 0
    used: int = 0
    children: dict[Hashable, Node] = field(default_factory=dict)


class RadixBlocks(Blocks):
    """A paged KV cache whose pages are found again in a radix tree.

    ``free`` counts the pages that nobody uses: the ``blank`` ones, and those that can be evicted.
    """

    caching = True
    late = True

    def __init__(self, num_blocks: int, block_size: int, state_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, state_blocks)
        self._root = Node(None, Sequence(-1, 1, 1, 0), 0, 0)
        self._ends: dict[Sequence, Node] = {}  # what a running sequence locks ends with this
        self._found = self._root  # by the last lookup
        self._evictable = 0
        self._nodes = 0
        self._uses = 0
        # Leaves that could be evicted when they were used, the one used longest ago first.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def blank(self) -> int:
        """Pages that hold nothing."""
        return self.free - self._evictable

    def preload(self, sequence: Sequence) -> None:
        """Note the full pages of the sequence's prompt as cached, if so many are blank."""
        full = sequence.prompt_tokens // self.block_size
        if full <= self.blank:
            node, matched = self._insert(sequence, full, self._root)
            self.free -= node.end - matched
            self._note(node)

    def lookup(self, sequence: Sequence) -> tuple[Block, ...]:
        """The cached pages with which the sequence begins, its last token left out."""
        self._found = self._match(sequence, (sequence.target - 1) // self.block_size)
        return (_PAGE,) * self._found.end

    def touch(self, sequence: Sequence) -> int:
        """Use what is cached of the sequence; returns how many tokens that is."""
        return self._match(sequence, sequence.target // self.block_size).end * self.block_size

    def need(self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = ()) -> int:
        """Free pages it takes: new ones, and hits (those found last) that nobody has locked."""
        if not hits:
            return Blocks.need(self, sequence, tokens)
        unlocked = sum(node.end - node.start for node in path(self._found) if not node.locks)
        return max(self.blocks(tokens) - len(hits), 0) + unlocked

    def take(
        self, sequence: Sequence, tokens: int, hits: tuple[Block, ...] = (), known: int = 0
    ) -> None:
        """Give the sequence the hits (those found last), and new pages up to ``tokens`` tokens."""
        if sequence not in self._ends:
            node = self._ends[sequence] = self._found if hits else self._root
            self._lock(node)
            sequence.held = len(hits) * self.block_size
        Blocks.take(self, sequence, tokens)

    def reserve(self, pages: int) -> None:
        """Evict until so many pages are blank, or none can be evicted."""
        while self.free - self._evictable < pages and self._evictable:
            used, _, node = heappop(self._leaves)
            if used == node.used and not node.locks and not node.children and node.parent:
                self._evict(node, node.parent)

    def _evict(self, node: Node, parent: Node) -> None:
        del parent.children[node.key.content(node.start, self.block_size)]
        self._evictable -= node.end - node.start
        self._nodes -= 1
        node.parent = None
        self._note(parent)

    def computed(self, sequence: Sequence, tokens: int) -> None:
        """Enter the full pages of the sequence's first ``tokens`` tokens."""
        before = self._ends[sequence]
        self._enter(sequence, tokens)
        self._lock(self._ends[sequence])
        self._lock(before, -1)

    def _enter(self, sequence: Sequence, tokens: int) -> None:
        pages, prompt = tokens // self.block_size, sequence.prompt_tokens // self.block_size
        before = self._ends[sequence]
        node, matched = self._insert(sequence, pages, before)
        if matched > before.end:
            self.free += matched - before.end  # its own copies
        if before.end < prompt < pages:
            self._insert(sequence, prompt, before)  # (splits what was entered)
        self._ends[sequence] = node

    def release(self, sequence: Sequence, tokens: int, known: int, again: bool) -> None:
        """Take back a sequence's pages; if it has ended, what it computed stays in the tree. Its
        last token has no KV, unless it was processed in vain."""
        locked = self._ends[sequence]
        if not again:
            self._enter(sequence, min(tokens, known + 1))
            self._note(self._ends[sequence])
        self._give_back(sequence, self.blocks(tokens))
        self._lock(locked, -1)
        sequence.held = 0

    def _give_back(self, sequence: Sequence, pages: int) -> None:
        """Take back those of the sequence's pages that are not in the tree."""
        self.free += pages - self._ends.pop(sequence).end

    # The tree ------------------------------------------------------------------------------------

    def _match(self, sequence: Sequence, pages: int) -> Node:
        """The node that the sequence's first pages end with, as far as they are cached."""
        if sequence.order < 0 and sequence.shared_tokens < self.block_size:
            return self._root  # it never ran, and shares no page
        node = self._walk(sequence, pages, self._root)
        for each in reversed(path(node)):
            self._use(each)
        return node

    def _insert(self, sequence: Sequence, pages: int, begin: Node) -> tuple[Node, int]:
        """The node that the sequence's first pages end with, and how many of them were there."""
        for each in reversed(path(begin)):
            self._use(each)
        node = self._walk(sequence, pages, begin, self._use)
        matched = node.end
        return node if matched == pages else self._grown(node, sequence, pages), matched

    def _walk(
        self,
        sequence: Sequence,
        pages: int,
        node: Node,
        seen: Callable[[Node], None] = lambda node: None,
    ) -> Node:
        """As far as the sequence's first pages are in the tree, from a node of theirs on; the last
        node is split there."""
        while node.end < pages:
            child = node.children.get(sequence.content(node.end, self.block_size))
            if child is None:
                break
            seen(child)
            until = min(common_tokens(sequence, child.key) // self.block_size, child.end, pages)
            node = self._split(child, until) if until < child.end else child
        return node

    def _grown(self, parent: Node, sequence: Sequence, pages: int) -> Node:
        node = Node(parent, sequence, parent.end, pages)
        parent.children[sequence.content(parent.end, self.block_size)] = node
        self._nodes += 1
        self._evictable += pages - parent.end
        self.free += pages - parent.end
        self._uses += 1
        node.used = self._uses
        return node

    def _split(self, node: Node, until: int) -> Node:
        """Cut a node in two; returns the first of both."""
        parent, key = node.parent, node.key
        assert parent is not None
        upper = Node(parent, key, node.start, until, node.locks)
        parent.children[key.content(node.start, self.block_size)] = upper
        upper.children[key.content(until, self.block_size)] = node
        node.parent, node.start = upper, until
        self._nodes += 1
        self._use(upper)
        self._use(node)
        return upper

    def _use(self, node: Node) -> None:
        self._uses += 1
        node.used = self._uses
        if not node.locks:
            self._note(node)

    def _note(self, node: Node) -> None:
        """Let a node be evicted from now on, if it is an unlocked leaf."""
        if node.locks or node.children or node.parent is None:
            return
        leaves = self._leaves
        if len(leaves) > 2 * self._nodes + 64:  # without those that are used again, or gone
            current = (each for each in leaves if each[0] == each[2].used and each[2].parent)
            leaves[:] = {id(each[2]): each for each in current}.values()
            heapify(leaves)
        heappush(leaves, (node.used, id(node), node))

    def _lock(self, node: Node, by: int = 1) -> None:
        """Lock a node and those above it once more (or less, with ``by`` -1)."""
        while (parent := node.parent) is not None:
            before, node.locks = node.locks, node.locks + by
            if not (before and node.locks):
                self._evictable -= by * (node.end - node.start)
                self.free -= by * (node.end - node.start)
                if not node.locks:
                    self._note(node)
            node = parent


def path(node: Node) -> list[Node]:
    """A node and those above it, without the root."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found


def common_tokens(one: Sequence, other: Sequence) -> int:
    """The tokens in which two sequences agree, by the names of their prefixes."""
    if one is other:
        return 1 << 40
    until = dict(other.prefix)
    return max((min(end, until[name]) for name, end in one.prefix if name in until), default=0)
