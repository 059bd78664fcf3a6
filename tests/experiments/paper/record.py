"""Write reproduced.csv anew: `python -m tests.experiments.paper.record`, once a change is meant."""

from __future__ import annotations

import csv
from pathlib import Path

from sarathi_sim.experiments.paper.claims import evaluate, load_claims
from sarathi_sim.experiments.paper.variants import VARIANTS, Lab

FILE = Path(__file__).parent / "reproduced.csv"

if __name__ == "__main__":
    labs = [Lab(variant) for variant in VARIANTS]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["id", *VARIANTS])
        for claim in load_claims().values():
            values = [f"{evaluate(claim, lab).ours:.5g}" for lab in labs]
            table.writerow([claim.id, *values])
