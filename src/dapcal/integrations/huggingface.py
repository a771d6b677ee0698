"""A callback for Hugging Face's Trainer that calibrates when training ends.

In use:

    from dapcal.integrations.huggingface import Calibrate

    trainer = Trainer(model, arguments, train_dataset=..., eval_dataset=..., callbacks=[Calibrate("topics.dap")])
    trainer.train()  # writes topics.dap and topics.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dapcal.data import Data
from dapcal.integrations.ending import Ending, Seen
from dapcal.integrations.libraries import base
from dapcal.integrations.loaders import Pair, in_order
from dapcal.likelihoods import Likelihood
from dapcal.models.network import NetworkModel
from dapcal.models.subject import Picture, Row


class Calibrate(base("TrainerCallback", "huggingface", "transformers")):  # type: ignore[misc]
    """Calibrates the model as it is when training ends, and writes the artefact and the report.

    With `load_best_model_at_end` that is the best one. The data sets are read once more, in order and through the
    trainer's collator. With several processes the first of all calibrates, on all rows, and the others wait. An error
    at the end is a warning, as a training is worth more.

    Load the artefact with `dapcal.load(path, model)`, where the model may be made from its config.

    Args:
        path: of the artefact, e.g. "topics.dap".
        likelihood: p(y | logits); by default as in `dapcal.calibrate`.
        held_out: in-distribution data that training did not see; by default a part of the evaluation data.
        share: that part. The rest, which the calibration has not seen, is left for measuring what it gives.
        train: what the network was trained on; by default the rows of the training data set.
        pair: from a batch to (inputs, targets), where targets are not under "labels".
        report: where the HTML page goes; True: beside the artefact, False: nowhere.
        classes: their names, in the order of the outputs; by default those of the config.
        seed: of the part, of draws, and of the split of the held-out data.
        options: further arguments of `dapcal.calibrate`, e.g. {"ood": texts}.

    Attributes:
        model: the calibrated `NetworkModel` (`model.calibrated` predicts), once there is one.
    """

    def __init__(
        self,
        path: str | Path,
        likelihood: Likelihood | None = None,
        *,
        held_out: Data | None = None,
        share: float = 0.5,
        train: Data | None = None,
        pair: Pair | None = None,
        report: bool | str | Path = True,
        classes: Sequence[str] = (),
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.ending = Ending(Path(path), likelihood, held_out, share, train, report, classes, seed, options or {})
        self.pair = pair
        self.model: NetworkModel | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Refuse what cannot work before hours of training."""
        self.ending.check_places()
        if sharded := [name for name in ("fsdp", "deepspeed") if getattr(args, name, None)]:
            raise ValueError(
                f"Expected the whole network in one process, but {sharded[0]} shards it; take the callback out, and "
                "use dapcal.calibrate on the saved model"
            )
        if self.ending.held_out is None and args.eval_strategy == "no":
            raise ValueError(
                "Expected held-out data, and this trainer evaluates nothing (eval_strategy='no'); give `held_out`"
            )

    def on_train_end(
        self,
        args: Any,  # noqa: ARG002
        state: Any,
        control: Any,  # noqa: ARG002
        *,
        model: Any = None,
        processing_class: Any = None,
        train_dataloader: Any = None,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Calibrate, in one process of all."""
        if state.is_hyper_param_search:
            return
        if state.is_world_process_zero:
            known, validation = (
                None if loader is None else in_order(loader, self.pair)
                for loader in (train_dataloader, eval_dataloader)
            )
            ending = self.ending.with_classes(_names(model))
            self.model = ending.or_warn(lambda: ending(model, known, validation, _seen(processing_class)))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the others would end, and take the group of processes with them


def _names(model: Any) -> tuple[str, ...]:
    """Of the classes, as the config has them; none where a number is predicted."""
    found = getattr(getattr(model, "config", None), "id2label", None) or {}
    return tuple(str(found[number]) for number in sorted(found)) if len(found) > 1 else ()


def _seen(tokenizer: Any) -> Seen | None:
    """Token ids as texts."""
    if not hasattr(tokenizer, "batch_decode"):
        return None

    def texts(parts: Mapping[str, Tensor]) -> list[Row | Picture]:
        if "input_ids" not in parts:
            return [{} for _ in next(iter(parts.values()))]
        return [{"text": text} for text in tokenizer.batch_decode(parts["input_ids"], skip_special_tokens=True)]

    return texts
