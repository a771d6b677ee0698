"""What is known of an nn.Module: its layout, its layers while it runs, and how many draws of it are evaluated."""

from dapcal.networks.evaluation import (
    MEMORY,
    as_tensor,
    backward_in_evaluation,
    check_outputs,
    checked_outputs,
    dense_chain,
    evaluate,
    one_column,
    vectorises,
    vectorising,
)
from dapcal.networks.heads import head_of, with_head_last
from dapcal.networks.hooks import entering, execution_order, first_input, leaving, unfused
from dapcal.networks.layers import feature_layer, last_linear, layer_names
from dapcal.networks.layout import (
    Layout,
    copied,
    frozen_copy,
    layout_of,
    own_layers,
    parameter_name,
    plain,
    same_weights,
    split_state,
)
from dapcal.networks.passes import Pass, layer_input, open_pass, shared
from dapcal.networks.reading import reading, reads
from dapcal.networks.running import run, running
from dapcal.networks.tabular import TableNetwork, Tempered
from dapcal.networks.taking import any_inputs, packed, packed_batches, take
from dapcal.networks.trees import Blend, Trees, from_histograms

__all__ = [
    "MEMORY", "Blend", "Layout", "Pass", "TableNetwork", "Tempered", "Trees", "any_inputs", "as_tensor",
    "backward_in_evaluation", "check_outputs", "checked_outputs", "copied", "dense_chain", "entering", "evaluate",
    "execution_order", "feature_layer", "first_input", "from_histograms", "frozen_copy", "head_of", "last_linear",
    "layer_input", "layer_names", "layout_of", "leaving", "one_column", "open_pass", "own_layers", "packed",
    "packed_batches", "parameter_name", "plain", "reading", "reads", "run", "running", "same_weights", "shared",
    "split_state", "take", "unfused", "vectorises", "vectorising", "with_head_last",
]  # fmt: skip
