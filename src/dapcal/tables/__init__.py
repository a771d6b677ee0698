"""Tables: files with named columns in, tensors that a network takes out, and back."""

try:
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as error:
    raise ImportError("Tables need pyarrow; install it with: pip install 'dapcal[tables]'") from error

from dapcal.tables.columns import Category, Number
from dapcal.tables.descriptions import encoder_from_json, target_from_json
from dapcal.tables.encoder import Encoded, Encoder, fit_encoder
from dapcal.tables.files import columns_of, read, sample, stream
from dapcal.tables.sampling import Sample
from dapcal.tables.targets import Classes, Numbers, Task, fit_target, guess, with_target
from dapcal.tables.values import Kind

__all__ = [
    "Category",
    "Classes",
    "Encoded",
    "Encoder",
    "Kind",
    "Number",
    "Numbers",
    "Sample",
    "Task",
    "columns_of",
    "encoder_from_json",
    "fit_encoder",
    "fit_target",
    "guess",
    "read",
    "sample",
    "stream",
    "target_from_json",
    "with_target",
]
