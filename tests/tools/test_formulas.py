import pytest

from infinity.tools.meta_models import gpt_size
from infinity.tools.predict.formulas import (
    USUAL_STATE_NBYTES,
    activation_working_nbytes,
    activations_intensity,
    checkpoint_nbytes,
    efficiency,
    model_working_nbytes,
    required_bandwidth,
    states_intensity,
    step_flops,
    transformer_parameters,
    weights_intensity,
)

TIB, GIB, PEAK = 2**40, 2**30, 70e12

# Table 2a of the paper, with 10K = 10240. Columns: parameters (T), layers, hidden size, heads, states (TiB), checkpoints at batch 32
# (TiB). Then working memory of one linear layer (GiB), activations between two checkpoints at batch 4 (GiB).
TABLE = [
    (0.10, 80, 10240, 128, 1.83, 0.05, 1.56, 1.63),
    (0.50, 100, 20480, 160, 9.16, 0.12, 6.25, 2.50),
    (1.01, 128, 25600, 256, 18.31, 0.20, 9.77, 3.56),
    (10.05, 195, 65536, 512, 182.81, 0.76, 64.00, 8.00),
    (101.47, 315, 163840, 1024, 1845.70, 3.08, 400.00, 18.00),
]


@pytest.mark.parametrize("parameters, layers, hidden, heads, states, checkpoints, working, activations", TABLE)
def test_formulas_have_the_memory_of_the_models_of_the_paper(parameters, layers, hidden, heads, states, checkpoints, working, activations):
    num = transformer_parameters(layers, hidden)
    assert round(num / 1e12, 2) == pytest.approx(parameters, abs=0.011)
    assert round(num * USUAL_STATE_NBYTES / TIB, 2) == pytest.approx(states, abs=0.011)
    assert checkpoint_nbytes(batch=32, seq=1024, hidden=hidden, layers=layers) / TIB == pytest.approx(checkpoints, abs=0.006)
    assert round(model_working_nbytes(hidden) / GIB, 2) == working
    assert activation_working_nbytes(batch=4, seq=1024, hidden=hidden, heads=heads) / GIB == pytest.approx(activations, abs=0.006)


def test_tiles_divide_the_working_memory_of_a_layer():
    assert model_working_nbytes(8192, tiles=16) == model_working_nbytes(8192) // 16


def test_fewer_activation_checkpoints_take_less_and_more_between_them():
    assert checkpoint_nbytes(batch=1, seq=2, hidden=3, layers=8, blocks_between=4) == 2 * 1 * 2 * 3 * 8 // 4
    assert activation_working_nbytes(batch=1, seq=2, hidden=3, heads=5, blocks_between=4) == 1 * 2 * 4 * (16 * 3 + 2 * 5 * 2)


def test_required_bandwidths_are_those_of_the_paper():
    weights = required_bandwidth(weights_intensity(batch=1, seq=1024), 0.5, PEAK)
    states = required_bandwidth(states_intensity(batch=1, seq=1024), 0.5, PEAK)
    assert weights / 1e9 == pytest.approx(70, rel=0.03)
    assert states == pytest.approx(4 * weights)
    assert required_bandwidth(states_intensity(batch=2, seq=1024), 0.9, PEAK) / 1e12 == pytest.approx(1.5, rel=0.2)
    for hidden, gbps in ((2048, 2), (8192, 1), (65536, 1)):  # 1 to 4 GB/s are enough
        assert efficiency(activations_intensity(hidden=hidden), gbps * 1e9, PEAK) > 0.5


def test_efficiency_and_required_bandwidth_are_inverse():
    for share in (0.1, 0.5, 0.99):
        assert efficiency(512, required_bandwidth(512, share, PEAK), PEAK) == pytest.approx(share)


def test_a_step_is_three_or_four_forward_passes():
    assert step_flops(batch=2, seq=3, parameters=5) == 2 * 4 * 2 * 3 * 5
    assert step_flops(batch=2, seq=3, parameters=5, recompute=False) == 2 * 3 * 2 * 3 * 5


@pytest.mark.parametrize("parameters", [1e6, 1.3e9, 175e9, 1e12, 1e14])
def test_the_sizes_of_gpt_size_are_close_to_the_number_of_parameters(parameters):
    hidden, layers = gpt_size(parameters)
    assert hidden % 128 == 0
    assert transformer_parameters(layers, hidden) == pytest.approx(parameters, rel=0.25)


def test_sizes_of_a_trillion_parameters_are_those_of_the_paper():
    hidden, layers = gpt_size(1.01e12)
    assert hidden == pytest.approx(25600, rel=0.05)
    assert layers == pytest.approx(128, rel=0.1)
