"""The account of an advantage in words, for the inspector, the terminal and notebooks."""

from __future__ import annotations

from collections.abc import Mapping

from agentr1_jax.trajectory import Term


def account_lines(account: Mapping[str, Term]) -> list[str]:
    """Return a line of arithmetic for each term of an advantage, and one for their sum where there are several.

        outcome in its group: return 1.2 − group mean 1.2875 = −0.0875, ÷ std 0.033 = −2.6515

    Args:
      account: terms by name, as recorded with a step; no line for an empty one.
    """
    lines = [f"{name}: {term_text(term)}" for name, term in account.items()]
    if len(lines) > 1:
        totals = [term.total for term in account.values()]
        lines.append(f"advantage: {_chain([('+', '', x) for x in totals])} = {number_text(sum(totals))}")
    return lines


def term_text(term: Term) -> str:
    """Return the arithmetic of one term; a factor that changes nothing is left out."""
    quantities = [("+", name, x) for name, x in term.plus.items()] + [("−", name, x) for name, x in term.minus.items()]
    text, result = _chain(quantities), term.difference
    if len(quantities) > 1:
        text += f" = {number_text(result)}"
    factors = "".join(
        f" {sign} {number_text(x)}" for sign, x in (("×", term.weight), ("÷ std", term.std)) if x != 1 and result
    )
    return f"{text},{factors} = {number_text(term.total)}" if factors else text


def number_text(x: float) -> str:
    """Return a number with five significant digits and a true minus sign."""
    return f"{x + 0.0:.5g}".replace("-", "−")


def _chain(quantities: list[tuple[str, str, float]]) -> str:
    """Join (sign, name, number) by their signs; the first plus is not written."""
    text = " ".join(f"{sign} {name} {number_text(x)}".replace("  ", " ") for sign, name, x in quantities)
    return text.removeprefix("+ ")
