"""Footnote 6 and section 6 of the paper: what is done about its limits, and what is not."""

from __future__ import annotations

from dualform_paper.section import Section

LIMITS = (
    (
        "Footnote 6: CIFAR-10 is left out, since small feedforward networks stay below 50 %",
        "Not done here either. `Conv2d` is recorded exactly, so a network that does better could be; nobody has measured it.",
    ),
    (
        "Storage grows with all that is trained on",
        "Eased: equal keys are stored once, float16 halves the rest, `keep=\"totals\"` grows with groups only. Questions about "
        "single examples still need their slots.",
    ),
    (
        "Networks that are already trained cannot be analysed",
        "Stays so. Recording may begin with any network; all that was before is then one initial part.",
    ),
    (
        "Attention weights only",
        "Done: `contributions` weighs with the error signals, signed; in the last layer they add up to the logit.",
    ),
    (
        "It shows which examples are combined, not how that becomes a meaningful output",
        "Not done. In hidden layers contributions are first order, with the remainder printed; what a combination means is left "
        "to the reader.",
    ),
)  # fmt: skip


def section() -> Section:
    """A line for each limit."""
    lines = "\n".join(f"- **{limit}.** {answer}" for limit, answer in LIMITS)
    return Section("Footnote 6 and section 6: limits", lines, {"limits": [list(pair) for pair in LIMITS]})
