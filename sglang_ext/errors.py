"""What can go wrong with KV, as one tree.

    KVLiftError
    ├── GeometryError        a model's KV layout or rope is not supported, or two do not fit
    ├── BlockError           a block is truncated, corrupt, or of another model or prompt
    ├── PlanError            a prefill plan breaks its own law, or a budget is out of range
    ├── PackError            a pack is missing, malformed, or made for other models
    │   └── NotAccepted      a pack without a passing acceptance record, or bench-only
    ├── DocumentError        a document or an adapter that cannot be compiled, linked or read
    │   └── UnknownDocument  an id that names no document of this tenant
    ├── CalibrationError     the corpus or the settings cannot give a map
    ├── TransferError        a block did not arrive in time
    └── WorkerError          this SGLang process cannot carry the plugin
"""


class KVLiftError(Exception):
    """Base of every error that kvlift raises on purpose."""


class GeometryError(KVLiftError):
    """A KV layout or rope type that is not supported, or two geometries that do not fit."""


class BlockError(KVLiftError):
    """A KV block that is truncated, corrupt, or of another model or prompt."""


class PlanError(KVLiftError):
    """A prefill plan in which a position is missing, double, or out of range."""


class PackError(KVLiftError):
    """A pack that is missing, malformed, or made for other models."""


class NotAccepted(PackError):
    """A pack whose acceptance record is absent or below the threshold, or that is bench-only."""


class DocumentError(KVLiftError):
    """A document or an adapter that cannot be compiled, linked or read."""


class UnknownDocument(DocumentError):
    """An id that names no document of this tenant."""


class CalibrationError(KVLiftError):
    """Calibration data or settings that cannot give a map."""


class TransferError(KVLiftError):
    """A block that did not arrive within its time or size."""


class WorkerError(KVLiftError):
    """An SGLang process that cannot carry the plugin."""
