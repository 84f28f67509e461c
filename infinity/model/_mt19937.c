/* _mt19937: the state of torch's CPU generator after a number of draws, without drawing.
 *
 * Knows the bytes of `torch.Generator.get_state()`. Knows no tensor. The GIL is dropped during the work.
 *
 *   advance(state, count)
 *       Advances state, a writable buffer, by count 32-bit numbers. Raises ValueError if state is not a generator's.
 *
 * A number costs torch 2 to 4 ns, with the conversion to a float. Skipping a number costs 0.1 to 0.3 ns, because only the
 * recurrence is left: 624 words become the next 624, and the loop vectorises.
 * Source: Matsumoto & Nishimura 1998 (MT19937).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { NUM_WORDS = 624, SHIFT = 397 };

/* torch's state (CPUGeneratorImplStateLegacy). words[next] is the next number, left - 1 are available; a seed leaves (1, 0). */
struct state {
    uint64_t seed;
    int32_t left, seeded;
    uint64_t next, words[NUM_WORDS];
};

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define FOR_EACH_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_WIDTH
#endif

static inline uint32_t mixed(uint32_t high, uint32_t low)
{
    return (((high & 0x80000000u) | (low & 0x7fffffffu)) >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
}

/* Advances the words by `times` twists. Three loops, none of which reads its own results. */
FOR_EACH_WIDTH
static void twist(uint32_t *words, size_t times)
{
    enum { REST = NUM_WORDS - SHIFT };
    while (times--) {
        for (int i = 0; i < REST; i++)
            words[i] = words[i + SHIFT] ^ mixed(words[i], words[i + 1]);
        for (int i = REST; i < 2 * REST; i++)
            words[i] = words[i - REST] ^ mixed(words[i], words[i + 1]);
        for (int i = 2 * REST; i < NUM_WORDS - 1; i++)
            words[i] = words[i - REST] ^ mixed(words[i], words[i + 1]);
        words[NUM_WORDS - 1] = words[SHIFT - 1] ^ mixed(words[NUM_WORDS - 1], words[0]);
    }
}

static PyObject *py_advance(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer buffer;
    Py_ssize_t count;
    struct state state;
    if (!PyArg_ParseTuple(args, "w*n:advance", &buffer, &count))
        return NULL;
    if (buffer.len >= (Py_ssize_t)sizeof state)
        memcpy(&state, buffer.buf, sizeof state);
    if (buffer.len < (Py_ssize_t)sizeof state || count < 0 || state.left < 1 || state.left > NUM_WORDS ||
        (state.next + (uint64_t)state.left != NUM_WORDS + 1 && (state.left != 1 || state.next != 0))) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError, "not the state of a generator of the CPU, or fewer than 0 numbers");
        return NULL;
    }
    if (count < state.left) {
        state.left -= (int32_t)count;
        state.next += (uint64_t)count;
    } else {
        Py_BEGIN_ALLOW_THREADS
        uint32_t words[NUM_WORDS];
        size_t beyond = (size_t)(count - (state.left - 1)); /* 1 or more: the last twist is due when its first word is drawn */
        for (int i = 0; i < NUM_WORDS; i++)
            words[i] = (uint32_t)state.words[i];
        twist(words, (beyond + NUM_WORDS - 1) / NUM_WORDS);
        for (int i = 0; i < NUM_WORDS; i++)
            state.words[i] = words[i];
        state.next = (beyond - 1) % NUM_WORDS + 1;
        state.left = NUM_WORDS + 1 - (int32_t)state.next;
        Py_END_ALLOW_THREADS
    }
    memcpy(buffer.buf, &state, sizeof state);
    PyBuffer_Release(&buffer);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"advance", py_advance, METH_VARARGS, "Make a generator's state that after so many more numbers."},
    {0},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "infinity.model._mt19937", .m_doc = "Where a generator stands after some numbers.",
    .m_methods = METHODS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__mt19937(void) { return PyModuleDef_Init(&MODULE); }
