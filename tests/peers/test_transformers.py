"""Hugging Face classifiers: token ids go in, an output with `logits` comes out; dropout and tied weights included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

import dapcal
from dapcal.distances import Space
from dapcal.distances.projectors import Features
from dapcal.likelihoods import Categorical
from dapcal.posteriors import gaussian, samples, variational
from dapcal.posteriors import map as map_posterior

END, WORDS = 2, 40


def bert():
    return DistilBertForSequenceClassification(
        DistilBertConfig(
            vocab_size=WORDS, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=12, num_labels=3
        )
    )


def bart():
    """One table of embeddings for encoder and decoder."""
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    ends = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": END}
    return BartForSequenceClassification(BartConfig(vocab_size=WORDS, num_labels=3, **sizes, **layers, **ends))


NETWORKS = {"bert": (bert, "classifier", 12), "bart": (bart, "classification_head.out_proj", 30)}  # head, epochs


def sentences(n, low=3, high=21):
    """Word ids; the class is that of the first word."""
    x = torch.randint(low, high, (n, 6))
    x[:, -1] = END
    return x, (x[:, 0] - low) % 3


@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_are_the_logits(network):
    make, _, _ = NETWORKS[network]
    model, (x, _) = make(), sentences(10)
    assert model.training  # dropout is on
    posterior = map_posterior.point(model, Categorical())
    assert model.training
    expected = copy.deepcopy(model).eval()(x).logits
    torch.testing.assert_close(posterior.outputs(x)[0], expected)
    torch.testing.assert_close(posterior.network(x).logits, expected)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_weight_may_be_random(network):
    make, _, _ = NETWORKS[network]
    model, (x, _) = make(), sentences(6)
    scale = {n: torch.full_like(p, 0.05) for n, p in model.named_parameters()}
    posterior = gaussian.diagonal(model, Categorical(), scale, draws=3)
    for draw, outputs in zip(posterior.draws, posterior.outputs(x), strict=True):
        own = copy.deepcopy(model).eval()
        nn.utils.vector_to_parameters(draw, own.parameters())  # tied weights are one parameter
        torch.testing.assert_close(outputs, own(x).logits)
    states = [copy.deepcopy(make().state_dict()) for _ in range(2)]
    brought = samples.from_state_dicts(model, Categorical(), states)
    for state, outputs in zip(states, brought.outputs(x), strict=True):
        own = make().eval()
        own.load_state_dict(state)
        torch.testing.assert_close(outputs, own(x).logits)


def test_tied_weights_are_tied():
    names = [n for n, _ in bart().named_parameters(remove_duplicate=False)]
    assert "model.encoder.embed_tokens.weight" in names
    assert "model.encoder.embed_tokens.weight" not in dict(bart().named_parameters())


@pytest.mark.parametrize("network", NETWORKS)
def test_calibrates_from_end_to_end(network, tmp_path):
    make, head, epochs = NETWORKS[network]
    train, held_out, x = sentences(240), sentences(80), sentences(40)[0]
    fitted = map_posterior.fit(make(), Categorical(), train, epochs=epochs, learning_rate=0.01, batch_size=48).network
    assert (fitted(held_out[0]).logits.argmax(-1) == held_out[1]).float().mean() > 0.9
    scale = {n: torch.full_like(p, 0.1) for n, p in fitted.named_parameters() if n.startswith(head)}
    posterior = gaussian.diagonal(fitted, Categorical(), scale, draws=10)
    assert posterior.layout.names == (f"{head}.weight", f"{head}.bias")
    distance = Space(Features(head), radius=None)
    strange = torch.randint(21, WORDS, (60, 6))  # words that were never seen
    strange[:, -1] = END
    calibrated = dapcal.calibrate(posterior, train=train, held_out=held_out, distance=distance, ood=strange)
    assert calibrated(strange).entropy.mean() > calibrated(x).entropy.mean()
    assert calibrated(x).probs.shape == (40, 3)
    calibrated.save(tmp_path / "head.dap")
    torch.testing.assert_close(dapcal.load(tmp_path / "head.dap", make())(x).probs, calibrated(x).probs)


def test_variational_inference():
    model, train = bert(), sentences(40)
    posterior = variational.fit(model, Categorical(), train, epochs=1, draws=2)
    assert posterior.outputs(train[0]).shape == (2, 40, 3)
