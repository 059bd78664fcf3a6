"""Values that no one should write, in the words of YAML, JSON and CSV."""

from __future__ import annotations

from random import Random

#: Names in the box of a case that are no plain files: see :mod:`tests.hostile.box`.
ODD_PATHS = (
    *("loop", "pipe", "mine", "mine/notes.txt", "nowhere/at/all", "dangling", "locked.txt", "~"),
    *("~/x", "~nosuch/x", "~root", "$HOME/x", ".", "..", "", " ", "x" * 300, "x/" * 3000),
    *("/dev/zero", "/dev/null", "/proc/self/mem", "/proc/self/fd", "exp.yaml/below", "hf"),
    "é\u202e名",
)

_NUMBERS = (
    *("0", "-0.0", "-1", "1", "2", "7", "0.5", "1.5", "1.0", "1e-5", "1e-320", "1.0e-300"),
    *("1.0e-12", "1000", "4096", "65536", "10000000", "16777216", "1.0e+9", "1.0e+12", "1.0e+308"),
    *("1e400", "-.inf", ".inf", ".nan", str(2**31), str(2**63), str(2**64), str(10**21), "9" * 400),
    *("9" * 5000, "1" + "0" * 30 + ".5"),
)
_ODD_YAML = (
    *("1:30", "1:30:15.5", "0o17", "0x1F", "017", "0b101", "1_000", "1,000", "+1", "1.", ".5"),
    *("1e", "null", "~", "", "''", "' '", '"\\0"', '"a\\0b"', '"\\ud800"', '"\\x07"', "é"),
    *("名\u202e", "\ufeff", "true", "yes", "off", "y", "2024-01-01", "2024-01-01 10:00:00Z"),
    *("2024-99-99", "=", "<<", "[]", "{}", "[[]]", "[1, 2]", "{a: 1}", "{1: 2}", "{null: 1}"),
    *("{[a]: 1}", "{a: 1, a: 2}", "|\n  text\n", ">-\n  text\n", "- a\n- b", "@x", "`x", "%x", "&"),
    *("*", "!", "? a\n: b", "'open", "*nowhere", "&a 5", "&a [*a]", "&a {b: *a}", "[&a 1, *a]"),
    *("{<<: {a: 1}}", "{<<: 5}", "{<<: [1]}", "!!bool foo", "!!timestamp foo", "!!map [a, b]"),
    *("!!set [a]", "!!int ''", "!!int '-'", "!!float ''", "!!float x", "!!binary '@@'"),
    *("!!binary é", "!!omap [a]", "!!omap {a: 1}", "!!pairs [a]", "!!null x", "!!str [a]"),
    *("!!seq {a: 1}", "!!map 5", "!!int 5", "!!str 5", "!!merge x", "!!value x", "!!int 1:30"),
    *("!!int 0b", "!!int 0x", "!!float 1:2:x", "!!int [1]", "!!set {a, b}", "!foo bar"),
    *("!!python/object/apply:os.system ['touch pwned']", "!!python/name:os.system", "!<x> y"),
    *("!!x", "!<tag:yaml.org,2002:int> ''", "{from: 1, to: 2, step: 1.0e-320}"),
    *("{from: 5, to: 5, num: 3}", "{from: 0, to: 1.0e+308, num: 5}"),
    *("{from: 0, to: 1.0e+308, step: 1}", "{from: 1, to: 9, num: 100000}"),
    *("{kind: trace, path: trace.csv}", "{kind: trace, path: /dev/zero}"),
    *("{kind: trace, path: pipe}", "{kind: gamma, rate: 1, cv: 1.0e-300}"),
    *("{kind: gamma, rate: 1, cv: 1000}", "{kind: poisson, rate: 1.0e-300}"),
    *("{name: sarathi, chunk_size: 16777216}", "{name: orca, case: 5}"),
    "{file: exp.yaml, name: x}",
)


def yaml_value(rng: Random) -> str:
    """A value as it stands in a YAML file: now and then nested deeply, or aliased without end."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(_NUMBERS)
    if kind < 0.75:
        return rng.choice(_ODD_YAML)
    if kind < 0.9:
        return f"'{rng.choice(ODD_PATHS)}'"
    if kind < 0.96:
        depth = rng.choice((10, 200, 2000, 100_000))
        opened, closed = rng.choice((("[", "]"), ("{a: ", "}"), ("[{b: ", "}]")))
        return opened * depth + "1" + closed * rng.choice((depth, depth - 1))
    return laughs(rng.choice((3, 8, 40)))


def laughs(levels: int) -> str:
    """Aliases of aliases: a few hundred bytes that stand for 9 to the power ``levels`` values."""
    parts = ["&a0 [x, x, x, x, x, x, x, x, x]"]
    parts += [f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return f"[{', '.join(parts)}]"


_ODD_JSON = (
    *("null", "true", "[]", "{}", "[1]", '{"a": 1}', '""', '"x"', "'x'", "", "01", "8", "64"),
    *('"\\ud800"', '"a\\u0000b"', '"é"', '"\x00"', '"' + "x" * 10000 + '"', '"4096"', '"gelu"'),
    *('"silu"', '"yarn"', '["full_attention"]', '{"type": "linear"}'),
)
_JSON_NUMBERS = (*_NUMBERS, "1" + "0" * 400, "1" + "0" * 4400, "1e1000", "NaN", "-Infinity", "1.0")


def json_value(rng: Random) -> str:
    """A value as it stands in a JSON file, or should not."""
    kind = rng.random()
    if kind < 0.85:
        return rng.choice(_JSON_NUMBERS if kind < 0.35 else _ODD_JSON)
    depth = rng.choice((10, 900, 2000, 100_000))
    opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
    return opened * depth + "1" + closed * rng.choice((depth, depth - 1))


def cell(rng: Random) -> str:
    """One cell of a CSV file."""
    odd = (
        *("", " ", "nan", "inf", "-inf", "NaN", "NULL", "None", "x", "1.5", "1e3", "0x10", "1_000"),
        *("٣", '"', '"1"', '"1\n2"', "1,2", "\x00", "'1'", "1:30", "+5", " 5 ", "5.", "1e-320"),
        *("1e308", "é", "2024-01-01", "2024-01-01 00:00:00.123", "=1+1", "9" * 5000),
        *("0" * 5000 + "7", "\ud800", "\r"),
    )
    return rng.choice((*odd, *_NUMBERS))
