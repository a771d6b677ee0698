"""tabm and rtdl-num-embeddings: with the same weights our members give the outputs of their network."""

from __future__ import annotations

import rtdl_num_embeddings
import tabm
import torch
from torch import nn

from dapcal.networks import TableNetwork, tabular
from dapcal.recipes.bins import quantile_edges


def test_members_are_those_of_tabm(monkeypatch):
    monkeypatch.setattr(tabular, "SQUASHED", 1e6)  # theirs has no limit
    x = torch.randn(200, 3)
    edges = quantile_edges(x, 4)
    theirs = tabm.TabM.make(
        n_num_features=3,
        d_out=2,
        num_embeddings=rtdl_num_embeddings.PiecewiseLinearEmbeddings(edges, 5, activation=False, version="B"),
        n_blocks=2,
        d_block=7,
        k=4,
        dropout=0.0,
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    for member in range(4):
        ours = _member(theirs, member, edges).eval()
        torch.testing.assert_close(ours(x), theirs(x)[:, member], atol=1e-4, rtol=1e-4)


def test_edges_are_those_of_rtdl():
    x = torch.randn(500, 2)
    for ours, theirs in zip(quantile_edges(x, 8), rtdl_num_embeddings.compute_bins(x, 8), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def _member(theirs: nn.Module, member: int, edges: list[torch.Tensor]) -> TableNetwork:
    ours = TableNetwork(3, 2, (7, 7), numbers=3, bins=4, width=5, dropout=0.0)
    ours.fit_inputs(torch.arange(3), edges)
    state = {
        "embedding.linear": theirs.num_module.linear0.weight,
        "embedding.bias": theirs.num_module.linear0.bias,
        "embedding.pieces": theirs.num_module.linear.weight,
        "head.weight": theirs.output.weight[member].T,
        "head.bias": theirs.output.bias[member],
    }
    for number, block in enumerate(theirs.backbone.blocks):
        layer = next(module for module in block.modules() if isinstance(module, tabm.LinearBatchEnsemble))
        name = f"layers.{3 * number}"
        state[f"{name}.before"], state[f"{name}.after"] = layer.r[member], layer.s[member]
        state[f"{name}.shared.weight"], state[f"{name}.bias"] = layer.weight, layer.bias[member]
    missing = ours.load_state_dict(state, strict=False).missing_keys
    assert set(missing) == {"numbers", "others", "embedding.slope", "embedding.shift"}
    return ours
