"""Iteration-level scheduling (Orca), in the three readings of the Sarathi paper, section 5.2; and
request-level batching, as in FasterTransformer (section 4.1)."""

from __future__ import annotations

from typing import Literal

from sarathi_sim.policies.policy import DECODES, Plan, Policy, View, named


class Orca(Policy):
    """Requests join and leave a micro-batch at any iteration; a prompt is processed whole.

    ``max_prefills`` bounds how many new requests join in one iteration: None is unconstrained
    Orca; 1 is the paper's best case, in which the full prefill of one new request joins the
    ongoing decodes.
    """

    def __init__(self, max_prefills: int | None = None) -> None:
        if max_prefills is not None and max_prefills < 1:
            raise ValueError(f"max_prefills must be at least 1, not {max_prefills}")
        self.max_prefills = max_prefills

    def plan(self, view: View) -> Plan | None:
        if view.waiting and view.free_slots:
            if self.max_prefills == 1:
                head = view.next_waiting()
                if head is not None:
                    return Plan(((head, head.prompt_tokens),))
            else:
                joining = view.admissible()[: self.max_prefills]
                if joining:
                    return Plan(tuple((s, s.prompt_tokens) for s in joining))
        return DECODES if view.num_decodes else None


class OrcaWorstCase(Policy):
    """Requests begin and end together: a micro-batch takes new requests only when it is empty.

    Unlike request-level batching a request that finishes early leaves at once; its slot stays
    empty until the last one is done.
    """

    def plan(self, view: View) -> Plan | None:
        if view.num_decodes:
            return DECODES
        joining = view.admissible()
        return Plan(tuple((s, s.prompt_tokens) for s in joining)) if joining else None


@named("orca")
def orca(case: Literal["best", "worst", "unconstrained"] = "best") -> Policy:
    """Iteration-level scheduling with whole prompts, in the paper's three cases."""
    if case == "worst":
        return OrcaWorstCase()
    return Orca(max_prefills=1 if case == "best" else None)


@named("request_level")
class RequestLevel(OrcaWorstCase):
    """A batch is prefilled together and leaves together; finished requests compute padding.

    Prefill-only and decode-only iterations follow each other; this is also the baseline against
    which the paper measures its throughput gains.
    """

    holds_finished = True
