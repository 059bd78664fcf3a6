"""Fit a few constants per device to some of the paper's numbers.

``python -m sarathi_sim.experiments.paper.constants`` writes ``data/paper/calibration.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sarathi_sim.experiments.paper.claims import load_claims
from sarathi_sim.experiments.paper.variants import Constants, Lab
from sarathi_sim.profiler.storage.files import data_dir, write_whole
from sarathi_sim.profiler.storage.plain_yaml import dump_yaml
from sarathi_sim.profiler.storage.threads import default_to_one_thread
from sarathi_sim.simulator.loop.records import Floats


@dataclass(frozen=True)
class Target:
    """Which constants of a device are fitted, to which claims, and which of the others follow."""

    start: Mapping[str, float]
    claims: Sequence[str]
    follow: Sequence[str] = ()


# One layer's extra for mixed batches cannot be had from Table 2, where the mixed batch's linear
# ops are faster than the prefill's of as many rows; hence one row of Table 4.
TARGETS: dict[str, Target] = {
    "a6000": Target(
        start={
            "read": 1.0,
            "compute": 1.0,
            "p": 2.0,
            "attn_prefill": 1.0,
            "attn_decode": 1.0,
            "mixed_us": 20.0,
        },
        claims=(
            "decode4_linear",
            "prefill1024_linear",
            "tile_128",
            "tile_256",
            "tile_257",
            "prefill1024_attn",
            "decode4_attn",
            "peak_13b_1k_decode",
        ),
        # The mixed batch counts, too: its ops are the other two's at nearly the same sizes.
        follow=(
            "tile_growth_256",
            "tile_growth_257",
            "prefill1024_per_token",
            "piggybacked_decode_gain",
            "prefill1024_total",
            "decode4_total",
            "decode4_per_token",
            "mixed_linear",
            "mixed_attn",
            "mixed_total",
            "mixed_decode_per_token",
        ),
    ),
    # The paper gives no times for the A100, and public measurements hold its GEMMs: what is left to
    # fit is the mixed batch's extra.
    "a100-80g-sxm": Target(
        start={"mixed_us": 50.0}, claims=("peak_33b_1k_decode", "peak_33b_2k_decode")
    ),
}
_BOUNDS = {"mixed_us": (0.0, 200.0), "p": (1.1, 20.0)}
_FACTOR = (0.5, 2.0)

_HEADER = """\
# Constants fitted to numbers of the Sarathi paper (data/paper/claims.yaml), for the variant
# paper-calibrated. Written by `python -m sarathi_sim.experiments.paper.constants`; variants.py says
# what each one means. `follow` are claims that are sums, differences or quotients of fitted
# ones, or of the same ops at nearly the same sizes.
"""


def fit_device(device: str, target: Target) -> Constants:
    """Least squares over the logarithms of ours / paper's."""
    from scipy.optimize import least_squares

    claims = [load_claims()[id] for id in target.claims]
    names = list(target.start)

    def miss(x: Floats) -> Floats:
        constants = Constants(**dict(zip(names, x.tolist(), strict=True)))
        lab = Lab("paper-calibrated", {device: constants})
        ratios = [claim.value(lab) / claim.paper for claim in claims]
        return np.log(np.array(ratios, np.float64))

    start = np.array(list(target.start.values()))
    low, high = np.array([_BOUNDS.get(name, _FACTOR) for name in names]).T
    found = least_squares(miss, start, bounds=(low, high), x_scale=start, diff_step=1e-3)
    # Four digits are more than the paper's numbers hold.
    return Constants(**{n: float(f"{v:.4g}") for n, v in zip(names, found.x, strict=True)})


def fit() -> dict[str, Any]:
    """The content of ``calibration.yaml``."""
    return {
        "devices": {
            device: {
                "constants": asdict(fit_device(device, target)),
                "fitted_to": list(target.claims),
                "follow": list(target.follow),
            }
            for device, target in TARGETS.items()
        }
    }


if __name__ == "__main__":
    default_to_one_thread()
    text = _HEADER + dump_yaml(fit())
    write_whole(data_dir() / "paper" / "calibration.yaml", text)
