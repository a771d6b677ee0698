"""A calibrated posterior as a program without Python: torch.export and ONNX."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from dapcal.data import Inputs
from dapcal.deploy.deployed import Deployed, Predicted, module
from dapcal.deploy.fitted import Fitted
from dapcal.files import complete_or_absent
from dapcal.networks import unfused

OPSET = 18
LARGEST = 2**31 - 2**20  # bytes of weights in one ONNX file; beyond, protobuf refuses it


def export(calibrated: Fitted) -> torch.export.ExportedProgram:
    """A program for batches of any size, which returns a dict of the tensors that `Predicted` names.

    `torch.export.save` writes it, and `torch.export.load(path).module()` predicts where there is no dapcal.
    """
    return _traced(module(calibrated), calibrated.example)


def to_onnx(calibrated: Fitted, path: str | Path) -> None:
    """Write one ONNX file (opset 18), complete or not at all: input `x`, outputs named as in `Predicted`.

    A network that takes several inputs has those, by their names, in place of `x`; texts of several lengths are padded
    to that of `calibrated.example`. The first dimension of all of them is the batch, of any size. Most of the
    arithmetic is in float64.

    Args:
        calibrated: what predicts.
        path: the file; weights and training points are inside, at most 2 GB.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"ONNX export needs {' and '.join(missing)}; install it with: pip install 'dapcal[onnx]'")
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        raise ImportError(
            f"ONNX export needs torch >= 2.6, got {torch.__version__}; upgrade it, or use dapcal.deploy.export"
        )
    deployed = module(calibrated)
    size = sum(tensor.nbytes for tensor in deployed.state_dict().values())
    if size > LARGEST:
        raise ValueError(
            f"Expected at most 2 GB of weights and training points in one ONNX file, got {size / 1e9:.1f} GB; measure "
            "distances between features or to fewer training inputs, or use dapcal.deploy.export"
        )
    program = _converted(deployed, calibrated.example)
    with complete_or_absent(path) as part:
        program.save(part, external_data=False)


def _converted(deployed: Deployed, example: Tensor) -> torch.onnx.ONNXProgram:
    names = ["x"] if deployed.fields is None else list(deployed.fields.names)
    batch = {0: "batch"}  # for its name; the program is dynamic already
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`", category=FutureWarning)
        program = torch.onnx.export(
            _traced(deployed, example),
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            dynamic_shapes={"x": batch if deployed.fields is None else dict.fromkeys(names, batch)},
            verbose=False,
        )
    assert program is not None
    graph = program.model.graph
    for value in [output for node in graph for output in node.outputs]:
        if value.name in Predicted._fields:  # torch calls what an operator returns by the operator, e.g. mean
            value.name = f"inner_{value.name}"
    for value, name in zip(graph.outputs, Predicted._fields, strict=True):
        value.name = name
    return program


def _traced(deployed: Deployed, example: Tensor) -> torch.export.ExportedProgram:
    # two rows: a batch of one would make its size part of the program
    rows = example.expand(2, *example.shape[1:]).to(deployed.factor.device).contiguous()
    batch = {0: torch.export.Dim("batch")}
    x = rows if deployed.fields is None else deployed.fields.unpack(rows)
    shapes = {"x": batch if isinstance(x, Tensor) else dict.fromkeys(x, batch)}
    try:
        with torch.no_grad(), unfused():  # fused kernels of transformers have no ONNX; strict=False: hooks are Python
            return torch.export.export(ByName(deployed), (x,), dynamic_shapes=shapes, strict=False)
    except Exception as error:
        told = " ".join(str(error).split())[:160]
        raise ValueError(
            f"torch.export cannot make a program of this network ({type(error).__name__}: {told}); predict with "
            "calibrated(x), or with the module that calibrated.module() returns"
        ) from error


class ByName(nn.Module):
    """The fields as a dict, which a stored program can hold without dapcal's own types."""

    def __init__(self, deployed: Deployed) -> None:
        super().__init__()
        self.deployed = deployed

    def forward(self, x: Inputs) -> dict[str, Tensor]:
        """Predictions at a batch of inputs (N, ...), or of several by name."""
        predicted: Predicted = self.deployed(x)
        return predicted._asdict()
