"""A user's network by the name of its factory, with weights from a file; a user's estimators likewise.

A name is code that is imported: it comes from the person who runs the program, never out of a file.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dapcal.models import timm_models

_MOST_NAMED = 3  # parameters in one line


def network(name: str) -> nn.Module:
    """The network that `package.module:factory` makes, with weights as the factory leaves them.

    `factory` is a callable without required arguments (a function, a class), or the network itself. It is looked for
    among what is installed, then in the current folder. `timm:resnet18,num_classes=10` is timm's model of that name.
    """
    module, _, attribute = name.partition(":")
    if module == "timm":
        return timm_models.model(attribute)
    found = _named(name, "model")
    made = copy.deepcopy(found) if isinstance(found, nn.Module) else _called(found, name, "a network")
    if not isinstance(made, nn.Module):
        raise TypeError(f"Expected {name} to return an nn.Module, got {type(made).__name__}")
    if not any(True for _ in made.parameters()):
        raise ValueError(
            f"Expected {name} to give a network with parameters, got none: there is nothing to be unsure of"
        )
    return made


def estimators(name: str) -> list[Any]:
    """The estimator that `package.module:factory` returns, or all of a list; found as networks are, and called."""
    made = _called(_named(name, "estimator"), name, "an estimator")
    found = list(made) if isinstance(made, list | tuple) else [made]
    if not found or any(not hasattr(one, "fit") for one in found):
        got = type(made).__name__ if found else "an empty list"
        raise TypeError(f"Expected {name} to return an estimator with `fit`, or a list of such, got {got}")
    return found


def with_weights(model: nn.Module, path: str | Path) -> nn.Module:
    """A copy of the network with the weights of a .safetensors, .pt or .pth file, all of them and no others."""
    given = _read(Path(path))
    loaded = copy.deepcopy(model)
    own = loaded.state_dict(keep_vars=True)
    present = {id(own[name]) for name in given if name in own}
    # tied weights may be stored once
    missing = [name for name, tensor in own.items() if name not in given and id(tensor) not in present]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        parts = [f"{what} {_listed(names)}" for what, names in (("lacks", missing), ("has", unknown)) if names]
        advice = "; give the weights of the model's own state_dict()"
        raise ValueError(f"{path} holds weights of another model: it {' and '.join(parts)}{_prefix(unknown) or advice}")
    odd = [name for name in own if name in given and given[name].shape != own[name].shape]
    if odd:
        here, there = tuple(own[odd[0]].shape), tuple(given[odd[0]].shape)
        more = f", and {len(odd) - 1} more differ" if len(odd) > 1 else ""
        raise ValueError(f"{path} holds weights of another model: `{odd[0]}` is {there} there and {here} here{more}")
    learnt = dict(loaded.named_parameters(remove_duplicate=False))
    kinds = [n for n in learnt if n in given and given[n].is_floating_point() != learnt[n].is_floating_point()]
    if kinds:
        raise ValueError(
            f"{path} holds {given[kinds[0]].dtype} for `{kinds[0]}`, which is {learnt[kinds[0]].dtype} in the model; "
            "save the model's own state_dict()"
        )
    # a buffer may hold −inf, such as an attention mask
    broken = [
        name for name, tensor in given.items() if (~tensor.isfinite() if name in learnt else tensor.isnan()).any()
    ]
    if broken:
        raise ValueError(f"{path} holds NaN or inf in {_listed(broken)}; train the network again")
    loaded.load_state_dict(given, strict=False)
    if not all(parameter.isfinite().all() for parameter in loaded.parameters()):
        raise ValueError(f"{path} holds numbers too large for the model's type; save the weights in the model's type")
    return loaded


def moved(model: nn.Module, device: str) -> nn.Module:
    """The network on a device, by its name."""
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without CUDA
        raise ValueError(
            f"There is no device {device!r} here ({told(error)}); use cpu, or see dapcal doctor"
        ) from error


def told(error: BaseException) -> str:
    """What kind of error, and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _named(name: str, what: str) -> Any:
    """What stands under package.module:name."""
    module, colon, attribute = name.partition(":")
    named = all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
    if not colon or not named or module.endswith(".py"):
        raise ValueError(
            f"Expected the {what} as package.module:factory, got {name!r}; the function make in nets.py is nets:make"
        )
    return _attribute(_imported(module), attribute, name)


def _imported(module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file there that is named like an installed module takes nobody's place
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ValueError(
                f"There is no module {error.name} in {here} or among what is installed; check the name before the colon"
            ) from error
        raise ValueError(f"Could not import {module}: {told(error)}; install what it needs") from error
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"Could not import {module}: {told(error)}; what it runs belongs under if __name__ == '__main__'"
        ) from error


def _attribute(module: Any, attribute: str, name: str) -> Any:
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(
            f"There is no {attribute} in {module.__name__} ({name}); check the name after the colon"
        ) from error


def _called(factory: Any, name: str, what: str) -> Any:
    if not callable(factory):
        raise TypeError(f"Expected {name} to be a function that returns {what}, got {type(factory).__name__}")
    with torch.random.fork_rng(devices=[]):  # constants that a factory draws are the same at every call
        torch.manual_seed(0)
        try:
            return factory()
        except (Exception, SystemExit) as error:
            raise ValueError(f"{name} failed: {told(error)}; name a function that works without arguments") from error


def _read(path: Path) -> dict[str, Tensor]:
    """A file's state dict."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}; check the path of the weights")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is truncated or no safetensors file ({error}); save it again") from error
    if suffix not in (".pt", ".pth"):
        raise ValueError(f"Expected weights as a .safetensors, .pt or .pth file, got {path}; save model.state_dict()")
    try:
        with warnings.catch_warnings(action="ignore"):  # of what follows as an error
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, and loading it could run code of others; save the weights alone with "
            "torch.save(model.state_dict(), path), or as safetensors"
        ) from error
    except Exception as error:  # of a damaged file torch's reader may ask anything
        raise ValueError(
            f"{path} is damaged or was not written by torch.save ({told(error)}); save it again"
        ) from error
    return _state(state, path)


def _state(loaded: Any, path: Path) -> dict[str, Tensor]:
    """The state dict itself, or the one under `state_dict` of a checkpoint."""
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise ValueError(
            f"Expected {path} to hold a state dict of tensors, got {type(loaded).__name__}; save the weights with "
            "torch.save(model.state_dict(), path)"
        )
    odd = [name for name, tensor in loaded.items() if not isinstance(name, str) or not _is_plain(tensor)]
    if odd:
        raise ValueError(
            f"Expected {path} to hold plain tensors by name, but {str(odd[0])[:60]!r} is sparse, quantised, complex or "
            "without data; save the state_dict() of a plain copy of the network"
        )
    return dict(loaded)


def _is_plain(tensor: Tensor) -> bool:
    """With a number of its own at every place, in main memory."""
    kept = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta)
    return kept and not tensor.is_quantized and not tensor.is_complex()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(f"`{name[:100]}`" for name in names[:_MOST_NAMED]) + more


def _prefix(unknown: Sequence[str]) -> str:
    """Advice where all names have a prefix that wrappers add."""
    for prefix, wrapper in (("module.", "DataParallel"), ("_orig_mod.", "torch.compile")):
        if unknown and all(name.startswith(prefix) for name in unknown):
            return f"; {wrapper} has put {prefix!r} before the names: save the state_dict() of the network inside it"
    return ""
