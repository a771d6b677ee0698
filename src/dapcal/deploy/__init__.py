"""A calibrated posterior as one module that maps tensors to tensors, for torch.export, ONNX and serving.

Supported are what `calibrate` gives by default and its usual variations: `Inflate` in closed form and `Revert`; draws
of a network (ensembles, variational, SWAG, sampled ones) and last-layer Laplace; dapcal's likelihoods; nearest
neighbours and nearest classes among inputs, features of a layer or random Fourier features. All else is refused with
the way out.
"""

from dapcal.deploy.deployed import Deployed, Predicted, module
from dapcal.deploy.programs import export, to_onnx

__all__ = ["Deployed", "Predicted", "export", "module", "to_onnx"]
