"""Places, options and resumed trainings of a GPT with Muon."""

from support.helpers import states_of, training
from support.models import gpt_step, tiny_gpt

import infinity
from infinity.model.hidden_matrices import hidden_matrices

HOST = {"param_tier": "host", "optimizer_state_tier": "host"}
DEVICE = {"param_tier": "device", "optimizer_state_tier": "device"}
OPTIONS = {"lr": 0.02, "adamw": {"lr": 3e-3}}


def halves(model):
    """The matrices of hidden layers, and all other parameters."""
    matrices = hidden_matrices(model)
    return matrices, [param for param in model.parameters() if all(param is not other for other in matrices)]


def resumed(directory, checkpoint, load, **config):
    """The states after two more steps from a checkpoint. config: also of `training`."""
    how = {"optimizer": infinity.Muon, "options": OPTIONS} | config
    with training(tiny_gpt, directory, seed=1, **how) as (model, engine, optimizer):
        load(checkpoint, model, optimizer)
        for step in (2, 3):
            gpt_step(model, optimizer, step)
        return states_of(engine, model)


def load_dcp(checkpoint, model, optimizer):
    infinity.load_dcp(checkpoint, model, optimizer, trust_pickle=True)
