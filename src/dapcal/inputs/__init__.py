"""Inputs as people have them: dicts, several tensors and variable lengths as one plain tensor, and back."""

from dapcal.inputs.batches import batches_of, first_batch, is_lazy
from dapcal.inputs.fields import Field, Fields
from dapcal.inputs.finding import find_fields, mask_of
from dapcal.inputs.reading import Parts, Takes, parts_of, takes_of, targets_in

__all__ = [
    "Field", "Fields", "Parts", "Takes", "batches_of", "find_fields", "first_batch", "is_lazy", "mask_of", "parts_of",
    "takes_of", "targets_in",
]  # fmt: skip
