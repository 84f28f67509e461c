"""aio_ext.crc32c equals the bit-by-bit definition, with and without the processor's instructions, for all buffers and cuts."""

import random
import sys
import threading

import numpy
import pytest
import torch
from support.helpers import run_python

import aio_ext
from aio_ext import _aio

ROUND = 3 * 1360  # bytes per round of the three streams; see crc32c.c
ways = pytest.mark.parametrize("crc32c", [aio_ext.crc32c, _aio._crc32c_streams, _aio._crc32c_portable])


def times_x8(register):
    """Multiply a register by x^8, bit by bit, modulo Castagnoli's polynomial."""
    for _ in range(8):
        register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


BYTES = [times_x8(byte) for byte in range(256)]


def prefixes(data):
    """CRCs of data[:0], data[:1], ... data[:len(data)], by the definition."""
    register, sums = 0xFFFFFFFF, [0]
    for byte in data:
        register = register >> 8 ^ BYTES[(register ^ byte) & 255]
        sums.append(register ^ 0xFFFFFFFF)
    return sums


@ways
@pytest.mark.parametrize(
    "data, expected",
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # this and the next two: RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_vectors(crc32c, data, expected):
    assert crc32c(data) == expected
    assert prefixes(data)[-1] == expected


@ways
def test_every_short_length_at_every_alignment(crc32c):
    data = memoryview(random.randbytes(616))
    for start in range(16):
        expected = prefixes(data[start : start + 600])
        assert [crc32c(data[start : start + nbytes]) for nbytes in range(601)] == expected


@ways
def test_lengths_near_whole_rounds_and_random_lengths(crc32c):
    data = memoryview(random.randbytes(200_000))
    for start in [0, 1, 7, 63, *(random.randrange(4096) for _ in range(4))]:
        expected = prefixes(data[start : start + 100_000])
        near = [rounds * ROUND + extra for rounds in range(1, 25) for extra in range(-9, 10)]
        for nbytes in [4095, 4096, 4097, 65536, *near, *(random.randrange(100_000) for _ in range(300))]:
            assert crc32c(data[start : start + nbytes]) == expected[nbytes], (start, nbytes)


def test_all_implementations_agree_on_megabytes_from_any_value():
    data = memoryview(random.randbytes(8 << 20))
    for _ in range(20):
        start, end = sorted(random.randrange(len(data)) for _ in range(2))
        value = random.getrandbits(32)
        expected = _aio._crc32c_portable(data[start:end], value)
        assert aio_ext.crc32c(data[start:end], value) == _aio._crc32c_streams(data[start:end], value) == expected


@ways
def test_a_crc_chained_at_random_cuts_is_that_of_the_whole(crc32c):
    data = memoryview(random.randbytes(50_000))
    whole = crc32c(data)
    for num_cuts in [1] * 50 + [5] * 50 + [100] * 20:
        cuts = [0, *sorted(random.randrange(len(data)) for _ in range(num_cuts)), len(data)]
        value = 0
        for start, end in zip(cuts, cuts[1:]):
            value = crc32c(data[start:end], value=value)
        assert value == whole
    assert crc32c(b"", whole) == whole


def test_any_one_or_two_flipped_bits_change_a_page():
    """All 32,768 pages that differ from one page in one bit have different CRCs. Two of them differ in two bits."""
    page = bytearray(random.randbytes(4096))
    sums = {aio_ext.crc32c(page)}
    for bit in range(8 * len(page)):
        page[bit // 8] ^= 1 << bit % 8
        sums.add(aio_ext.crc32c(page))
        page[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + 8 * 4096


@ways
def test_buffers_of_every_kind(crc32c):
    tensor = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    data = tensor.numpy().tobytes()
    expected = prefixes(data)[-1]
    for buffer in [data, bytearray(data), memoryview(data), memoryview(data).cast("f"), tensor.numpy(), numpy.frombuffer(data)]:
        assert crc32c(buffer) == expected
    assert crc32c(numpy.float32(3)) == prefixes(numpy.float32(3).tobytes())[-1]
    assert crc32c(numpy.zeros((0, 7))) == 0


@ways
@pytest.mark.parametrize(
    "buffer, error",
    [
        (memoryview(bytes(64))[::2], BufferError),
        (memoryview(bytes(64))[::-1], BufferError),
        (numpy.zeros((8, 8))[:, 1:], BufferError),
        (numpy.zeros((8, 8)).T, BufferError),  # contiguous, but not in C order
        ("text", TypeError),
        (None, TypeError),
        (7, TypeError),
        ([1, 2], TypeError),
    ],
)
def test_strided_buffers_and_other_types_are_refused(crc32c, buffer, error):
    with pytest.raises(error):
        crc32c(buffer)


@ways
def test_value_is_32_bits(crc32c):
    assert crc32c(b"", 0xFFFFFFFF) == 0xFFFFFFFF
    for value in [-1, 1 << 32, -(1 << 63)]:
        with pytest.raises(ValueError, match=rf"value={value}: expected 0 to 2\*\*32 - 1"):
            crc32c(b"", value)
    for value in [1 << 64, -(1 << 64)]:
        with pytest.raises(OverflowError):
            crc32c(b"", value)
    for value in [1.0, "1", None]:
        with pytest.raises(TypeError):
            crc32c(b"", value)
    with pytest.raises(TypeError):
        crc32c()


@ways
def test_a_resizable_buffer_is_released(crc32c):
    data = bytearray(8192)
    crc32c(data)
    with pytest.raises(ValueError):
        crc32c(data, -1)
    data.append(0)  # BufferError while a view is left


def test_eight_threads_may_make_the_first_call_at_once():
    """The first thread builds the tables, while the others wait."""
    result = run_python(
        """
        import random, threading
        from aio_ext import _aio
        data, sums, gate = random.Random(0).randbytes(1 << 20), [], threading.Barrier(8)
        def work(function):
            gate.wait()
            sums.extend(function(data) for _ in range(10))
        threads = [threading.Thread(target=work, args=[(_aio.crc32c, _aio._crc32c_portable)[i % 2]]) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(sums), *set(sums))
        """
    )
    assert not result.returncode, result.stderr
    assert result.stdout.split() == ["80", str(_aio._crc32c_portable(random.Random(0).randbytes(1 << 20)))]


def test_other_threads_run_while_a_crc_is_computed():
    """Python switches threads only every 1000 s here. So this thread gets the GIL only if crc32c releases the GIL."""
    data, seen, stop = bytes(1 << 20), [], threading.Event()

    def work():
        for _ in range(5000):
            aio_ext.crc32c(data)
            if stop.is_set():
                return seen.append(True)

    worker, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker.start()
        stop.set()
        worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [True]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 32640, 32641, 100_000, 1_000_003])
def test_crc32c_can_copy_the_bytes_it_reads(nbytes):
    data = random.Random(nbytes).randbytes(nbytes)
    copy = bytearray(b"\xa5") * nbytes
    assert aio_ext.crc32c(data, 7, into=copy) == aio_ext.crc32c(data, 7) and copy == data
    for wrong in (bytearray(nbytes + 1), bytearray(nbytes)[1:] if nbytes else bytearray(2)):
        with pytest.raises(ValueError, match="expected the buffer's"):
            aio_ext.crc32c(data, into=wrong)
    for wrong, error in ((bytes(nbytes), BufferError), (3, TypeError)):
        with pytest.raises(error):
            aio_ext.crc32c(data, into=wrong)
