/* Asynchronous file reads and writes over libaio, for Python. Knows file descriptors, buffers and offsets.
 * Must not know torch, paths or ranks. Long because it is the whole Python interface of core.c: two types, with tables and lifetimes.
 *
 *     DEMAND, PREFETCH, WRITE = 0, 1, 2           # priorities: an op waits; an op will wait; all other requests
 *
 *     class Queue(*, block_nbytes=1 << 20, inflight_nbytes=8 << 20, inflight_write_nbytes=None, depth=64):
 *         """One io context and one I/O thread. Requests are cut into blocks of block_nbytes (a multiple of 4096). At most inflight_nbytes,
 *         but at least one block, are in the kernel; of writes at most inflight_write_nbytes. Other blocks wait by priority, and
 *         within a priority in order of submission. Beside reads, writes of priority WRITE get up to half of inflight_nbytes,
 *         so that the drive has both kinds at once."""
 *         def read(fd, buffer, offset, *, priority=PREFETCH, sums=None) -> Ticket # buffer: contiguous, writable
 *         def write(fd, buffer, offset, *, priority=WRITE, sums=None) -> Ticket   # buffer: contiguous
 *                                         # sums: a buffer with 4 bytes per 4096 of the range, zeros at first. A write
 *                                         # stores the CRC-32C of its bytes there. A read copies the sums when it is
 *                                         # submitted; wait() raises EBADMSG if the bytes differ, and ENODATA where
 *                                         # nothing was written. Only wait() reports this: call it before using bytes
 *         def close()                     # finishes all submitted requests; idempotent; also a context manager
 *         def stats() -> dict             # totals since the queue's start
 *         depth: int                      # as granted: halved, with a RuntimeWarning, while fs.aio-max-nr is too low
 *         block_nbytes, inflight_nbytes, inflight_write_nbytes: int
 *         closed: bool
 *
 *     class Ticket:
 *         def wait(timeout=None) -> bool  # True: done; False: timeout, in seconds. Each call for a failed request raises
 *                                         # OSError(errno, op, fd, file offset, bytes asked and got)
 *         def promote(priority=DEMAND)    # raises, never lowers, the priority of a request that is not yet in the kernel
 *         done: bool                      # finished, with success or an error; wait() may still find wrong sums
 *         nbytes, offset: int
 *
 *     def require_libaio()                          # OSError(ELIBACC) that names the package to install, if libaio is missing
 *     def direct_alignment(fd) -> (memory, offset)  # bytes; 4096 if the kernel reports nothing, 0: no direct I/O
 *     def crc32c(buffer, value=0, into=None) -> int # of a contiguous buffer; crc32c(b, crc32c(a)) == crc32c(a + b);
 *                                                   # into: a buffer of the same size, which gets a copy
 *     def _crc32c_streams(buffer, value=0) -> int   # tests: with the crc32 instruction alone
 *     def _crc32c_portable(buffer, value=0) -> int  # tests: without the processor's instructions
 *     def _inject(call, nth=0, times=1, result=None, *, every=1, delay=0.0, fd=-1)    # tests: see faults.h
 *     def _inject() -> int                          # removes all faults; returns how many calls met one
 *
 * The caller keeps fd open until the request is done. A request of 0 bytes is legal and done at once. Files opened with O_DIRECT take
 * memory, offsets and sizes in multiples of direct_alignment only. The kernel refuses others, and the error names the alignment.
 *
 * [Note: ownership of buffers] The I/O thread never takes the GIL and touches no Python object. Its code, core.c, is
 * compiled without Python, and the kernel's user data is a block's index. A submitted request owns a reference to its ticket, and the
 * ticket owns the Py_buffer. Finished requests gather in a list. The next call of any method holds the GIL and releases both: reap().
 * But a read with sums keeps the buffer until a thread has waited for it, or until the ticket is freed. The Core lives as long as the
 * Queue or one of the tickets. Before a Queue is freed, and at interpreter exit (atexit), all I/O is finished. So no buffer is freed in
 * flight. One hold of the GIL covers the submit of a request and the store or copy of the sums.
 *
 * The order: the Core and its references, Queue, Ticket, module.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core.h"
#include "crc32c.h"

#define SLICE_NS ((int64_t)50000000) /* a wait checks for signals at this interval */
#define CRC_NBYTES 4096              /* from this size on, a checksum takes longer than a release of the GIL */

static const char *const priority_names[NUM_PRIORITIES] = {"DEMAND", "PREFETCH", "WRITE"};

/* ---- the Core and its references; all functions need the GIL ---- */

typedef struct shared Shared;
struct shared {
    Core *core;
    long refs; /* the Queue and the tickets */
    pid_t pid;
    int closed;
    Shared *next_live, **live_link;
};

typedef struct {
    PyTypeObject *queue_type, *ticket_type;
    Shared *live; /* queues with a running thread; exit closes them */
} State;

typedef struct {
    PyObject_HEAD
    Shared *shared;
} Queue;

typedef struct {
    PyObject_HEAD
    Shared *shared;
    Request *request;
    Py_buffer view; /* held until reap(), or until the sums are compared */
    uint32_t *sums; /* expected checksums of a read */
} Ticket;

/* A forked child lacks the I/O thread, the context and perhaps the owner of the lock. The child must not touch the queue. */
static int is_foreign(const Shared *shared)
{
    return shared->pid != getpid();
}

static int check_process(const Shared *shared)
{
    if (!is_foreign(shared))
        return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "this aio_ext queue belongs to process %d, not to its forked child %d: make a Queue in the child",
                 (int)shared->pid, (int)getpid());
    return -1;
}

/* Releases buffers and tickets of finished requests. This may run code of other objects. */
static void reap(Shared *shared)
{
    Request *request = core_take_finished(shared->core);
    while (request) {
        Request *next = request->next; /* Ticket_dealloc returns the request to the pool */
        Ticket *ticket = request->owner;
        if (!ticket->sums)
            PyBuffer_Release(&ticket->view);
        Py_DECREF(ticket);
        request = next;
    }
}

/* Waits until the thread has ended, then reaps. with_signals: returns -1 if a signal handler raised; the caller may call again. */
static int shared_close(Shared *shared, int with_signals)
{
    int exited = 0;
    shared->closed = 1;
    core_close(shared->core);
    while (!exited) {
        Py_BEGIN_ALLOW_THREADS
        exited = core_exited(shared->core, aio_now_ns() + SLICE_NS);
        Py_END_ALLOW_THREADS
        if (!exited && with_signals && PyErr_CheckSignals() < 0)
            return -1;
    }
    if (shared->live_link) {
        *shared->live_link = shared->next_live;
        if (shared->next_live)
            shared->next_live->live_link = shared->live_link;
        shared->live_link = NULL;
    }
    reap(shared);
    return 0;
}

static void shared_decref(Shared *shared)
{
    if (--shared->refs || is_foreign(shared))
        return;
    core_free(shared->core);
    PyMem_Free(shared);
}

/* ---- Queue ---- */

static int parse_size(const char *name, Py_ssize_t value, Py_ssize_t least, Py_ssize_t most, Py_ssize_t unit)
{
    if (value >= least && value <= most && value % unit == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s=%zd: expected %zd to %zd%s", name, value, least, most,
                 unit > 1 ? ", a multiple of 4096" : "");
    return -1;
}

/* Steals a reference to text. text is NULL if an exception is set already. */
static void set_os_error(int code, PyObject *text)
{
    PyObject *arguments = text ? Py_BuildValue("(iN)", code, text) : NULL;
    if (arguments)
        PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
}

/* Returns -1 and sets the error that names the package to install. */
static int check_libaio(void)
{
    const char *why = aio_kernel_load();
    if (why)
        set_os_error(ELIBACC, PyUnicode_FromFormat("transfers between files and memory need libaio, which cannot be used (%s). Install it: "
                                                   "Debian and Ubuntu: apt install libaio1 (newer ones: libaio1t64); "
                                                   "Fedora and RHEL: dnf install libaio; Arch: pacman -S libaio", why));
    return why ? -1 : 0;
}

static PyObject *Queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"block_nbytes", "inflight_nbytes", "inflight_write_nbytes", "depth", NULL};
    Py_ssize_t block_nbytes = 1 << 20, inflight_nbytes = 8 << 20, write_nbytes = PY_SSIZE_T_MAX, depth = 64;
    PyObject *write_limit = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$nnOn:Queue", names, &block_nbytes, &inflight_nbytes, &write_limit, &depth))
        return NULL;
    if (write_limit != Py_None) {
        write_nbytes = PyNumber_AsSsize_t(write_limit, PyExc_OverflowError);
        if (write_nbytes == -1 && PyErr_Occurred())
            return NULL;
    }
    if (parse_size("block_nbytes", block_nbytes, 4096, 1 << 30, 4096) < 0 ||
        parse_size("inflight_nbytes", inflight_nbytes, 1, PY_SSIZE_T_MAX, 1) < 0 ||
        parse_size("inflight_write_nbytes", write_nbytes, 1, PY_SSIZE_T_MAX, 1) < 0 ||
        parse_size("depth", depth, 1, 65536, 1) < 0)
        return NULL;
    State *state = PyType_GetModuleState(type);
    if (!state || check_libaio() < 0)
        return NULL;
    Queue *self = (Queue *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    Shared *shared = PyMem_Calloc(1, sizeof *shared);
    if (write_nbytes > inflight_nbytes)
        write_nbytes = inflight_nbytes;
    if (!shared ||
        !(shared->core = core_new((size_t)block_nbytes, (size_t)inflight_nbytes, (size_t)write_nbytes, (int)depth))) {
        PyMem_Free(shared);
        PyErr_NoMemory();
        goto error;
    }
    shared->refs = 1;
    shared->pid = getpid();
    self->shared = shared;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = core_start(shared->core);
    Py_END_ALLOW_THREADS
    if (code) {
        const char *remedy = code == EAGAIN   ? "other programs use all of /proc/sys/fs/aio-max-nr: raise it"
                             : code == ENOSYS ? "this kernel or its seccomp filter has no asynchronous I/O (CONFIG_AIO)"
                                              : "no I/O queue could be made";
        set_os_error(code, PyUnicode_FromFormat("io_setup: %s; %s", strerror(code), remedy));
        goto error;
    }
    shared->live_link = &state->live;
    shared->next_live = state->live;
    if (state->live)
        state->live->live_link = &shared->next_live;
    state->live = shared;
    if (shared->core->depth < depth &&
        PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                         "io_setup granted a depth of %d of the %zd asked for: raise /proc/sys/fs/aio-max-nr",
                         shared->core->depth, depth) < 0)
        goto error;
    return (PyObject *)self;
error:
    Py_DECREF(self);
    return NULL;
}

static void Queue_dealloc(PyObject *object)
{
    Queue *self = (Queue *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->shared && !is_foreign(self->shared)) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        shared_close(self->shared, 0);
        PyErr_Restore(kind, value, trace);
        shared_decref(self->shared);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static int check_priority(int priority)
{
    if (priority >= 0 && priority < NUM_PRIORITIES)
        return 0;
    PyErr_Format(PyExc_ValueError, "priority=%d: expected DEMAND (0), PREFETCH (1) or WRITE (2)", priority);
    return -1;
}

/* Returns a copy of the sums expected by a read, or the sums of the bytes to write; NULL with an exception. */
static uint32_t *sums_of(const Py_buffer *view, const Py_buffer *table, int is_write)
{
    if (view->len % SUM_NBYTES || table->len != view->len / SUM_NBYTES * (Py_ssize_t)sizeof(uint32_t)) {
        PyErr_Format(PyExc_ValueError, "sums of %zd bytes with a buffer of %zd: expected 4 bytes for each 4096", table->len, view->len);
        return NULL;
    }
    uint32_t *sums = PyMem_Malloc(table->len ? (size_t)table->len : 1);
    if (!sums) {
        PyErr_NoMemory();
    } else if (!is_write) {
        memcpy(sums, table->buf, (size_t)table->len);
    } else {
        const char *memory = view->buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t page = 0; page < view->len / SUM_NBYTES; page++)
            sums[page] = crc32c_page(memory + page * SUM_NBYTES);
        Py_END_ALLOW_THREADS
    }
    return sums;
}

static PyObject *queue_submit(Queue *self, PyObject *args, PyObject *kwargs, int is_write)
{
    static char *names[] = {"fd", "buffer", "offset", "priority", "sums", NULL};
    int fd, priority = is_write ? 2 : 1;
    PyObject *buffer, *sums = Py_None;
    long long offset;
    Shared *shared = self->shared;
    Py_buffer view = {0}, table = {0};
    Ticket *ticket = NULL;
    uint32_t *own_sums = NULL;
    if (check_process(shared) < 0)
        return NULL;
    reap(shared);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, is_write ? "iOL|$iO:write" : "iOL|$iO:read", names, &fd, &buffer, &offset,
                                     &priority, &sums))
        return NULL;
    if (PyObject_GetBuffer(buffer, &view, is_write ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return NULL;
    if (fd < 0) {
        PyErr_Format(PyExc_ValueError, "fd=%d: expected an open file descriptor", fd);
        goto error;
    }
    struct stat status; /* an empty pipe would block the I/O thread; wait() reports an fd that is not open */
    if (!fstat(fd, &status) && !S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
        PyErr_Format(PyExc_ValueError, "fd=%d: expected a regular file or a block device", fd);
        goto error;
    }
    if (offset < 0 || offset > LLONG_MAX - view.len) {
        PyErr_Format(PyExc_ValueError, "offset=%lld with %zd bytes: expected a range from 0 to 2**63 - 1", offset, view.len);
        goto error;
    }
    if (check_priority(priority) < 0)
        goto error;
    if (sums != Py_None && (PyObject_GetBuffer(sums, &table, is_write ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0 ||
                            !(own_sums = sums_of(&view, &table, is_write))))
        goto error;
    State *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
    ticket = (Ticket *)PyType_GenericAlloc(state->ticket_type, 0);
    if (!ticket)
        goto error;
    Request *request = core_request_new(shared->core);
    if (!request) {
        PyErr_NoMemory();
        goto error;
    }
    shared->refs++;
    ticket->shared = shared;
    ticket->request = request;
    ticket->view = view;
    request->owner = Py_NewRef((PyObject *)ticket);
    request->fd = fd;
    request->is_write = is_write;
    request->priority = priority;
    request->memory = view.buf;
    request->offset = offset;
    request->nbytes = (size_t)view.len;
    if (own_sums && !is_write)
        request->sums = ticket->sums = own_sums;
    int refused = core_submit(shared->core, request); /* from here on reap() releases the view */
    if (!refused) {
        if (own_sums && is_write) { /* the GIL is still held: every later read expects these sums */
            memcpy(table.buf, own_sums, (size_t)table.len);
            PyMem_Free(own_sums);
        }
        PyBuffer_Release(&table);
        return (PyObject *)ticket;
    }
    ticket->sums = NULL;
    ticket->view.obj = NULL;
    Py_DECREF(request->owner);
    if (refused > 0)
        set_os_error(refused, PyUnicode_FromFormat("the I/O queue broke down earlier: %s", strerror(refused)));
    else
        PyErr_Format(PyExc_ValueError, "%s on a closed queue", is_write ? "write" : "read");
error:
    Py_XDECREF((PyObject *)ticket);
    PyMem_Free(own_sums);
    PyBuffer_Release(&table);
    PyBuffer_Release(&view);
    return NULL;
}

static PyObject *Queue_read(Queue *self, PyObject *args, PyObject *kwargs)
{
    return queue_submit(self, args, kwargs, 0);
}

static PyObject *Queue_write(Queue *self, PyObject *args, PyObject *kwargs)
{
    return queue_submit(self, args, kwargs, 1);
}

static PyObject *Queue_close(Queue *self, PyObject *Py_UNUSED(ignored))
{
    if (check_process(self->shared) < 0 || shared_close(self->shared, 1) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Queue_enter(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return Py_NewRef(self);
}

static PyObject *Queue_exit(Queue *self, PyObject *Py_UNUSED(args))
{
    return Queue_close(self, NULL);
}

static PyObject *Queue_stats(Queue *self, PyObject *Py_UNUSED(ignored))
{
    if (check_process(self->shared) < 0)
        return NULL;
    reap(self->shared);
    Stats stats = core_stats(self->shared->core);
    return Py_BuildValue("{sK sK sK sK sK sK sK sK sK sn sn sn sn sd sd sd}", "read_nbytes", stats.read_nbytes, "write_nbytes",
                         stats.write_nbytes, "num_reads", stats.num_reads, "num_writes", stats.num_writes, "num_blocks",
                         stats.num_blocks, "num_repeats", stats.num_repeats, "num_errors", stats.num_errors, "num_wakeups",
                         stats.num_wakeups, "num_submits", stats.num_submits, "queued_nbytes", stats.queued_nbytes,
                         "inflight_nbytes", stats.inflight_nbytes, "inflight_write_nbytes", stats.inflight_write_nbytes,
                         "peak_inflight_nbytes", stats.peak_inflight_nbytes, "submit_seconds", (double)stats.submit_ns / 1e9,
                         "cpu_seconds", (double)stats.cpu_ns / 1e9, "busy_seconds", (double)stats.busy_ns / 1e9);
}

static PyObject *Queue_repr(Queue *self)
{
    const Core *core = self->shared->core;
    return PyUnicode_FromFormat("Queue(block_nbytes=%zu, inflight_nbytes=%zu, depth=%d%s)", core->block_nbytes,
                                core->inflight_limit, core->depth, self->shared->closed ? ", closed" : "");
}

static PyObject *Queue_depth(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->shared->core->depth);
}

static PyObject *Queue_block_nbytes(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shared->core->block_nbytes);
}

static PyObject *Queue_inflight_nbytes(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shared->core->inflight_limit);
}

static PyObject *Queue_inflight_write_nbytes(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->shared->core->inflight_write_limit);
}

static PyObject *Queue_closed(Queue *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->shared->closed);
}

static PyMethodDef Queue_methods[] = {
    {"read", (PyCFunction)(void (*)(void))Queue_read, METH_VARARGS | METH_KEYWORDS,
     "read(fd, buffer, offset, *, priority=PREFETCH, sums=None) -> Ticket\n--\n\n"
     "Fill a contiguous writable buffer from the file. sums: 4 bytes per 4096, stored by earlier writes; wait() compares them."},
    {"write", (PyCFunction)(void (*)(void))Queue_write, METH_VARARGS | METH_KEYWORDS,
     "write(fd, buffer, offset, *, priority=WRITE, sums=None) -> Ticket\n--\n\n"
     "Write a contiguous buffer to the file. sums: 4 bytes per 4096, filled with the CRC-32C."},
    {"close", (PyCFunction)Queue_close, METH_NOARGS, "Finish all submitted requests and end the I/O thread; idempotent."},
    {"stats", (PyCFunction)Queue_stats, METH_NOARGS,
     "Counters since the start: *_nbytes moved, num_* requests, blocks, repeats; seconds in io_submit and of CPU."},
    {"__enter__", Queue_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)Queue_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Queue_getset[] = {
    {"depth", (getter)Queue_depth, NULL, "Blocks that io_setup granted.", NULL},
    {"block_nbytes", (getter)Queue_block_nbytes, NULL, "Largest transfer in one block.", NULL},
    {"inflight_nbytes", (getter)Queue_inflight_nbytes, NULL, "Limit of bytes in the kernel.", NULL},
    {"inflight_write_nbytes", (getter)Queue_inflight_write_nbytes, NULL, "Limit of bytes of writes in the kernel.", NULL},
    {"closed", (getter)Queue_closed, NULL, "Whether close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Queue_slots[] = {
    {Py_tp_doc, "Queue(*, block_nbytes=1048576, inflight_nbytes=8388608, inflight_write_nbytes=None, depth=64)\n--\n\n"
                "One libaio context and its I/O thread; see the head of aio.c."},
    {Py_tp_new, Queue_new},
    {Py_tp_dealloc, Queue_dealloc},
    {Py_tp_repr, Queue_repr},
    {Py_tp_methods, Queue_methods},
    {Py_tp_getset, Queue_getset},
    {0, NULL},
};

static PyType_Spec Queue_spec = {
    .name = "aio_ext.Queue",
    .basicsize = sizeof(Queue),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Queue_slots,
};

/* ---- Ticket ---- */

static void Ticket_dealloc(PyObject *object)
{
    Ticket *self = (Ticket *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyBuffer_Release(&self->view); /* of a read with sums for which no thread waited */
    PyMem_Free(self->sums);
    if (self->shared && !is_foreign(self->shared)) {
        core_request_free(self->shared->core, self->request);
        shared_decref(self->shared);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *raise_failure(const Request *request)
{
    const char *op = request->is_write ? "write" : "read";
    int code = request->error.code;
    if (request->sums && (code == EBADMSG || code == ENODATA)) {
        set_os_error(code, PyUnicode_FromFormat("%s: read of fd %d at file offset %lld",
                                                code == EBADMSG ? "the drive returned other bytes than were written"
                                                                : "nothing was written yet to this range",
                                                request->fd, request->error.offset));
        return NULL;
    }
    unsigned memory = request->error.memory_alignment, offset = request->error.offset_alignment;
    PyObject *hint;
    if (memory && offset)
        hint = PyUnicode_FromFormat(
            "; with O_DIRECT this file needs memory aligned to %u bytes (it is %zu past), the offset (%zu past) and the "
            "size (%zu past) to %u bytes",
            memory, (size_t)request->memory % memory, (size_t)request->offset % offset, request->nbytes % offset, offset);
    else
        hint = PyUnicode_FromString(code == EIO && request->is_write      ? "; the device took no more, or failed"
                                    : code == EIO                         ? "; the file ends there, or the device failed"
                                    : code == EAGAIN || code == EINTR ? "; the kernel refused the transfer for one second"
                                                                      : "");
    if (!hint)
        return NULL;
    set_os_error(code, PyUnicode_FromFormat("%s: %s of fd %d at file offset %lld: asked for %zu bytes, got %lld%U",
                                            strerror(code), op, request->fd, request->error.offset, request->error.asked,
                                            request->error.got, hint));
    Py_DECREF(hint);
    return NULL;
}

static PyObject *Ticket_wait(Ticket *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    PyObject *timeout = Py_None;
    Request *request = self->request;
    int64_t deadline = INT64_MAX;
    if (check_process(self->shared) < 0)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:wait", names, &timeout))
        return NULL;
    if (timeout != Py_None) {
        double seconds = PyFloat_AsDouble(timeout);
        if (seconds == -1.0 && PyErr_Occurred())
            return NULL;
        if (seconds != seconds) {
            PyErr_SetString(PyExc_ValueError, "timeout is not a number");
            return NULL;
        }
        if (seconds < 1e9)
            deadline = aio_now_ns() + (seconds > 0 ? (int64_t)(seconds * 1e9) : 0);
    }
    int done;
    for (;;) {
        int64_t now = aio_now_ns(), slice = now + SLICE_NS;
        Py_BEGIN_ALLOW_THREADS
        done = core_wait(self->shared->core, request, slice < deadline ? slice : deadline);
        Py_END_ALLOW_THREADS
        if (done || slice >= deadline)
            break;
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    reap(self->shared);
    if (done)
        PyBuffer_Release(&self->view); /* of a read with sums: they are compared now */
    if (done && request->error.code)
        return raise_failure(request);
    return PyBool_FromLong(done);
}

static PyObject *Ticket_promote(Ticket *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"priority", NULL};
    int priority = 0;
    if (check_process(self->shared) < 0)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|i:promote", names, &priority) || check_priority(priority) < 0)
        return NULL;
    core_promote(self->shared->core, self->request, priority);
    reap(self->shared);
    Py_RETURN_NONE;
}

static PyObject *Ticket_done(Ticket *self, void *Py_UNUSED(closure))
{
    if (check_process(self->shared) < 0)
        return NULL;
    int done = core_is_done(self->shared->core, self->request);
    reap(self->shared);
    return PyBool_FromLong(done);
}

static PyObject *Ticket_nbytes(Ticket *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->request->nbytes);
}

static PyObject *Ticket_offset(Ticket *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(self->request->offset);
}

static PyObject *Ticket_repr(Ticket *self)
{
    const Request *request = self->request;
    const char *state = is_foreign(self->shared)                         ? "of another process"
                        : !core_is_done(self->shared->core, request) ? priority_names[request->priority]
                        : request->error.code                            ? "failed"
                                                                         : "done";
    return PyUnicode_FromFormat("Ticket(%s of %zu bytes at %lld, %s)", request->is_write ? "write" : "read", request->nbytes,
                                request->offset, state);
}

static PyMethodDef Ticket_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))Ticket_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None) -> bool\n--\n\nTrue once done, False after timeout seconds; raises OSError if the request failed."},
    {"promote", (PyCFunction)(void (*)(void))Ticket_promote, METH_VARARGS | METH_KEYWORDS,
     "promote(priority=DEMAND)\n--\n\nRaise the priority of a request that is not yet in the kernel, and of its blockers."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Ticket_getset[] = {
    {"done", (getter)Ticket_done, NULL, "Finished, with success or an error.", NULL},
    {"nbytes", (getter)Ticket_nbytes, NULL, "Bytes asked for.", NULL},
    {"offset", (getter)Ticket_offset, NULL, "Start of the range in the file.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Ticket_slots[] = {
    {Py_tp_doc, "One request of a Queue."},
    {Py_tp_dealloc, Ticket_dealloc},
    {Py_tp_repr, Ticket_repr},
    {Py_tp_methods, Ticket_methods},
    {Py_tp_getset, Ticket_getset},
    {0, NULL},
};

static PyType_Spec Ticket_spec = {
    .name = "aio_ext.Ticket",
    .basicsize = sizeof(Ticket),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Ticket_slots,
};

/* ---- module ---- */

static PyObject *direct_alignment(PyObject *Py_UNUSED(module), PyObject *argument)
{
    unsigned memory, offset;
    int fd, flags;
    if (!PyArg_Parse(argument, "i:direct_alignment", &fd))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    flags = fcntl(fd, F_GETFD);
    aio_direct_alignment(fd, &memory, &offset);
    Py_END_ALLOW_THREADS
    if (flags < 0) {
        errno = EBADF;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("(II)", memory, offset);
}

static PyObject *require_libaio(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return check_libaio() < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *checksum(PyObject *args, PyObject *kwargs, const char *format,
                          uint32_t (*function)(uint32_t, const void *, size_t))
{
    static char *names[] = {"buffer", "value", "into", NULL};
    PyObject *buffer, *into = Py_None;
    long long value = 0;
    Py_buffer view, copy = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, &buffer, &value, &into))
        return NULL;
    if (value < 0 || value > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "value=%lld: expected 0 to 2**32 - 1, an earlier crc32c", value);
        return NULL;
    }
    /* PyBUF_SIMPLE raises another error for strides in each exporter. So strides are requested here and refused below. */
    if (PyObject_GetBuffer(buffer, &view, PyBUF_STRIDED_RO) < 0)
        return NULL;
    if (!PyBuffer_IsContiguous(&view, 'C')) {
        PyErr_SetString(PyExc_BufferError, "crc32c: expected a C-contiguous buffer; copy it first");
        goto error;
    }
    if (into != Py_None) {
        if (PyObject_GetBuffer(into, &copy, PyBUF_WRITABLE) < 0)
            goto error;
        if (copy.len != view.len) {
            PyErr_Format(PyExc_ValueError, "into: has %zd bytes, expected the buffer's %zd", copy.len, view.len);
            goto error;
        }
    }
    PyThreadState *thread = view.len >= CRC_NBYTES ? PyEval_SaveThread() : NULL;
    uint32_t crc = copy.obj ? crc32c_copy((uint32_t)value, copy.buf, view.buf, (size_t)view.len)
                            : function((uint32_t)value, view.buf, (size_t)view.len);
    if (thread)
        PyEval_RestoreThread(thread);
    PyBuffer_Release(&copy);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
error:
    PyBuffer_Release(&copy);
    PyBuffer_Release(&view);
    return NULL;
}

static PyObject *checksum_best(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    return checksum(args, kwargs, "O|LO:crc32c", crc32c);
}

static PyObject *checksum_streams(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    return checksum(args, kwargs, "O|LO:_crc32c_streams", crc32c_streams);
}

static PyObject *checksum_portable(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    return checksum(args, kwargs, "O|LO:_crc32c_portable", crc32c_portable);
}

static PyObject *inject(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"call", "nth", "times", "result", "every", "delay", "fd", NULL};
    static const char *const call_names[AIO_NUM_CALLS] = {"io_setup",   "io_submit", "io_getevents",
                                                          "io_destroy", "read",      "write"};
    const char *call = NULL;
    struct aio_rule rule = {.times = 1, .every = 1, .fd = -1, .call = AIO_NUM_CALLS};
    PyObject *result = Py_None;
    double delay = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zllO$ldi:_inject", names, &call, &rule.nth, &rule.times, &result,
                                     &rule.every, &delay, &rule.fd))
        return NULL;
    if (!call)
        return PyLong_FromLong(aio_fault_clear());
    for (int i = 0; i < AIO_NUM_CALLS; i++)
        if (!strcmp(call, call_names[i]))
            rule.call = (enum aio_call)i;
    if (PyFloat_Check(result)) {
        rule.effect = AIO_FRACTION;
        rule.fraction = PyFloat_AsDouble(result);
    } else if (result != Py_None) {
        rule.value = PyLong_AsLongLong(result);
        if (rule.value == -1 && PyErr_Occurred())
            return NULL;
        rule.effect = rule.value < 0 || rule.call < AIO_READ ? AIO_RESULT : AIO_MISSING;
    }
    rule.delay_ns = (int64_t)(delay * 1e9);
    if (rule.call == AIO_NUM_CALLS || rule.nth < 0 || rule.every < 1 || (rule.call < AIO_READ && rule.effect != AIO_RESULT) ||
        rule.fraction < 0 || rule.fraction > 1 || rule.delay_ns < 0 || aio_fault_add(&rule) < 0) {
        PyErr_SetString(PyExc_ValueError, "_inject: an unknown call, a negative position, or too many faults; see faults.h");
        return NULL;
    }
    core_use(&aio_faulty); /* never undone: this table may still hold delayed blocks */
    Py_RETURN_NONE;
}

/* At exit, while Python still works: finishes all I/O and releases all buffers. */
static PyObject *close_all(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    State *state = PyModule_GetState(module);
    Shared *shared;
    while ((shared = state->live) && !is_foreign(shared)) {
        shared->refs++;
        shared_close(shared, 0);
        shared_decref(shared);
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"require_libaio", require_libaio, METH_NOARGS,
     "require_libaio()\n--\n\nRaise OSError, with the package to install, if libaio is missing."},
    {"direct_alignment", direct_alignment, METH_O,
     "direct_alignment(fd) -> (memory, offset)\n--\n\nAlignment in bytes for O_DIRECT: 4096 if unknown, 0 if the file takes no O_DIRECT."},
    {"crc32c", (PyCFunction)(void (*)(void))checksum_best, METH_VARARGS | METH_KEYWORDS,
     "crc32c(buffer, value=0, into=None)\n--\n\n"
     "CRC-32C (Castagnoli) of a C-contiguous buffer, continuing from value: crc32c(b, crc32c(a)) == crc32c(a + b).\n"
     "Without the GIL from 4 KiB on. Raises BufferError if not contiguous, ValueError if value has more than 32 bits."},
    {"_crc32c_streams", (PyCFunction)(void (*)(void))checksum_streams, METH_VARARGS | METH_KEYWORDS,
     "_crc32c_streams(buffer, value=0)\n--\n\nTests only. crc32c with the processor's crc32 instruction, if any, alone."},
    {"_crc32c_portable", (PyCFunction)(void (*)(void))checksum_portable, METH_VARARGS | METH_KEYWORDS,
     "_crc32c_portable(buffer, value=0)\n--\n\nTests only. crc32c with tables, without the processor's instructions."},
    {"_inject", (PyCFunction)(void (*)(void))inject, METH_VARARGS | METH_KEYWORDS,
     "_inject(call=None, nth=0, times=1, result=None, *, every=1, delay=0.0, fd=-1)\n--\n\n"
     "Tests only. call: io_setup, io_submit, io_getevents, io_destroy, or read, write for a block of that kind. The rule applies\n"
     "from call nth on, to each `every`-th, `times` of them (-1: all). result: -errno; for io_submit also the number accepted; for\n"
     "a block an int is the bytes fewer than asked, a float the fraction moved. delay: seconds until a block reaches the kernel.\n"
     "fd: only blocks of that file, as on a slow drive: delay is seconds per MiB, one block after the other.\n"
     "Without call: remove all rules and return how many calls met one."},
    {"_close_all", close_all, METH_NOARGS, "Finish and close every queue; registered with atexit."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    PyObject *atexit = NULL, *function = NULL, *registered = NULL;
    state->queue_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &Queue_spec, NULL);
    state->ticket_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &Ticket_spec, NULL);
    if (!state->queue_type || !state->ticket_type || PyModule_AddType(module, state->queue_type) < 0 ||
        PyModule_AddType(module, state->ticket_type) < 0)
        goto error;
    for (int i = 0; i < NUM_PRIORITIES; i++)
        if (PyModule_AddIntConstant(module, priority_names[i], i) < 0)
            goto error;
    if (!(atexit = PyImport_ImportModule("atexit")) || !(function = PyObject_GetAttrString(module, "_close_all")) ||
        !(registered = PyObject_CallMethod(atexit, "register", "O", function)))
        goto error;
error:
    Py_XDECREF(atexit);
    Py_XDECREF(function);
    Py_XDECREF(registered);
    return registered ? 0 : -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->queue_type);
    Py_VISIT(state->ticket_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->queue_type);
    Py_CLEAR(state->ticket_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aio_ext._aio",
    .m_doc = "Asynchronous file I/O over libaio.",
    .m_size = sizeof(State),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__aio(void)
{
    return PyModuleDef_Init(&module_definition);
}