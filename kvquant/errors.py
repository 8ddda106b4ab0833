"""Every error a user of kvquant can meet.

    KVQuantError
    ├── InputError            a file, option or text that cannot be used
    │   ├── ModelError        no model there, or one that cannot be loaded
    │   ├── AdapterError      an adapter that does not fit its base
    │   ├── DataError         calibration text that yields nothing usable
    │   └── FileFormatError   a scales or statistics file that cannot be read
    ├── SchemeError           a quantization scheme that cannot exist, or not on this model
    ├── GeometryError         a config that does not say what its cache looks like
    ├── NotObservedError      a layer, head or channel that calibration never saw
    ├── FingerprintError      scales of one model offered to another
    └── ExportError           scales that an engine could not read, or not from this checkpoint

The command line prints the message of any of them as one line and exits with code 2, so a
message carries the numbers and says what to do next.
"""


class KVQuantError(Exception):
    """Base of all errors that kvquant raises on purpose."""


class InputError(KVQuantError):
    """Something the user handed over cannot be used."""


class ModelError(InputError):
    """There is no model at the place named, or it cannot be loaded."""


class AdapterError(InputError):
    """An adapter does not belong to its base, or is of a kind without cached keys to calibrate."""


class DataError(InputError):
    """Calibration text is missing, unreadable, or yields no usable tokens."""


class FileFormatError(InputError):
    """A scales or statistics file is cut short, foreign, or written by a newer version."""


class SchemeError(KVQuantError):
    """A quantization scheme is impossible, or does not fit the model's geometry."""


class GeometryError(KVQuantError):
    """A config lacks what the shape of its cache depends on, or contradicts the real tensors."""


class NotObservedError(KVQuantError):
    """Calibration never saw something that it has to give a scale for."""


class FingerprintError(KVQuantError):
    """Scales or statistics belong to another model, adapter set or geometry."""


class ExportError(KVQuantError):
    """An engine could not read such scales, or not from such a checkpoint."""
