"""What can go wrong while evaluating.

KVLiftError
└── EvaluationError      a dataset, an option or a folder of outcomes that cannot give a table
"""

from __future__ import annotations

from sglang_ext.errors import KVLiftError


class EvaluationError(KVLiftError):
    """A dataset with a broken line or without items, or options that do not fit together."""
