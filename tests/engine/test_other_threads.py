"""Saving and loading during interrupts of any signal handler, and in several threads."""

import contextlib
import random
import signal
import threading
import time

import pytest
import torch
from support.faults import linears
from support.helpers import NVME, assert_same_states, states_of, training

import infinity

SETTINGS = {"chunk_mib": 1 / 256, **NVME}


def step(model, optimizer, number):
    loss = model(torch.full((2, 48), 1.0 + number)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def interrupted(work, seconds):
    """Run `work` until a signal handler of the program interrupts the call after so many seconds. Returns whether the interrupt came inside."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def duration(work):
    start = time.monotonic()
    work()
    return time.monotonic() - start


MOMENTS = [12, pytest.param(100, marks=pytest.mark.long)]


@pytest.mark.long
@pytest.mark.parametrize("num", MOMENTS)
def test_after_an_interrupt_inside_load_the_next_load_succeeds(tmp_path, num):
    chance, num_interrupted = random.Random(num), 0
    with training(linears, tmp_path / "swap", **SETTINGS) as (model, engine, optimizer):
        step(model, optimizer, 0)
        saved = tmp_path / "saved"
        infinity.save(saved, model, optimizer)
        expected = states_of(engine, model)
        load = lambda: infinity.load(saved, model, optimizer)
        seconds = duration(load)
        for number in range(num):
            step(model, optimizer, 1)
            was = interrupted(load, chance.uniform(0.02, 1.1) * seconds)
            num_interrupted += was
            if was:  # the old state, the new state, or a refusal with a remedy
                try:
                    step(model, optimizer, 2)
                except infinity.UsageError as error:
                    assert "the last infinity.load failed half-way" in str(error) and "Load one" in str(error)
                    optimizer.zero_grad()
            load()
            assert_same_states(states_of(engine, model), expected, f"after interrupt {number}")
    assert num_interrupted >= num // 3


@pytest.mark.long
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("num", MOMENTS)
def test_after_an_interrupt_inside_save_one_whole_checkpoint_exists(tmp_path, num, wait):
    chance, num_interrupted = random.Random(num), 0
    with training(linears, tmp_path / "swap", **SETTINGS) as (model, engine, optimizer):
        saved, known = tmp_path / "saved", {}

        def save(number, wait=True):
            known[number] = states_of(engine, model)
            infinity.save(saved, model, optimizer, extra=number, wait=wait)

        step(model, optimizer, 0)
        seconds = duration(lambda: save(0))
        for number in range(1, num + 1):
            step(model, optimizer, number)
            was = interrupted(lambda: save(number, wait), chance.uniform(0.02, 1.1) * seconds)
            num_interrupted += was
            step(model, optimizer, number)  # training continues
            infinity.save(tmp_path / "other", model, optimizer)  # waits for the end of the previous save
            found = infinity.load(saved, model, optimizer).extra
            assert found == number or (was and found == number - 1), (number, found)
            assert_same_states(states_of(engine, model), known[found], f"after interrupt {number}")
            save(number)
    assert wait is False or num_interrupted >= num // 4


# ---- other threads ----


def elsewhere(work):
    """Run `work` in a new thread. Returns the exception, or None."""
    found = []

    def run():
        try:
            work()
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def test_other_threads_may_not_read_or_change_the_state_during_training(tmp_path):
    with training(linears, tmp_path / "swap", **SETTINGS) as (model, engine, optimizer):
        step(model, optimizer, 0)
        saved = tmp_path / "saved"
        infinity.save(saved, model, optimizer)
        weight = model[0].weight

        def gather():
            with infinity.gathered(weight):
                pass

        calls = {
            "infinity.save": lambda: infinity.save(saved, model, optimizer),
            "infinity.load": lambda: infinity.load(saved, model, optimizer),
            r"state_dict": model.state_dict,
            r"read_state": lambda: engine.read_state(weight),
            r"flush": engine.flush,
            "a new value": lambda: engine.parameter_values.give(weight, torch.zeros(48 * 48)),
            "infinity.gathered": gather,
        }
        for name, call in calls.items():
            error = elsewhere(call)
            assert type(error) is infinity.UsageError and name in str(error) and "thread that calls step()" in str(error), (name, error)
            call()  # the remedy: a call in the training thread
        assert elsewhere(lambda: infinity.save(saved, model, optimizer, wait=False).wait()) is not None
        infinity.save(saved, model, optimizer, wait=False).wait()


@pytest.mark.long
def test_another_thread_may_train_after_the_first_one_has_ended(tmp_path):
    with training(linears, tmp_path / "swap", **SETTINGS) as (model, engine, optimizer):
        assert elsewhere(lambda: step(model, optimizer, 0)) is None
        infinity.save(tmp_path / "saved", model, optimizer)
        assert infinity.load(tmp_path / "saved", model, optimizer).step == 1


def test_a_model_between_steps_may_be_evaluated_in_any_thread(tmp_path):
    with training(linears, tmp_path / "swap", **SETTINGS) as (model, engine, optimizer):
        step(model, optimizer, 0)
        with torch.no_grad():
            expected = model(torch.ones(2, 48))
        found = []

        def serve():
            with torch.no_grad():
                found.append(model(torch.ones(2, 48)))

        assert elsewhere(serve) is None and torch.equal(found[0], expected)  # the evaluation has the output of the training thread


@pytest.mark.long
def test_each_checkpoint_of_another_thread_is_of_one_step_or_refused(tmp_path):
    """The other thread begins before the first step, and repeats the call until training ends."""
    known, made, refused, ended = {}, [], [], threading.Event()

    def digest(engine, model):
        return tuple(tuple(value.view(-1).tolist()) for state in states_of(engine, model).values() for value in state.values())

    with training(linears, tmp_path / "first", **SETTINGS) as (model, engine, optimizer):
        known[digest(engine, model)] = 0
        for number in range(12):
            step(model, optimizer, number)
            known[digest(engine, model)] = number + 1
    with training(linears, tmp_path / "second", **SETTINGS) as (model, engine, optimizer):

        def save():
            while not ended.is_set():
                try:
                    infinity.save(tmp_path / str(len(made)), model, optimizer)
                    made.append(tmp_path / str(len(made)))
                except infinity.UsageError as error:
                    refused.append(str(error))
                    time.sleep(0.001)

        thread = threading.Thread(target=save)
        thread.start()
        for number in range(12):
            step(model, optimizer, number)
        ended.set()
        thread.join()
        assert refused
        for path in made:
            found = infinity.load(path, model, optimizer)
            assert known[digest(engine, model)] == found.step


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{}, SETTINGS, SETTINGS | {"update": "deferred"}])
def test_the_second_of_two_simultaneous_passes_is_refused(settings, tmp_path):
    def evaluate():
        with torch.no_grad():
            model(torch.ones(2, 48))

    def refused():
        error = elsewhere(evaluate)
        assert type(error) is infinity.UsageError and "hold one threading.Lock around each training step" in str(error), error
        met.append(error)

    states = []
    for disturbed in (False, True):
        with training(linears, tmp_path / str(disturbed), **settings) as (model, engine, optimizer):
            met = []
            step(model, optimizer, 0)
            if disturbed:  # an evaluation during training
                hook = model[1].register_forward_hook(lambda *_: refused())
            loss = model(torch.full((2, 48), 2.0)).square().mean()
            if disturbed:
                hook.remove()
                hook = model[1].register_full_backward_hook(lambda *_: refused())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if disturbed:
                hook.remove()
                assert met
                assert elsewhere(evaluate) is None  # between two steps
                hook = model[1].register_forward_hook(lambda *_: found.append(elsewhere(lambda: step(model, optimizer, 2))))
                found = []
                evaluate()  # a step during an evaluation
                hook.remove()
                assert "hold one threading.Lock" in str(found[0])
            step(model, optimizer, 2)
            states.append(states_of(engine, model))
    assert_same_states(states[1], states[0], "with refused evaluations")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["offload", "init"])
def test_a_notebook_cell_may_run_again_without_close(how, tmp_path):
    """Until the cell assigns a name again, the name refers to an object of the previous run. The directory is the same."""
    made = {
        "offload": "model = linears()\ninfinity.offload(model, config)",
        "init": "with infinity.init(config):\n    model = linears()",
    }
    trains = "optimizer = infinity.AdamW(model.parameters())\nloss = model(torch.ones(2, WIDTH)).square().mean()\nloss.backward()\noptimizer.step()"
    names = {"infinity": infinity, "torch": torch, "linears": linears, "WIDTH": linears()[0].in_features}
    names["config"] = infinity.Config(swap_dirs=tmp_path, device="cpu", dtype="fp32", **SETTINGS)
    losses = []
    for fails in (False, True, False, False):
        with contextlib.suppress(ZeroDivisionError):
            exec(f"torch.manual_seed(0)\n{made[how]}\n{trains}\n{'1 / 0' if fails else ''}", names)
        losses.append(names["loss"].item())
    assert len(set(losses)) == 1
    infinity.engine_of(names["model"]).close()


def test_a_dropped_engine_ends_before_the_next_one_starts(tmp_path):
    """A notebook cell that runs again drops the previous engine. The directory may differ."""
    num_threads = []
    for number in range(4):
        with contextlib.suppress(NameError):
            del model, engine, optimizer
        (tmp_path / str(number)).mkdir()
        model = linears()
        engine = infinity.offload(model, infinity.Config(swap_dirs=[tmp_path / str(number)], device="cpu", **SETTINGS))
        optimizer = infinity.AdamW(model.parameters())
        num_threads.append(threading.active_count())
    assert len(set(num_threads)) == 1, num_threads
    engine.close()
