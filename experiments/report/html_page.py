"""The file of a report: one HTML page with its scripts, its data and its style in it."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from bokeh.embed import json_item
from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader

from sarathi_sim.profiler.storage.child import Progress, silent
from sarathi_sim.profiler.storage.files import LARGEST_DATA, make_folders, read_bounded, write_whole
from sarathi_sim.profiler.storage.manifest import read_manifest
from sarathi_sim.profiler.storage.strict import UserError
from ..content import Section, enumerated, topic_of
from ..figures.style import DARK_PAGE, dark_colour
from ..results import about_out, resolved
from .charts import described
from .sections import sections_of

_SEAL = re.compile(rb"<!-- sarathi-sim report 1 ([0-9a-f]{64}) -->\n\Z")
_PAGES = Environment(
    loader=PackageLoader("sarathi_sim.experiments.report"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_PAGES.filters["topic"] = topic_of

_PAGE_SCRIPT = "\n" + _PAGES.get_template("page.js").render()


def page(title: str, sections: Sequence[Section]) -> str:
    """The text of the file. Its own policy lets it ask for nothing from outside, and run its own
    scripts only, known by their hashes: none in an attribute."""
    charts, items = [], {}
    for number, section in enumerate(sections):
        places = []
        for index, chart in enumerate(section.charts):
            place = f"chart-{number}-{index}"
            items[place] = json_item(chart.model, place)
            places.append((place, chart, described(chart.model)))
        charts.append(places)
    drawn = json.dumps(items, separators=(",", ":"))
    dark = {colour: dark_colour(colour) for colour in re.findall(r'"(#[0-9a-fA-F]{6})"', drawn)}
    # In Bokeh's own strings, this means the same.
    bokeh = "\n".join(Resources("inline", components=["bokeh"]).js_raw)
    scripts = [bokeh.replace("</script", "<\\/script").replace("<!--", "<\\!--"), _PAGE_SCRIPT]
    text: str = _PAGES.get_template("page.html").render(
        title=title,
        sections=list(zip(sections, charts, strict=True)),
        # No text in JSON can end the script element that it stands in.
        items=drawn.replace("<", "\\u003c") if items else "",
        dark=json.dumps(dict(sorted(dark.items()))),
        dark_page=DARK_PAGE,
        scripts=scripts if items else scripts[-1:],
        hashes=[b64encode(sha256(text.encode()).digest()).decode() for text in scripts],
    )
    return text


def check_report(out: Path) -> Path:
    """The resolved path of ``out``, where a report may be written.

    It must be missing, or a report of ours that nobody changed. Raises UserError otherwise, and
    where it would be a foreign file in a result's folder.
    """
    target = resolved(out)
    if target.is_dir():
        raise UserError(f"--out {out}: is a folder: name a file, such as {out / 'report.html'}")
    for folder in target.parents:
        if read_manifest(folder) is not None:
            raise UserError(
                f"--out {out}: lies in {folder}, which holds a result and only its files: name a "
                "file beside it"
            )
    if not target.exists():
        return target
    content = read_bounded(target, LARGEST_DATA)
    seal = _SEAL.search(content)
    if seal is None:
        raise UserError(
            f"--out {out}: exists and is not a report of ours, so it is not replaced: name "
            "another file"
        )
    if sha256(content[: seal.start()]).hexdigest().encode() != seal[1]:
        raise UserError(
            f"--out {out}: was changed since it was written, so it is not replaced: move it away"
        )
    return target


def write_page(
    folders: Sequence[Path], out: Path, title: str | None = None, progress: Progress = silent
) -> int:
    """Write the report of results to ``out``; returns its size in bytes.

    Raises UserError where a folder is not a result, or ``out`` is not ours to replace; the latter
    before anything is simulated.
    """
    check_report(out)
    sections = sections_of(folders, progress)
    heading = title or enumerated([f"{section.kind} {section.name}" for section in sections])
    return write_report(out, page(heading, sections))


def write_report(out: Path, text: str) -> int:
    """Write the page, whole or not at all, with the seal that tells it from other files.

    Returns its size in bytes. Raises UserError where ``out`` is not ours to replace.
    """
    target = check_report(out)
    with about_out(out):
        make_folders(target.parent)
    body = text.encode()
    content = body + f"<!-- sarathi-sim report 1 {sha256(body).hexdigest()} -->\n".encode()
    with about_out(out):
        write_whole(target, content)
    return len(content)
