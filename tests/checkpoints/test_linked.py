"""Files that several checkpoints share: the next save detects damage in a shared file and writes the records into a new file."""

import threading
from collections import Counter

import pytest
import torch
from support.checkpoints import PLACES, frozen_half, record_files, train_trait
from support.helpers import assert_same_states, states_of, training
from support.models import mlp

import infinity
from infinity.checkpoints import linked, writer
from infinity.checkpoints.reader import Checkpoint
from infinity.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")


def frozen_but(layer):
    model = mlp(6)
    model.requires_grad_(False)
    model.layers[layer].bias.requires_grad_(True)
    return model


def flip_a_frozen_bit(path, in_padding=False):
    """Flips one bit in the file of frozen records, which all checkpoints share. Returns the path of the file."""
    with Checkpoint(path) as checkpoint:
        manifest = checkpoint.manifest
    frozen = [(manifest.record(chunk.index, 0), manifest.places[chunk.index][0]) for chunk in manifest.chunks if not chunk.trainable]
    is_padded = lambda record: record.nbytes > record.numel * record.segments[0].itemsize
    record, place = next((record, place) for record, place in frozen if is_padded(record) or not in_padding)
    where = path / manifest.folder / manifest.files[place.file].name
    with open(where, "r+b") as data:
        data.seek(at := place.offset + (record.nbytes - 1 if in_padding else 5))
        byte = data.read(1)[0]
        data.seek(at)
        data.write(bytes([byte ^ 4]))
    return where


def is_whole(path):
    with Checkpoint(path) as checkpoint:
        try:
            return checkpoint.verify() == checkpoint.manifest.nbytes
        except CheckpointError:
            return False


@pytest.mark.few(1)
@pytest.mark.parametrize("places", PLACES[::4], ids=str)
@pytest.mark.parametrize("wait, in_padding", [(True, False), (False, True), (False, False)])
def test_save_rewrites_records_that_are_damaged_in_a_linked_file(wait, in_padding, places, tmp_path):
    with training(frozen_half, tmp_path, **places) as (model, engine, optimizer):
        for step in range(3):
            train_trait(model, optimizer, step)
            infinity.save(tmp_path / f"{step}", model, optimizer)
        damaged = flip_a_frozen_bit(tmp_path / "0", in_padding)
        assert not any(is_whole(tmp_path / name) for name in "012"), "the three checkpoints do not share the damaged file"
        expected = states_of(engine, model)
        with pytest.warns(RuntimeWarning, match="has changed since it was saved") as told:
            saving = infinity.save(tmp_path / "3", model, optimizer, wait=wait)
            train_trait(model, optimizer, 3)
            saving.wait()
        (told,) = [str(warning.message) for warning in told]
        assert damaged.name in told and str(tmp_path / "2") in told and str(tmp_path / "3") in told and "layers." in told
        assert [is_whole(tmp_path / name) for name in "0123"] == [False, False, False, True]
        infinity.save(tmp_path / "4", model, optimizer)  # linked to the new, whole file
        assert record_files(tmp_path / "4")[False] == record_files(tmp_path / "3")[False] and is_whole(tmp_path / "4")
        infinity.load(tmp_path / "3", model, optimizer)
        assert_same_states(states_of(engine, model), expected)


def test_few_checkpoints_share_a_file_and_each_file_is_read_in_time(tmp_path, monkeypatch):
    """The frozen records have more bytes than one save reads."""
    monkeypatch.setattr(linked, "CHECK_NBYTES", 0)
    with training(lambda: frozen_but(0), tmp_path) as (model, engine, optimizer):
        shared = Counter()
        for number in range(2 * linked.RENEW_EVERY + 2):
            infinity.save(tmp_path / f"{number}", model, optimizer)
            with infinity.gathered(model.layers[0].bias), torch.no_grad():
                model.layers[0].bias.add_(1)  # a small record that is trained
            shared.update(record_files(tmp_path / f"{number}")[False])
        assert len(shared) == 3 and max(shared.values()) <= linked.RENEW_EVERY, shared
        flip_a_frozen_bit(tmp_path / f"{number}")
        with pytest.warns(RuntimeWarning, match="has changed since it was saved"):
            for last in range(number + 1, number + 1 + linked.CHECK_EVERY):
                infinity.save(tmp_path / f"{last}", model, optimizer)
        assert is_whole(tmp_path / f"{last}")


@pytest.mark.parametrize("damage", [False, True], ids=["sound", "damaged"])
def test_a_record_changed_before_its_link_is_checked_is_saved_unchanged(damage, tmp_path, monkeypatch):
    with training(frozen_half, tmp_path, **PLACES[4]) as (model, engine, optimizer):
        infinity.save(tmp_path / "a", model, optimizer)
        if damage:
            flip_a_frozen_bit(tmp_path / "a")
        expected = states_of(engine, model)
        gate, read = threading.Event(), writer.Writer.read

        def late(self, *arguments):
            gate.wait(20)
            return read(self, *arguments)

        monkeypatch.setattr(writer.Writer, "read", late)
        under_way = infinity.save(tmp_path / "b", model, optimizer, wait=False)
        with infinity.gathered(model.layers[5].weight), torch.no_grad():
            model.layers[5].weight.zero_()
        gate.set()
        under_way.wait()
        assert is_whole(tmp_path / "b") and not record_files(tmp_path / "b")[False] & record_files(tmp_path / "a")[False]
        infinity.load(tmp_path / "b", model, optimizer)
        assert_same_states(states_of(engine, model), expected)
