"""The colours and dashes of charts: colour-blind safe, on paper and on a dark page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb, rgb_to_hls
from itertools import count, cycle
from typing import NamedTuple
from zlib import crc32

from .section import Dash

# Okabe and Ito's palette, distinguishable with every common kind of colour blindness.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, BLACK = "#E69F00", "#56B4E9", "#F0E442", "#000000"
GREY = "#7f7f7f"
WHITE, DARK_PAGE = "#ffffff", "#14171c"
"""Backgrounds of figures: paper, and a report's page in dark mode."""

# A prompt is blue, a decode yellow; a batch of both has the mixture of blue and yellow.
KIND_COLOURS = {"prefill": BLUE, "mixed": GREEN, "decode": YELLOW}

_POLICY_COLOURS = {
    **{"sarathi": BLUE, "orca": VERMILION, "request_level": GREEN, "vllm": PURPLE},
    **{"sglang": ORANGE, "trtllm": SKY, "sarathi_serve": "#332288", "fair": BLACK},
}
_OTHER_POLICIES = ("#8c564b", "#882255", "#117733", "#999933")
"""Of users' own policies."""

_LEAST, _MOST = 3.1, 12.0
"""Contrasts of a line with its background, for the first and the last shade of a policy (the first
may be the policy's own colour). WCAG 2 asks for 3."""


class Style(NamedTuple):
    """A line's colour and dash."""

    colour: str
    dash: Dash


# Dashes differ too, for grey-scale prints.
_LINES: tuple[tuple[str, Dash], ...] = (
    (BLUE, "-"),
    (VERMILION, "--"),
    (GREEN, "-."),
    (PURPLE, (0, (1, 1))),
    (ORANGE, (0, (5, 1, 1, 1, 1, 1))),
    (SKY, (0, (8, 2))),
    (BLACK, ":"),
)


def line_styles() -> Iterator[Style]:
    """Colour and dash of one line after the other; the first 49 all differ."""
    for number in count():
        turn, index = divmod(number, len(_LINES))
        dash = _LINES[(index + turn) % len(_LINES)][1]
        yield Style(line_colour(_LINES[index][0]), dash)


def line_colour(colour: str) -> str:
    """The colour, or a darker one in which a line can be seen on white."""
    return _shade(colour, 0, 1)


def policy_colour(policy: str) -> str:
    """The colour of a policy, the same in every figure, a user's after its name; grey for none."""
    if not policy:
        return GREY
    other = _OTHER_POLICIES[crc32(policy.encode()) % len(_OTHER_POLICIES)]
    return _POLICY_COLOURS.get(policy, other)


def policy_styles(policies: Sequence[str]) -> list[Style]:
    """Colour and dash of a line for each of ``policies``, which may name one several times: shades
    of its colour that are seen on white. All differ in dash, so that coinciding ones are seen."""
    colours = [policy_colour(policy) for policy in policies]
    alike, seen = Counter(colours), Counter[str]()
    styles = []
    for colour, (_, dash) in zip(colours, cycle(_LINES), strict=False):
        shade = _shade(colour, seen[colour], alike[colour])
        styles.append(Style(shade, dash))
        seen[colour] += 1
    return styles


def _shade(colour: str, index: int, total: int) -> str:
    """One of ``total`` shades of a colour: the first is the colour itself, or a darker one that
    can be seen on white."""
    first = max(contrast(colour, WHITE), _LEAST)
    last = _MOST if first < _MOST / 2 else _LEAST
    wanted = first * (last / first) ** (index / max(total - 1, 1))
    return _with_luminance(colour, 1.05 / wanted - 0.05)


def dark_colour(colour: str) -> str:
    """The brighter colour for a dark page: its contrast is at least the colour's on a white page,
    and equal to it for a grey."""
    own = _luminance(colour)
    mirrored = (_luminance(DARK_PAGE) + 0.05) * contrast(colour, WHITE) - 0.05
    grey = max(to_rgb(colour)) - min(to_rgb(colour)) < 0.1
    brighter = max(own, min(1.4 * own, 0.6), mirrored)
    return _with_luminance(colour, min(mirrored if grey else brighter, 1.0))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours, as WCAG 2 defines it: 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Black or white: the more legible ink on a colour."""
    return max(BLACK, WHITE, key=lambda ink: contrast(ink, colour))


def to_rgb(colour: str) -> tuple[float, float, float]:
    """Shares of red, green and blue of ``#rrggbb``."""
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def _luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it: 0 to 1."""
    parts = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in to_rgb(colour)]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def _with_luminance(colour: str, wanted: float) -> str:
    if math.isclose(wanted, _luminance(colour), abs_tol=1e-9):
        return colour
    hue, _, saturation = rgb_to_hls(*to_rgb(colour))
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        parts = hls_to_rgb(hue, middle, saturation)
        found = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
        low, high = (middle, high) if _luminance(found) < wanted else (low, middle)
    return found
