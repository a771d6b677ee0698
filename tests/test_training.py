"""The trainer: a killed run ends where an uninterrupted one does; early stopping, schedules, seeds, progress."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from cases import Killed
from dapcal.data import Labelled
from dapcal.likelihoods import Categorical, Gaussian
from dapcal.posteriors import map as map_posterior
from dapcal.posteriors import variational
from dapcal.posteriors._training import checkpoints
from dapcal.posteriors.training import Training, constant
from dapcal.progress import Bar, Epoch, told
from dapcal.types import DapcalWarning

FITS = {"map": map_posterior.fit, "variational": variational.fit}


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 3)
        )


def everything(posterior) -> list[torch.Tensor]:
    return [posterior.draws, *posterior.shared.values()]


def same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(everything(one), everything(two), strict=True))


@pytest.fixture
def settings(blobs):
    return {
        "train": blobs[0], "epochs": 12, "batch_size": 16, "learning_rate": 0.01, "held_out": blobs[1], "patience": 6,
    }  # fmt: skip


# Resuming


@pytest.mark.parametrize("method", FITS)
def test_kills_at_random_moments_change_nothing(tmp_path, settings, method):
    fit, path = FITS[method], tmp_path / "run"

    def train() -> None:
        fit(network(), Categorical(), checkpoint=path, checkpoint_seconds=0, **settings)

    plain = fit(network(), Categorical(), **settings)  # the first imports much
    started = time.monotonic()
    reference = fit(
        network(), Categorical(), checkpoint=tmp_path / "other", checkpoint_seconds=0, **settings
    )  # the same work
    duration = time.monotonic() - started
    context, moments, kills = multiprocessing.get_context("fork"), random.Random(0), 0
    while kills < 5:
        child = context.Process(target=train)
        child.start()
        child.join(moments.uniform(0, duration / 4))
        child.kill()
        child.join()
        if child.exitcode == 0:  # came to its end before the kill: start anew
            path.unlink()
        else:
            assert child.exitcode == -signal.SIGKILL, "a resumed run failed"
            kills += 1
    resumed = fit(network(), Categorical(), checkpoint=path, checkpoint_seconds=0, **settings)
    assert same(resumed, reference)
    assert same(plain, reference)


@pytest.mark.parametrize("method", FITS)
@pytest.mark.parametrize("own_generator", [False, True])
def test_a_loader_resumes_at_the_end_of_an_epoch(tmp_path, settings, method, own_generator):
    x, y = (part[:80] for part in settings.pop("train"))
    fit = FITS[method]

    def loader():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, generator=generator)

    settings["epochs"] = settings["patience"] = 6
    reference = fit(network(), Categorical(), loader(), **settings)
    for at_epoch in (1, 3, 6):
        path = tmp_path / f"run-{at_epoch}"

        def stop(epoch: Epoch, last: int = at_epoch) -> None:
            if epoch.number == last:
                raise Killed

        torch.manual_seed(0)  # a loader without a generator asks the global one
        with pytest.raises(Killed):
            fit(network(), Categorical(), loader(), checkpoint=path, checkpoint_seconds=0, progress=stop, **settings)
        assert same(fit(network(), Categorical(), loader(), checkpoint=path, **settings), reference), at_epoch


def test_a_finished_run_is_read_and_not_repeated(tmp_path, settings):
    path, epochs = tmp_path / "deep" / "run", []
    one = map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)
    two = map_posterior.fit(network(), Categorical(), checkpoint=path, progress=epochs.append, **settings)
    assert same(one, two)
    assert epochs == []
    assert [p.name for p in path.parent.iterdir()] == ["run"]


CHANGES = {
    "epochs": {"epochs": 13},
    "learning_rate": {"learning_rate": 0.02},
    "seed": {"seed": 1},
    "prior_scale": {"prior_scale": 2.0},
    "optimizer": {"optimizer": lambda p, lr: torch.optim.SGD(p, lr)},
    "schedule": {"schedule": constant},
}


def test_a_checkpoint_of_another_run_is_refused(tmp_path, settings):
    path = tmp_path / "run"
    map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)
    for name, change in CHANGES.items():
        with pytest.raises(ValueError, match=f"another run .*{name}.*remove it"):
            map_posterior.fit(network(), Categorical(), checkpoint=path, **{**settings, **change})


def test_a_checkpoint_of_other_data_model_or_method_is_refused(tmp_path, settings):
    path = tmp_path / "run"
    map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)
    with pytest.raises(ValueError, match="other method"):
        variational.fit(network(), Categorical(), checkpoint=path, **settings)
    with pytest.raises(ValueError, match="other parameters"):
        map_posterior.fit(nn.Linear(2, 3), Categorical(), checkpoint=path, **settings)
    x, y = settings["train"]
    with pytest.raises(ValueError, match="other training data"):
        map_posterior.fit(network(), Categorical(), checkpoint=path, **{**settings, "train": (x + 1, y)})


def test_a_checkpoint_of_another_network_or_other_held_out_data_is_refused(tmp_path, settings):
    trained = map_posterior.fit(network(), Categorical(), settings["train"], epochs=1).network
    options = {**settings, "checkpoint": tmp_path / "run"}
    variational.fit(trained, Categorical(), **options)
    with pytest.raises(ValueError, match="other model"):
        variational.fit(network(), Categorical(), **options)
    x, y = settings["held_out"]
    with pytest.raises(ValueError, match="held-out"):
        variational.fit(trained, Categorical(), **{**options, "held_out": (x + 1, y)})


@pytest.mark.parametrize("option", [{"weight_decay": 0.1}, {"betas": (0.8, 0.9)}])
def test_a_checkpoint_of_another_optimiser_is_refused(tmp_path, settings, option):
    options = {**settings, "checkpoint": tmp_path / "run"}
    map_posterior.fit(network(), Categorical(), optimizer=lambda p, lr: torch.optim.AdamW(p, lr), **options)
    with pytest.raises(ValueError, match="another run"):
        map_posterior.fit(
            network(), Categorical(), optimizer=lambda p, lr: torch.optim.AdamW(p, lr, **option), **options
        )


def test_a_checkpoint_that_cannot_be_written_is_refused_before_training(tmp_path, settings):
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        map_posterior.fit(network(), Categorical(), checkpoint=tmp_path, progress=_never, **settings)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Cannot write the checkpoint"):
        map_posterior.fit(network(), Categorical(), checkpoint=tmp_path / "file" / "run", progress=_never, **settings)


def _never(epoch: Epoch) -> None:
    raise AssertionError("trained")


def test_a_held_out_loader_does_not_change_the_training(blobs):
    loader = DataLoader(TensorDataset(*blobs[1]), batch_size=16, shuffle=True)
    one, two = (
        map_posterior.fit(network(), Categorical(), blobs[0], epochs=3, held_out=held_out)
        for held_out in (None, loader)
    )
    assert same(one, two)


def test_an_empty_loader_is_refused(blobs):
    x, y = blobs[0]
    loader = DataLoader(TensorDataset(x[:5], y[:5]), batch_size=16, drop_last=True)
    with pytest.raises(ValueError, match="at least one input"):
        map_posterior.fit(network(), Categorical(), loader, epochs=2)


def test_the_old_name_of_the_optimizer_is_heeded_and_told():
    with pytest.warns(DeprecationWarning, match="`optimiser` is now `optimizer`"):
        assert Training(optimiser=torch.optim.SGD).optimizer is torch.optim.SGD


# Checkpoints that are damaged, incomplete, or of other data


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half"])
def test_a_broken_checkpoint_is_refused(tmp_path, settings, content):
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"run is not a checkpoint .*remove it to start over"):
        map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)
    assert path.read_bytes() == content


@pytest.fixture(scope="module")
def left() -> dict[str, bytes]:
    """What the fit of each method left, once one was stopped."""
    return {}


@pytest.fixture(params=FITS)
def half_way(request, tmp_path, settings, left):
    """A fit that was stopped in its third epoch, and the file that it left."""
    fit, path = FITS[request.param], tmp_path / "run"
    settings["epochs"] = 5

    def stop(epoch: Epoch) -> None:
        if epoch.number == 3:
            raise Killed

    def run(**changes):
        return fit(network(), Categorical(), checkpoint=path, checkpoint_seconds=0, **{**settings, **changes})

    if request.param not in left:
        with pytest.raises(Killed):
            run(progress=stop)
        left[request.param] = path.read_bytes()
    path.write_bytes(left[request.param])
    return run, path


def test_one_flipped_bit_anywhere_is_refused(half_way):
    run, path = half_way
    whole = path.read_bytes()
    places = [*random.Random(0).sample(range(len(whole)), 40), 0, len(whole) - 1, len(whole) - 70]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="run is not a checkpoint that this dapcal reads"):
            run()
    for length in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="checksum does not match"):
            run()
    path.write_bytes(whole)
    run()


def test_one_changed_label_or_input_in_any_row_is_refused(half_way, settings):
    run, _ = half_way
    x, y = settings["train"]
    for row in (0, 1, 77, 148, 149):
        label, number = y.clone(), x.clone()
        label[row] = (label[row] + 1) % 3
        number[row, 1] += 1e-6
        for train in ((x, label), (number, y)):
            with pytest.raises(ValueError, match=r"of another run \(other training data\)"):
                run(train=train)


def test_every_row_of_large_data_counts(settings):
    """The fingerprint looked at a thousand rows of each tensor."""
    x, y = torch.randn(5000, 2), torch.arange(5000) % 3
    whole = checkpoints.digest(Labelled(x, y))
    for row in (1, 2, 2503, 4998):
        other = y.clone()
        other[row] = (other[row] + 1) % 3
        assert checkpoints.digest(Labelled(x, other)) != whole


def keys_of(state: dict, above: tuple = ()) -> list[tuple]:
    found = []
    for name, part in state.items():
        found.append((*above, name))
        if isinstance(part, dict):
            found += keys_of(part, (*above, name))
    return found


def test_a_missing_key_is_refused_even_under_a_valid_checksum(half_way):
    run, path = half_way
    saved = torch.load(path, weights_only=True)
    places = keys_of(saved["run"])
    assert ("state", "optimizer", "state", 0) in places
    for place in random.Random(0).sample(places, 25):
        state = copy.deepcopy(saved["run"])
        inner = state
        for name in place[:-1]:
            inner = inner[name]
        del inner[place[-1]]
        checkpoints.write(path, saved["marks"], state)
        with pytest.raises(ValueError, match="run is not a checkpoint that this dapcal reads"):
            run()
    checkpoints.write(path, saved["marks"], saved["run"])
    run()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("marks", "batch_size"), torch.zeros(2)),
        (("run", "state", "optimizer", "param_groups", 0, "params", 2), 0),  # moments of another parameter
        (("run", "state", "optimizer", "param_groups", 0, "weight_decay"), 2**70),
    ],
)
def test_what_training_cannot_use_is_refused_even_under_a_valid_checksum(tmp_path, settings, place, value):
    path = tmp_path / "run"
    map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)
    saved = torch.load(path, weights_only=True)
    saved["run"]["epoch"] -= 1
    inner = saved
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    checkpoints.write(path, saved["marks"], saved["run"])
    with pytest.raises(ValueError, match="run is not a checkpoint that this dapcal reads"):
        map_posterior.fit(network(), Categorical(), checkpoint=path, **settings)


def test_a_full_disk_says_so_and_keeps_the_last_good_checkpoint(half_way, settings):
    run, path = half_way
    whole = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, hard))
    try:
        with pytest.raises(OSError, match=r"Could not write the checkpoint .*the last one is as it was.*Make room"):
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == whole
    assert list(path.parent.iterdir()) == [path]
    resumed = run()
    path.unlink()
    assert same(resumed, run())


class Pairs(Dataset):
    """Read one by one, as pictures from a folder are."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.x[index] + self.noise(), int(self.y[index])


@pytest.mark.parametrize(
    "noise",
    [lambda: 0.0, lambda: float(torch.rand(())), random.random, np.random.default_rng().normal],
    ids=["none", "torch's", "Python's", "its own"],
)
def test_a_loader_of_single_pairs_is_known_by_its_labels(blobs, noise):
    x, y = blobs[0]
    other = y.clone()
    other[77] = (other[77] + 1) % 3

    def digest(labels: torch.Tensor) -> str:
        return checkpoints.digest(DataLoader(Pairs(x, labels, noise), batch_size=16))

    states = torch.random.get_rng_state(), random.getstate()
    assert digest(y) == digest(y) != digest(other)
    assert torch.equal(states[0], torch.random.get_rng_state())
    assert states[1] == random.getstate()


def test_a_stream_cannot_be_known():
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
            return iter([(torch.zeros(2), 0)])

    with pytest.warns(DapcalWarning, match="cannot tell one IterableDataset from another"):
        checkpoints.digest(DataLoader(Stream()))


# Early stopping and the held-out NLL


@pytest.mark.parametrize("method", FITS)
def test_patience_goes_back_to_the_best_epoch(blobs, method):
    (x, y), held_out = blobs
    wrong = (x[:30], (y[:30] + torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(0))) % 3)
    epochs: list[Epoch] = []
    options = {"epochs": 200, "learning_rate": 0.02, "batch_size": 8, "schedule": constant, "prior_scale": 10.0}
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
    stopped = FITS[method](
        model, Categorical(), wrong, held_out=held_out, patience=5, progress=epochs.append, **options
    )
    nll = [epoch.held_out_nll for epoch in epochs]
    best = nll.index(min(nll))
    assert len(nll) == best + 1 + 5 < 200
    again = FITS[method](model, Categorical(), wrong, held_out=held_out, **{**options, "epochs": best + 1})
    assert torch.equal(stopped.center, again.center)


def test_the_held_out_nll_of_map_is_that_of_the_network(blobs):
    epochs: list[Epoch] = []
    posterior = map_posterior.fit(
        network(), Categorical(), blobs[0], epochs=3, held_out=blobs[1], batch_size=50, progress=epochs.append
    )
    x, y = blobs[1]
    expected = nn.functional.cross_entropy(posterior.network(x), y)
    assert epochs[-1].held_out_nll == pytest.approx(expected.item(), rel=1e-5)
    assert [e.number for e in epochs] == [1, 2, 3]
    assert {e.total for e in epochs} == {3}


def test_held_out_data_alone_change_nothing(blobs):
    one, two = (
        map_posterior.fit(network(), Categorical(), blobs[0], epochs=4, held_out=held_out)
        for held_out in (None, blobs[1])
    )
    assert same(one, two)


# Optimisers, schedules, precision


def test_any_optimiser_and_schedule(blobs):
    seen = []

    def schedule(optimizer, steps):
        seen.append((type(optimizer), steps))
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

    posterior = map_posterior.fit(
        network(),
        Categorical(),
        blobs[0],
        epochs=20,
        batch_size=32,
        optimizer=lambda parameters, rate: torch.optim.SGD(parameters, rate, momentum=0.9, nesterov=True),
        schedule=schedule,
    )
    assert seen == [(torch.optim.SGD, 20 * 5)]
    x, y = blobs[1]
    assert (posterior.network(x).argmax(-1) == y).double().mean() > 0.95


def test_the_schedule_reaches_zero(blobs):
    rates = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    map_posterior.fit(network(), Categorical(), blobs[0], epochs=5, batch_size=30, learning_rate=0.3, optimizer=Watched)
    assert len(rates) == 25
    expected = [0.15 * (1 + math.cos(math.pi * i / 25)) for i in range(25)]
    assert rates == pytest.approx(expected)


def test_plateau_schedules_are_refused(blobs):
    with pytest.raises(TypeError, match="ReduceLROnPlateau"):
        map_posterior.fit(
            network(),
            Categorical(),
            blobs[0],
            schedule=lambda o, steps: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        )


@pytest.mark.parametrize("method", FITS)
def test_bfloat16_runs_the_network_and_keeps_the_weights(blobs, method):
    seen = []
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            out = self.inner(x)
            seen.append(out.dtype)
            return out

    posterior = FITS[method](Watched(), Categorical(), blobs[0], epochs=20, learning_rate=0.02, bf16=True)
    assert seen[0] == torch.bfloat16
    assert posterior.draws.dtype == torch.float32
    x, y = blobs[1]
    assert (posterior.network(x).argmax(-1) == y).double().mean() > 0.9


@pytest.mark.parametrize(
    "wrong", [{"epochs": -1}, {"batch_size": 0}, {"learning_rate": 0.0}, {"patience": 3}, {"learning_rate": math.nan}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="Expected"):
        Training(**wrong)


def test_unknown_options_are_refused(blobs):
    with pytest.raises(TypeError, match="lerning_rate"):
        map_posterior.fit(network(), Categorical(), blobs[0], lerning_rate=0.1)


# Batch norm, dropout, seeds


def test_a_last_batch_of_one_suits_batch_norm(blobs):
    x, y = blobs[0]
    map_posterior.fit(network(), Categorical(), (x[:33], y[:33]), epochs=2, batch_size=16)


def test_frozen_batch_norm_keeps_its_statistics(blobs):
    model = network()
    model[1].requires_grad_(False)
    before = model[1].running_mean.clone()
    options = {"epochs": 2, "held_out": blobs[1]}
    assert torch.equal(map_posterior.fit(model, Categorical(), blobs[0], **options).network[1].running_mean, before)
    model[1].weight.requires_grad_(True)
    assert not torch.equal(map_posterior.fit(model, Categorical(), blobs[0], **options).network[1].running_mean, before)


def test_dropout_is_seeded_and_the_global_generator_left_alone(blobs):
    before = torch.random.get_rng_state()
    one, two, three = (map_posterior.fit(network(), Categorical(), blobs[0], epochs=3, seed=s) for s in (0, 0, 1))
    assert same(one, two)
    assert not same(one, three)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_noise_level_is_part_of_a_checkpoint(tmp_path):
    x = torch.randn(60, 1, generator=torch.Generator().manual_seed(0))
    path, options = tmp_path / "run", {"epochs": 10, "learning_rate": 0.05}
    one, two = (
        map_posterior.fit(nn.Linear(1, 1), Gaussian(), (x, 2 * x), checkpoint=path, **options) for _ in range(2)
    )
    assert one.likelihood == two.likelihood
    assert one.likelihood.noise != 1.0


# The progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    """One of ordinary width."""
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def drawn(stream: Terminal) -> list[str]:
    """What stood in the bar's line, one drawing after the other, without control codes."""
    return [line for line in re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", stream.getvalue()).split("\r") if line.strip()]


def test_the_bar_shows_loss_and_held_out_nll(terminal):
    bar = Bar("member 12/20", terminal)
    for number in range(1, 4):
        bar(Epoch(number, 3, 0.5 / number, 0.25))
    first, *_, last = drawn(terminal)
    assert re.fullmatch(r"member 12/20 \S+ +1/3 loss 0\.5000  held-out NLL 0\.2500 --:--", first)
    assert re.fullmatch(r"member 12/20 ━+ 3/3 loss 0\.1667  held-out NLL 0\.2500 00:00\n", last)
    assert terminal.getvalue().count(HIDE_CURSOR) == terminal.getvalue().count(SHOW_CURSOR) == 1


def test_short_epochs_are_not_all_drawn(terminal):
    bar = Bar("MAP", terminal)
    for number in range(1, 3000):
        bar(Epoch(number, 3000, 0.5, None))
    bar(Epoch(3000, 3000, 0.25, None))
    lines = drawn(terminal)
    assert len(lines) < 300
    assert "3000/3000 loss 0.2500" in lines[-1]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_terminal_is_as_it_was_after_a_training_that_failed(terminal, error, monkeypatch):
    def training() -> None:
        with told(True, "MAP") as progress:
            progress(Epoch(1, 9, 0.5, None))
            progress(Epoch(2, 9, 0.4, None))
            raise error

    monkeypatch.setattr(sys, "stderr", terminal)
    before = sys.stdout, sys.stderr
    with pytest.raises(error):
        training()
    assert "2/9 loss 0.4000" in drawn(terminal)[-1]
    assert terminal.getvalue().endswith(SHOW_CURSOR)
    assert (sys.stdout, sys.stderr) == before


def test_without_a_terminal_the_bar_writes_ten_lines(capsys, blobs):
    map_posterior.fit(network(), Categorical(), blobs[0], epochs=40, progress=True)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert [line.split()[1] for line in lines] == [f"{number}/40" for number in range(4, 41, 4)]
    assert all("loss" in line and "held-out" not in line for line in lines)
    assert "\x1b" not in printed.err
    assert printed.out == ""


def test_a_training_that_stops_early_ends_with_a_line():
    stream = io.StringIO()
    bar = Bar("MAP", stream)
    for number in range(1, 36):
        bar(Epoch(number, 100, 0.5, 0.25))
    bar.end()
    bar.end()
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["10/100", "20/100", "30/100", "35/100"]


def test_a_bar_names_the_extra_that_it_needs(monkeypatch, blobs):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r"needs rich; install it with: pip install 'dapcal\[progress\]'"):
        map_posterior.fit(network(), Categorical(), blobs[0], epochs=1, progress=True)
    map_posterior.fit(network(), Categorical(), blobs[0], epochs=1, progress=lambda epoch: None)
