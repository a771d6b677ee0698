"""A training with the callback, which `torch.distributed.run --nproc-per-node 2` starts in several processes."""

from __future__ import annotations

import sys
from pathlib import Path

from test_trainer_callback import fit

from dapcal.integrations.huggingface import Calibrate
from dapcal.likelihoods import Categorical

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    callback = Calibrate(folder / "topics.dap", Categorical(), report=False)
    trainer = fit(callback, folder)
    (folder / f"rank-{trainer.args.process_index}").write_text(str(callback.model is not None))
