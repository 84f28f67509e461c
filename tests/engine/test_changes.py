"""A weight is changed in each way, at each moment, in each tier. The result is that of plain PyTorch, or the same refusal in every tier."""

import contextlib

import pytest
import torch
from support.helpers import assert_same_bits, plain, training
from support.models import H, inputs, loss_of
from support.parameters import PLACES, assert_alike
from torch import nn

from infinity.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

VALUE = torch.linspace(-0.5, 0.5, H * H).reshape(H, H)


def assign(layer):
    layer.weight.data = VALUE.clone()


def data_in_place(layer):
    layer.weight.data.add_(0.01)
    layer.weight.data.mul_(0.5).lerp_(VALUE, 0.25)


def data_copied(layer):
    layer.weight.data.copy_(VALUE)


def data_by_index(layer):
    layer.weight.data[1:3] = 0.25
    layer.weight.data[:, 0].clamp_(-0.1, 0.1)


def in_place(layer):
    with torch.no_grad():
        layer.weight.add_(0.01).copy_(VALUE * layer.weight)


def by_index(layer):
    with torch.no_grad():
        layer.weight[2] = 0.5


def detached(layer):
    layer.weight.detach().add_(0.01)


def initialised(layer):
    nn.init.uniform_(layer.weight, 0.0, 0.1)


def foreach(layer):
    with torch.no_grad():
        torch._foreach_mul_([layer.weight, layer.bias], 0.5)


def out_given(layer):
    with torch.no_grad():
        torch.mul(VALUE, 0.5, out=layer.weight)


def other_storage(layer):
    with torch.no_grad():
        layer.weight.set_(VALUE.clone())


def from_vector(layer):
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, H * H + H), layer.parameters())


def replaced(layer):
    layer.weight = nn.Parameter(VALUE.clone(), requires_grad=layer.weight.requires_grad)


def loaded(layer):
    layer.load_state_dict({"weight": VALUE, "bias": torch.ones(H)})


def loaded_by_assignment(layer):
    layer.load_state_dict({"weight": VALUE.clone(), "bias": torch.ones(H)}, assign=True)


WAYS = [assign, data_in_place, data_copied, data_by_index, in_place, by_index, detached, initialised, foreach, out_given, other_storage]
WAYS += [from_vector, replaced, loaded, loaded_by_assignment]
LOADS = (loaded, loaded_by_assignment)  # the engine loads the values, also if no op holds the weight
IN_PLAIN = {loaded_by_assignment: loaded}  # the engine keeps the parameter. PyTorch's optimizer would keep the old one


class Changing(nn.Module):
    """Calls `change` with `layer` at the moment `moment` of a step."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, H)
        self.layer.register_forward_pre_hook(lambda layer, args: self.at("in its op"))
        self.layer.register_forward_hook(lambda layer, args, output: self.at("in its op, computed"))
        self.change = self.moment = None
        self.shape = (3, H)

    def at(self, moment):
        if moment == self.moment:
            self.change(self.layer)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        self.at("in forward")
        x = torch.tanh(self.layer(x))
        self.at("in forward, computed")
        return self.last(x)


def step_of(model, optimizer, step):
    loss = loss_of(model(inputs(model, step)))
    model.at("before backward")
    loss.backward()
    model.at("before step")
    optimizer.step()
    optimizer.zero_grad()
    model.at("between steps")
    return loss.detach()


REFUSED = "layer.weight has no value here .*infinity.gathered"
MODIFIED = "modified by an inplace operation"
HALF_UPDATED = "new weights between a backward pass that has begun to update and its step"
MOMENTS = {  # the error of a change at this moment. None: the change has the effect of plain PyTorch
    "in forward": None,
    "in its op": None,
    "in forward, computed": MODIFIED,
    "in its op, computed": MODIFIED,
    "before backward": REFUSED,
    "before step": REFUSED,
    "between steps": REFUSED,
}


def expected_error(way, moment):
    if way is replaced:  # the old weight itself is unchanged
        return None
    if way in LOADS:
        return {"before backward": MODIFIED, "before step": HALF_UPDATED, "between steps": None}.get(moment, MOMENTS[moment])
    return MOMENTS[moment]


@pytest.mark.slow
@pytest.mark.few(7)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_weight_changes_as_in_plain_pytorch_or_is_refused_in_each_tier(way, moment, tmp_path):
    error = expected_error(way, moment)
    reference_model, reference = plain(Changing)
    losses = []
    for step in range(3):
        reference_model.change, reference_model.moment = IN_PLAIN.get(way, way), moment if step == 1 and not error else None
        losses.append(step_of(reference_model, reference, step))
    for place, config in PLACES.items():
        with training(Changing, tmp_path / place, **config) as (model, engine, optimizer):
            for step in range(3):
                model.change, model.moment = way, moment if step == 1 else None
                with pytest.raises((UsageError, RuntimeError), match=error) if error and step == 1 else contextlib.nullcontext():
                    got = step_of(model, optimizer, step)
                    assert_same_bits(got, losses[step], f"{place}: loss of step {step}")
                if error and step == 1:
                    break
            else:
                assert_alike(engine, model, reference_model, reference)
