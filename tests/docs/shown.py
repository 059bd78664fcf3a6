"""What a page shows beside what was printed.

A shown line is one printed line, perhaps without some of its columns: its words are found in a
printed line in the same order. Dots stand for what is left out.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?")
_FRAME = re.compile(r"[\s│┃─━┏┓┗┛┡┩╇┳┴┬└┘├┤┼]+")
_LEFT_OUT = ("…", "...")


def words(line: str) -> list[str]:
    """Without blanks, the frames of tables, and what ends a clause."""
    found = (word.rstrip(",;:") for word in _FRAME.split(line))
    return [word for word in found if word and word not in _LEFT_OUT]


def _skeleton(line: str) -> list[str]:
    return [NUMBER.sub("#", word) for word in words(line)]


def within(few: list[str], many: list[str]) -> bool:
    """Whether ``few`` are found in ``many`` in the same order."""
    rest = iter(many)
    return all(word in rest for word in few)


def not_printed(shown: list[str], printed: list[str]) -> list[str]:
    """The shown lines that no command printed, each with the line printed that is like it."""
    found = []
    split = [words(line) for line in printed]
    for line in shown:
        if not any(within(words(line), each) for each in split):
            like = [each for each in printed if within(_skeleton(line), _skeleton(each))]
            said = f"; printed was: {' '.join(words(like[0]))}" if like else "; nothing like it was"
            found.append(f"shown is: {' '.join(words(line))}{said}")
    return found


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """The shown lines with the numbers that were printed, where a printed line has the same words
    (with its columns all shown); others as they are."""
    left = list(printed)
    lines = []
    for line in shown:
        same = [each for each in left if within(words(line), words(each))]
        like = same or [each for each in left if _skeleton(each) == _skeleton(line) and words(line)]
        if like:
            left.remove(like[0])
        lines.append(line if same or not like else _with_numbers(line, like[0]))
    return lines


def _with_numbers(line: str, printed: str) -> str:
    numbers = iter(NUMBER.findall(" ".join(words(printed))))
    return NUMBER.sub(lambda old: next(numbers).rjust(len(old[0])), line)


def numbers_not_printed(text: str, printed: str) -> list[str]:
    """The numbers of a text that are none of the printed ones, rounded as the text rounds them."""
    known = [number.replace(",", "").lstrip("+") for number in NUMBER.findall(printed)]
    found = []
    for number in NUMBER.findall(text):
        plain = number.replace(",", "").lstrip("+")
        digits = len(plain.partition(".")[2])
        if plain not in known and not any(
            len(each.partition(".")[2]) > digits and f"{float(each):.{digits}f}" == plain
            for each in known
        ):
            found.append(number)
    return found
