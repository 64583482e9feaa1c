"""The report as one page that needs nothing beside it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from loadtest.tables import Table

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 80rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.5rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; height: auto; }
.cut { background: #fff3cd; border-left: 4px solid #d39e00; padding: 0.6rem 1rem; }
li { margin: 0.2rem 0; }
"""
_CAPTIONS = {
    "ttft.png": "Time to first token against load. Points are measured (bars: smallest and largest seed), lines are "
    "simulated from the measured S(b). The dashed line is the large model's native saturation.",
    "batch.png": "Requests per batch, measured and simulated.",
    "first_token.png": "Where the mean time to first token goes, at the lightest and the heaviest load.",
}


def page(title: str, facts: Sequence[str], faults: Sequence[str], tables: Sequence[Table],
         pictures: Mapping[str, bytes]) -> str:  # fmt: skip
    """HTML. `facts`: what was run, and on what; `faults`: what the reader must know before believing a figure."""
    parts = [f"<h1>{escape(title)}</h1>"]
    parts += [f'<p class="cut">{escape(fault)}</p>' for fault in faults]
    parts += ["<ul>", *(f"<li>{escape(fact)}</li>" for fact in facts), "</ul>"]
    shown = [
        f'<figure><img alt="{escape(name)}" src="data:image/png;base64,{b64encode(data).decode()}">'
        f"<figcaption>{escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, data in pictures.items()
    ]
    written = [table.html() for table in tables]
    parts += written[:1] + shown[:1] + written[1:] + shown[1:]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
