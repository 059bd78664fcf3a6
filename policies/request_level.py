"""Request-level batching, as in FasterTransformer (section 4.1 of the Sarathi paper)."""

from __future__ import annotations

from sarathi_sim.policies.orca import OrcaWorstCase
from sarathi_sim.policies.policy import named


@named("request_level")
class RequestLevel(OrcaWorstCase):
    """A batch is prefilled together and leaves together; finished requests compute padding.

    Prefill-only and decode-only iterations follow each other; this is also the baseline against
    which the paper measures its throughput gains.
    """

    holds_finished = True
