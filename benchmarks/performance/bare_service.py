"""FastAPI with five bare networks of a table's rows: what one would write by hand, without distances or checks.

Run: PYTHONPATH=benchmarks python -m performance.bare_service
"""

from __future__ import annotations

import json
import socket

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, create_model
from service import NAMES
from torch import Tensor

from performance.members import network

Row = create_model("Row", **dict.fromkeys(NAMES, (float, ...)))


class Rows(BaseModel):
    """Several rows."""

    rows: list[Row]


torch.manual_seed(0)
networks = [network().eval() for _ in range(5)]
app = FastAPI()


@app.post("/predict")
async def one(row: Row) -> dict[str, list[float]]:
    return {"probabilities": answers([row])[0].tolist()}


@app.post("/predict/batch")
async def many(body: Rows) -> dict[str, list[list[float]]]:
    return {"probabilities": answers(body.rows).tolist()}


@torch.inference_mode()
def answers(rows: list[Row]) -> Tensor:
    x = torch.tensor([list(row.__dict__.values()) for row in rows])
    return torch.stack([own(x).softmax(-1) for own in networks]).mean(0)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else an answer's body waits 40 ms for its head
        print(json.dumps({"address": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
