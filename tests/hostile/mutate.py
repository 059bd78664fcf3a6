"""Valid files made hostile: their bytes, their lines, their trees and their tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import yaml

from tests.hostile.values import ODD_PATHS, cell, json_value, yaml_value

_BYTES = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\n", b"\t", b" ", b"\r", b":", b"- ", b"&", b"*", b"!"),
    *(b"!!", b"{", b"}", b"[", b"]", b"#", b"'", b'"', b",", b"|", b"%", b"\xef\xbb\xbf"),
    *("é".encode(), b"9", b"e", b"-"),
)
_KEYS = (
    *("", "x", "<<", "1", "null", "true", "1:30", "!!int ''", "!!bool foo", "é", "name", "model"),
    "from",
)
_HF_KEYS = (
    *("sliding_window", "use_sliding_window", "num_local_experts", "num_experts", "kv_lora_rank"),
    *("mlp_bias", "quantization_config", "hidden_act", "layer_types", "rope_scaling", "head_dim"),
    *("num_experts_per_tok", "text_config", "torch_dtype", "n_inner", "partial_rotary_factor", "x"),
)


def damaged_bytes(content: bytes, rng: Random) -> bytes:
    """One to four places cut, doubled, swapped, overwritten, or the whole in another encoding."""
    if rng.random() < 0.1:
        text = content.decode("utf-8", "replace")
        ends = [content.replace(b"\n", end) for end in (b"\r\n", b"\r")]
        cut = content[: rng.randrange(len(content) + 1)]
        other = (b"", b"\x00" * 100, text.encode("utf-16"), content * 3, content.rstrip(b"\n"), cut)
        return rng.choice((*other, *ends, b"\xef\xbb\xbf" + content, b"PAR1" + content))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        cut = rng.choice((0, 0, 1, 2, 8))
        content = content[:at] + rng.choice(_BYTES) * rng.choice((1, 1, 1, 3)) + content[at + cut :]
    return content


def damaged_lines(content: bytes, rng: Random) -> bytes:
    """Lines dropped, doubled, moved, or indented otherwise."""
    lines = content.splitlines(keepends=True)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(lines) or 1)
        line = lines[at] if lines else b""
        first = lines[:1]
        others = ((line, line), (b"  " + line,), (line.lstrip(),), (line, *first), (b"\t" + line,))
        lines[at : at + 1] = rng.choice(((), *others))
    return b"".join(lines)


Path = tuple[Any, ...]


def _paths(tree: Any, at: Path = ()) -> list[Path]:
    found = [at]
    items: Any = tree.items() if isinstance(tree, dict) else ()
    items = enumerate(tree) if isinstance(tree, list) else items
    for key, value in items:
        found += _paths(value, (*at, key))
    return found


def _damaged_tree(
    tree: Any, rng: Random, value: Callable[[Random], str], dump: Callable[[Any], str], quote: str
) -> str:
    """``tree`` with a few of its values, keys or branches replaced by text that ``value`` makes."""
    raw: dict[str, str] = {}

    def slot(text: str) -> str:
        name = f"SLOT{len(raw)}SLOT"
        raw[quote + name + quote] = text
        return name

    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(_paths(tree))
        if not path:
            if rng.random() < 0.1:
                tree = slot(value(rng))
            continue
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        if not isinstance(parent, dict | list):
            continue
        change = rng.random()
        old = parent[path[-1]]
        if isinstance(old, int | float) and rng.random() < 0.5:
            parent[path[-1]] = _nearby(old, rng)
        elif change < 0.65 or isinstance(parent, list):
            parent[path[-1]] = slot(value(rng))
        elif change < 0.8:
            del parent[path[-1]]
        else:
            old = parent.pop(path[-1]) if rng.random() < 0.5 else 1
            parent[slot(quote + rng.choice(_KEYS) + quote if quote else rng.choice(_KEYS))] = old
    text = dump(tree)
    for name, replacement in raw.items():
        text = text.replace(name, replacement, 1)
    return text


def _nearby(number: float, rng: Random) -> float:
    """Another number of the same type, which may well be allowed."""
    if isinstance(number, bool):
        return not number
    other = number * rng.choice((-1, 0, 0.01, 0.1, 0.5, 2, 3, 10, 100)) + rng.choice((0, 0, 1, -1))
    return type(number)(other)


def damaged_yaml(content: bytes, rng: Random) -> bytes:
    kind = rng.random()
    if kind < 0.15:
        return damaged_bytes(content, rng)
    if kind < 0.25:
        return damaged_lines(content, rng)

    def dump(tree: Any) -> str:
        return yaml.safe_dump(
            tree, sort_keys=False, default_flow_style=rng.random() < 0.2, width=10**9
        )

    text = _damaged_tree(yaml.safe_load(content), rng, yaml_value, dump, "")
    return text.encode("utf-8", "surrogatepass")


def damaged_json(content: bytes, rng: Random, keys: tuple[str, ...] = _HF_KEYS) -> bytes:
    """A JSON file with wrong bytes, keys or values, or with keys that it did not have."""
    if rng.random() < 0.15:
        return damaged_bytes(content, rng)
    tree = json.loads(content)
    if isinstance(tree, dict) and rng.random() < 0.3:
        tree[rng.choice(keys)] = rng.choice(
            (None, True, False, 0, 1, 8, 4096, "x", [], {}, [1], {"a": 1})
        )
    text = _damaged_tree(tree, rng, json_value, json.dumps, '"')
    return text.encode("utf-8", "surrogatepass")


def damaged_json_lines(content: bytes, rng: Random) -> bytes:
    """JSON Lines of which one is damaged, dropped, doubled or moved."""
    if rng.random() < 0.2:
        return damaged_lines(content, rng)
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = damaged_json(lines[at], rng, ("timestamp", "input_length", "hash_ids"))
    return b"\n".join(lines) + b"\n"


def damaged_csv(content: bytes, rng: Random) -> bytes:
    """A table with wrong bytes, lines, cells or columns, or with a whole column of another size."""
    kind = rng.random()
    if kind < 0.15:
        return damaged_bytes(content, rng)
    if kind < 0.3:
        return damaged_lines(content, rng)
    rows = [line.split(",") for line in content.decode("utf-8").splitlines()]
    column = rng.randrange(len(rows[0]))
    if kind < 0.7:
        for _ in range(rng.randint(1, 3)):
            rng.choice(rows)[column] = cell(rng)
    elif kind < 0.8:
        new = cell(rng)
        rows[1:] = [[*row[:column], new, *row[column + 1 :]] for row in rows[1:]]
    elif kind < 0.9:
        factor = rng.choice((1e-9, 1e-3, 10.0, 1e6, 1e300, -1.0, 0.0))
        for row in rows[1:]:
            number = float(row[column]) if row[column].replace(".", "", 1).isdigit() else 1.0
            row[column] = f"{number * factor:g}"
    else:
        kind, (head, *body) = rng.choice(("without", "twice", "shuffled")), rows
        rng.shuffle(body)
        for row in rows if kind != "shuffled" else ():
            if kind == "twice":
                row.insert(rng.randrange(len(row) + 1), row[column])
            else:
                del row[column]
        rows = [head, *body] if kind == "shuffled" else rows
    return ("\n".join(map(",".join, rows)) + "\n").encode("utf-8", "surrogatepass")


def odd_path(rng: Random) -> str:
    """A path that is no plain file: a folder, a pipe, a loop of links, a device, a home."""
    return rng.choice(ODD_PATHS)
