"""Figures as tables show them; what was not measured is a dash."""

from __future__ import annotations


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def plain(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def p_value(value: float | None) -> str:
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"
