/* Asynchronous file reads and writes over libaio, for Python. Knows file descriptors, buffers and offsets;
 * must not know torch, paths or ranks.
 *
 *     DEMAND, PREFETCH, WRITE = 0, 1, 2           # priorities: what an op waits for, what it will want, the rest
 *
 *     class Queue(*, block_nbytes=1 << 20, inflight_nbytes=8 << 20, depth=64):
 *         """One io context and one I/O thread. Requests are cut into blocks of block_nbytes (a multiple of 4096); at
 *         most inflight_nbytes of them, but at least one, are with the kernel; the rest waits by priority, and
 *         inside a priority in order of submission."""
 *         def read(fd, buffer, offset, *, priority=PREFETCH) -> Ticket     # buffer: contiguous, writable
 *         def write(fd, buffer, offset, *, priority=WRITE) -> Ticket       # buffer: contiguous
 *         def close()                     # finishes all that was submitted; idempotent; also a context manager
 *         def stats() -> dict             # cumulative, from the queue's start
 *         depth: int                      # granted: halved, with a RuntimeWarning, while fs.aio-max-nr is too low
 *         block_nbytes, inflight_nbytes: int
 *         closed: bool
 *
 *     class Ticket:
 *         def wait(timeout=None) -> bool  # True: done; False: seconds are over. Failed: OSError(errno, op, fd, file
 *                                         # offset, bytes asked and got), each time it is called
 *         def promote(priority=DEMAND)    # raises a request that is not yet with the kernel; never lowers
 *         done: bool                      # finished, well or not
 *         nbytes, offset: int
 *
 *     def direct_alignment(fd) -> (memory, offset)  # bytes; 4096 where the kernel says nothing, 0: no direct I/O
 *     def _inject(call, nth=0, times=1, result=None, *, every=1, delay=0.0)    # tests: see faults.h
 *     def _inject() -> int                          # forget all faults; how many calls met one
 *
 * The caller keeps fd open until the request is done. A read or write of no bytes is done at once.
 *
 * Longer than other files here because a queue, its thread and its Python face share one lock. The order: records,
 * order of requests, the I/O thread, Queue, Ticket, module.
 *
 * [Note: a read sees the last write] A request starts only when no earlier unfinished request on the same fd overlaps
 * its bytes with either of the two being a write. Each such pair is found when the later one is submitted (it
 * counts its blockers) and again when the earlier one finishes (it uncounts them): `unfinished` is in order of
 * submission and ranges never change, so both walks find the same pairs and no edge is stored. A blocker's priority
 * is never behind that of a request it blocks: submit and promote see to it, through chains, so a promoted read is
 * not left behind a queue of writes. Blockers are always older, so nothing waits in a circle.
 *
 * [Note: who owns what] The I/O thread never takes the GIL and touches no Python object; the kernel's user data is a
 * block's index. Submitting stores a reference to the ticket and the Py_buffer in the request; a finished request
 * goes to the `finished` list, and the next call of any method (with the GIL) releases both: reap(). A request goes
 * back to the pool with its ticket. The Core outlives the Queue object for as long as tickets refer to it, and a
 * Queue that goes away first finishes its I/O; so does interpreter exit, by atexit. Thus no buffer is freed in
 * flight. Fields of Core below the lock are guarded by it, those of the thread are its own; references (`refs`) by the GIL.
 *
 * [Note: when a transfer is repeated] Each completion is compared, signed, with what was asked. Less: the rest is
 * submitted again, from a multiple of the direct alignment (O_DIRECT cannot go on from elsewhere); MAX_BARREN
 * completions in a row without one aligned unit gained are EIO. Nothing: EIO at once. EAGAIN and EINTR, whether from the
 * submit or from the completion: again after a pause that doubles to 64 ms, for at most two seconds without progress.
 * Anything else is the request's error: its other blocks are not started, and those with the kernel are waited for.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "faults.h"

#define NUM_PRIORITIES 3
#define POOL_REQUESTS 64              /* requests allocated together; afterwards they are reused */
#define MAX_BARREN 3                  /* transfers in a row that gained nothing */
#define PAUSE_NS ((int64_t)1000000)   /* after EAGAIN, doubled up to 64 times that */
#define PATIENCE_NS ((int64_t)2000000000)
#define SLICE_NS ((int64_t)50000000)  /* how long a wait sleeps before it looks for signals */

static _Atomic(const struct aio_calls *) calls = &aio_kernel;
static const char *const priority_names[NUM_PRIORITIES] = {"DEMAND", "PREFETCH", "WRITE"};

/* ---- records ---- */

/* FREE -> BLOCKED | RUNNABLE;  BLOCKED -> RUNNABLE;  RUNNABLE -> ISSUED (all blocks made, or failed)
 * ISSUED -> FINISHED;  FINISHED -> REAPED;  REAPED -> FREE;  BLOCKED -> ISSUED only when the queue breaks. */
enum state { FREE, BLOCKED, RUNNABLE, ISSUED, FINISHED, REAPED, NUM_STATES };
static const unsigned legal[NUM_STATES] = {
    [FREE] = 1u << BLOCKED,
    [BLOCKED] = 1u << RUNNABLE | 1u << ISSUED,
    [RUNNABLE] = 1u << ISSUED,
    [ISSUED] = 1u << FINISHED,
    [FINISHED] = 1u << REAPED,
    [REAPED] = 1u << FREE,
};

typedef struct request Request;
struct request {
    Request *older, *newer; /* in `unfinished` */
    Request *before, *next; /* in its priority's list; next also in `finished`, the pool and the work list of spread() */
    uint64_t number;        /* of submission */
    PyObject *ticket;       /* from submit until reaped */
    Py_buffer view;         /* likewise */
    enum state state;
    int fd, is_write, priority;
    char *memory;
    long long offset;
    size_t nbytes;
    size_t issued_nbytes;                /* given to blocks so far */
    int num_blocks;                      /* blocks that carry a part of it */
    size_t num_blockers, num_dependents; /* see [Note: a read sees the last write] */
    struct {                             /* the failure with the lowest offset; code 0: none */
        int code;
        long long offset, got;
        size_t asked;
        unsigned memory_alignment, offset_alignment; /* EINVAL only */
    } error;
    pthread_cond_t done;
};

typedef struct {
    struct iocb iocb;
    Request *request;
    char *memory;
    long long offset;
    size_t nbytes;          /* still to be moved */
    int num_barren;
    int64_t pause_ns;       /* the last one; 0: none since it got on */
    int64_t hindered_ns;    /* since when EAGAIN comes back */
    int64_t due_ns;         /* not submitted again before */
    int next;               /* in `free_block` or `repeats`; -1: the end */
} Block;

typedef struct pool {
    struct pool *next;
    Request requests[POOL_REQUESTS];
} Pool;

typedef struct core Core;
struct core {
    long refs; /* the Queue object and the tickets */
    Core *next_live, **live_link;
    pid_t pid;
    size_t block_nbytes, inflight_limit;
    int depth, eventfd, has_thread, joined;
    pthread_t thread;
    io_context_t context;

    pthread_mutex_t lock; /* guards what follows, and all requests */
    pthread_cond_t exited_cond;
    Request *oldest, *newest;
    Request *first[NUM_PRIORITIES], *last[NUM_PRIORITIES]; /* RUNNABLE ones */
    Request *finished;
    Request *free_request;
    Pool *pools;
    uint64_t num_submitted;
    int asleep, closing, exited, broken; /* broken: the errno after which the context cannot be used */
    size_t inflight_nbytes, peak_inflight_nbytes, queued_nbytes;
    uint64_t read_nbytes, write_nbytes, num_reads, num_writes, num_blocks, num_repeats, num_errors, num_wakeups;
    int64_t submit_ns, cpu_ns;

    Block *blocks; /* depth of them; these five are the I/O thread's own */
    int free_block, first_repeat, num_inflight;
    struct iocb **batch;
    struct io_event *events;
};

static void set_state(Request *request, enum state state)
{
    if (!(legal[request->state] & 1u << state))
        Py_FatalError("aio_ext: illegal transition of a request");
    request->state = state;
}

/* ---- order of requests; all with the lock held ---- */

static void runnable_unlink(Core *core, Request *request)
{
    *(request->before ? &request->before->next : &core->first[request->priority]) = request->next;
    *(request->next ? &request->next->before : &core->last[request->priority]) = request->before;
}

static void runnable_link(Core *core, Request *request)
{
    Request *before = core->last[request->priority];
    while (before && before->number > request->number)
        before = before->before;
    request->before = before;
    request->next = before ? before->next : core->first[request->priority];
    *(before ? &before->next : &core->first[request->priority]) = request;
    *(request->next ? &request->next->before : &core->last[request->priority]) = request;
}

static void make_runnable(Core *core, Request *request)
{
    set_state(request, RUNNABLE);
    runnable_link(core, request);
}

static int conflict(const Request *a, const Request *b)
{
    return a->fd == b->fd && (a->is_write || b->is_write) && a->offset < b->offset + (long long)b->nbytes &&
           b->offset < a->offset + (long long)a->nbytes;
}

static void set_priority(Core *core, Request *request, int priority)
{
    if (request->state == RUNNABLE)
        runnable_unlink(core, request);
    request->priority = priority;
    if (request->state == RUNNABLE)
        runnable_link(core, request);
}

/* Lifts everything that blocks the request, directly or through others, to its priority. `request` must be BLOCKED
 * or new (its `next` is free then); so are the lifted ones that have blockers of their own. */
static void spread(Core *core, Request *request)
{
    Request *todo = request;
    request->next = NULL;
    while (todo) {
        Request *later = todo;
        todo = todo->next;
        for (Request *earlier = later->older; earlier; earlier = earlier->older) {
            if (earlier->priority <= later->priority || !conflict(earlier, later))
                continue;
            set_priority(core, earlier, later->priority);
            if (earlier->state == BLOCKED) {
                earlier->next = todo;
                todo = earlier;
            }
        }
    }
}

/* A new request joins `unfinished`. */
static void enqueue(Core *core, Request *request)
{
    request->number = core->num_submitted++;
    request->older = core->newest;
    request->newer = NULL;
    *(core->newest ? &core->newest->newer : &core->oldest) = request;
    core->newest = request;
    core->queued_nbytes += request->nbytes;
    for (Request *earlier = request->older; earlier; earlier = earlier->older)
        if (conflict(earlier, request)) {
            earlier->num_dependents++;
            request->num_blockers++;
        }
    set_state(request, BLOCKED);
    if (request->num_blockers)
        spread(core, request);
    else
        make_runnable(core, request);
}

/* An ISSUED request without blocks leaves `unfinished` and lets go what it blocked. */
static void finish(Core *core, Request *request)
{
    for (Request *later = request->newer; later && request->num_dependents; later = later->newer)
        if (conflict(request, later)) {
            request->num_dependents--;
            if (--later->num_blockers == 0)
                make_runnable(core, later);
        }
    *(request->older ? &request->older->newer : &core->oldest) = request->newer;
    *(request->newer ? &request->newer->older : &core->newest) = request->older;
    *(request->is_write ? &core->num_writes : &core->num_reads) += 1;
    core->num_errors += request->error.code != 0;
    set_state(request, FINISHED);
    request->next = core->finished;
    core->finished = request;
    pthread_cond_broadcast(&request->done);
}

/* No further block of it is made. */
static void stop_issuing(Core *core, Request *request)
{
    if (request->state == RUNNABLE)
        runnable_unlink(core, request);
    core->queued_nbytes -= request->nbytes - request->issued_nbytes;
    request->issued_nbytes = request->nbytes;
    set_state(request, ISSUED);
}

/* ---- the I/O thread ---- */

static void block_free(Core *core, Block *block)
{
    Request *request = block->request;
    block->next = core->free_block;
    core->free_block = (int)(block - core->blocks);
    if (--request->num_blocks == 0 && request->state == ISSUED)
        finish(core, request);
}

static void block_repeat(Core *core, Block *block, int64_t due_ns)
{
    block->due_ns = due_ns;
    block->next = core->first_repeat;
    core->first_repeat = (int)(block - core->blocks);
    core->num_repeats++;
}

static void block_fail(Core *core, Block *block, int code, long long got)
{
    Request *request = block->request;
    if (!request->error.code || block->offset < request->error.offset) {
        request->error.code = code;
        request->error.offset = block->offset;
        request->error.asked = block->nbytes;
        request->error.got = got;
        if (code == EINVAL)
            aio_direct_alignment(request->fd, &request->error.memory_alignment, &request->error.offset_alignment);
    }
    if (request->state != ISSUED)
        stop_issuing(core, request);
    block_free(core, block);
}

/* See [Note: when a transfer is repeated]. With the lock held; the block is no longer with the kernel. */
static void block_done(Core *core, Block *block, long long result)
{
    Request *request = block->request;
    core->inflight_nbytes -= block->nbytes;
    core->num_inflight--;
    if (result == -EAGAIN || result == -EINTR) {
        int64_t now = aio_now_ns();
        if (!block->pause_ns)
            block->hindered_ns = now;
        if (now - block->hindered_ns > PATIENCE_NS) {
            block_fail(core, block, (int)-result, 0);
            return;
        }
        block->pause_ns = !block->pause_ns ? PAUSE_NS : block->pause_ns < 64 * PAUSE_NS ? 2 * block->pause_ns : block->pause_ns;
        block_repeat(core, block, now + block->pause_ns);
        return;
    }
    if (result <= 0 || result > (long long)block->nbytes) {
        block_fail(core, block, result < 0 ? (int)-result : EIO, result < 0 ? 0 : result);
        return;
    }
    size_t gained = (size_t)result;
    if (gained < block->nbytes && (fcntl(request->fd, F_GETFL) & O_DIRECT)) {
        unsigned memory, offset;
        aio_direct_alignment(request->fd, &memory, &offset);
        size_t unit = memory > offset ? memory : offset;
        gained -= unit ? gained % unit : 0;
    }
    block->pause_ns = 0;
    block->num_barren = gained ? 0 : block->num_barren + 1;
    if (block->num_barren >= MAX_BARREN) {
        block_fail(core, block, EIO, result);
        return;
    }
    *(request->is_write ? &core->write_nbytes : &core->read_nbytes) += gained;
    block->memory += gained;
    block->offset += (long long)gained;
    block->nbytes -= gained;
    if (block->nbytes)
        block_repeat(core, block, 0);
    else
        block_free(core, block);
}

static int fits(const Core *core, size_t nbytes)
{
    return !core->inflight_nbytes || core->inflight_nbytes + nbytes <= core->inflight_limit;
}

static void batch_add(Core *core, int position, Block *block)
{
    struct iocb *iocb = &block->iocb;
    (block->request->is_write ? io_prep_pwrite : io_prep_pread)(iocb, block->request->fd, block->memory, block->nbytes,
                                                                block->offset);
    io_set_eventfd(iocb, core->eventfd);
    iocb->data = (void *)(intptr_t)(block - core->blocks);
    core->batch[position] = iocb;
    core->inflight_nbytes += block->nbytes;
    core->num_inflight++;
    if (core->inflight_nbytes > core->peak_inflight_nbytes)
        core->peak_inflight_nbytes = core->inflight_nbytes;
}

static Request *most_urgent(const Core *core)
{
    for (int priority = 0; priority < NUM_PRIORITIES; priority++)
        if (core->first[priority])
            return core->first[priority];
    return NULL;
}

/* Fills `batch` with what may go to the kernel now and returns how many; *sleep_ns is how long the thread may sleep if
 * it is none (below 0: until woken). With the lock held. */
static int gather(Core *core, int64_t *sleep_ns)
{
    int count = 0, repeat = core->first_repeat;
    int64_t now = repeat >= 0 ? aio_now_ns() : 0;
    *sleep_ns = -1;
    core->first_repeat = -1;
    while (repeat >= 0) {
        Block *block = &core->blocks[repeat];
        repeat = block->next;
        if (block->request->error.code) {
            block_free(core, block);
        } else if (block->due_ns <= now && fits(core, block->nbytes)) {
            batch_add(core, count++, block);
        } else {
            block->next = core->first_repeat;
            core->first_repeat = (int)(block - core->blocks);
            if (block->due_ns > now && (*sleep_ns < 0 || block->due_ns - now < *sleep_ns))
                *sleep_ns = block->due_ns - now;
        }
    }
    Request *request;
    while (core->free_block >= 0 && (request = most_urgent(core))) {
        size_t left = request->nbytes - request->issued_nbytes;
        size_t nbytes = left < core->block_nbytes ? left : core->block_nbytes;
        if (!fits(core, nbytes))
            break;
        Block *block = &core->blocks[core->free_block];
        core->free_block = block->next;
        block->request = request;
        block->memory = request->memory + request->issued_nbytes;
        block->offset = request->offset + (long long)request->issued_nbytes;
        block->nbytes = nbytes;
        block->num_barren = 0;
        block->pause_ns = 0;
        request->issued_nbytes += nbytes;
        request->num_blocks++;
        core->queued_nbytes -= nbytes;
        core->num_blocks++;
        if (request->issued_nbytes == request->nbytes)
            stop_issuing(core, request);
        batch_add(core, count++, block);
    }
    return count;
}

static Block *block_of(Core *core, const struct iocb *iocb)
{
    return &core->blocks[(intptr_t)iocb->data];
}

/* Hands the batch over. The lock is free meanwhile: io_submit may sleep. What was refused is settled like a
 * completion. */
static void submit_batch(Core *core, int count)
{
    const struct aio_calls *kernel = atomic_load(&calls);
    int from = 0;
    while (from < count) {
        pthread_mutex_unlock(&core->lock);
        int64_t start = aio_now_ns();
        int accepted = kernel->submit(core->context, count - from, core->batch + from);
        int64_t spent = aio_now_ns() - start;
        pthread_mutex_lock(&core->lock);
        core->submit_ns += spent;
        if (accepted > 0) {
            from += accepted;
        } else if (accepted == 0 || accepted == -EAGAIN || accepted == -EINTR) {
            for (; from < count; from++)
                block_done(core, block_of(core, core->batch[from]), accepted ? accepted : -EAGAIN);
        } else {
            block_done(core, block_of(core, core->batch[from++]), accepted);
        }
    }
}

/* After an error of the context itself: io_destroy has waited for the kernel, so all can fail. */
static void fail_all(Core *core, int code)
{
    core->inflight_nbytes = 0;
    while (core->oldest) {
        Request *request = core->oldest;
        request->error.code = code;
        request->error.offset = request->offset;
        request->error.asked = request->nbytes;
        request->num_blocks = 0;
        if (request->state != ISSUED)
            stop_issuing(core, request);
        finish(core, request);
    }
}

static void *io_thread(void *argument)
{
    Core *core = argument;
    int64_t failing_since = 0;
    pthread_setname_np(pthread_self(), "aio_ext");
    pthread_mutex_lock(&core->lock);
    while (!core->broken) {
        int64_t sleep_ns;
        int count = gather(core, &sleep_ns);
        if (count) {
            submit_batch(core, count);
            continue;
        }
        if (core->closing && !core->oldest)
            break;
        core->asleep = 1; /* in the same hold of the lock as gather: no submission is missed */
        pthread_mutex_unlock(&core->lock);
        const struct aio_calls *kernel = atomic_load(&calls);
        if (failing_since && (sleep_ns < 0 || sleep_ns > PAUSE_NS))
            sleep_ns = PAUSE_NS; /* the eventfd was read, the events are still there */
        kernel->sleep(core->eventfd, sleep_ns);
        struct timespec at_once = {0, 0};
        int got = kernel->getevents(core->context, 0, core->depth, core->events, &at_once);
        pthread_mutex_lock(&core->lock);
        core->asleep = 0;
        core->num_wakeups++;
        for (int i = 0; i < got; i++)
            block_done(core, &core->blocks[(intptr_t)core->events[i].data], (long)core->events[i].res);
        if (got >= 0) {
            failing_since = 0;
        } else if (!failing_since) {
            failing_since = aio_now_ns();
        }
        if (got < 0 && ((got != -EINTR && got != -EAGAIN) || aio_now_ns() - failing_since > PATIENCE_NS))
            core->broken = -got;
    }
    pthread_mutex_unlock(&core->lock);
    atomic_load(&calls)->destroy(core->context); /* waits for what the kernel still has */
    struct timespec cpu = {0, 0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    pthread_mutex_lock(&core->lock);
    if (core->broken)
        fail_all(core, core->broken);
    core->cpu_ns = (int64_t)cpu.tv_sec * 1000000000 + cpu.tv_nsec;
    core->exited = 1;
    pthread_cond_broadcast(&core->exited_cond);
    pthread_mutex_unlock(&core->lock);
    return NULL;
}

/* ---- Core: its life, with the GIL ---- */

typedef struct {
    PyTypeObject *queue_type, *ticket_type;
    Core *live; /* not yet closed by force; for exit */
} State;

typedef struct {
    PyObject_HEAD
    Core *core;
} Queue;

typedef struct {
    PyObject_HEAD
    Core *core;
    Request *request;
} Ticket;

/* After a fork the thread, the context and perhaps the lock's owner are missing: nothing may be touched. */
static int is_foreign(const Core *core)
{
    return core->pid != getpid();
}

static int check_process(const Core *core)
{
    if (!is_foreign(core))
        return 0;
    PyErr_Format(PyExc_RuntimeError,
                 "this aio_ext queue belongs to process %d, not to its forked child %d: make a Queue in the child",
                 (int)core->pid, (int)getpid());
    return -1;
}

static void cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t until_ns)
{
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    pthread_cond_timedwait(cond, lock, &until);
}

static void wake(Core *core)
{
    uint64_t one = 1;
    ssize_t put = write(core->eventfd, &one, sizeof one); /* never blocks: the count stays small */
    (void)put;
}

/* Releases what finished requests held. Runs other objects' code, so without the lock. */
static void reap(Core *core)
{
    pthread_mutex_lock(&core->lock);
    Request *request = core->finished;
    core->finished = NULL;
    for (Request *each = request; each; each = each->next)
        set_state(each, REAPED);
    pthread_mutex_unlock(&core->lock);
    while (request) {
        Request *next = request->next; /* the request goes to the pool with its ticket */
        PyObject *ticket = request->ticket;
        request->ticket = NULL;
        PyBuffer_Release(&request->view);
        Py_DECREF(ticket);
        request = next;
    }
}

static Request *request_new(Core *core)
{
    pthread_mutex_lock(&core->lock);
    Request *request = core->free_request;
    if (request)
        core->free_request = request->next;
    pthread_mutex_unlock(&core->lock);
    if (request)
        return request;
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    for (int i = 0; i < POOL_REQUESTS; i++)
        cond_init(&pool->requests[i].done);
    for (int i = 1; i + 1 < POOL_REQUESTS; i++)
        pool->requests[i].next = &pool->requests[i + 1];
    pthread_mutex_lock(&core->lock);
    pool->requests[POOL_REQUESTS - 1].next = core->free_request;
    core->free_request = &pool->requests[1];
    pool->next = core->pools;
    core->pools = pool;
    pthread_mutex_unlock(&core->lock);
    return &pool->requests[0];
}

static void request_free(Core *core, Request *request)
{
    pthread_mutex_lock(&core->lock);
    if (request->state != FREE)
        set_state(request, FREE);
    request->next = core->free_request;
    core->free_request = request;
    pthread_mutex_unlock(&core->lock);
}

/* Waits until the thread is gone, then reaps. With signals: -1 and KeyboardInterrupt or the like, and it may be called
 * again. */
static int core_close(Core *core, int with_signals)
{
    pthread_mutex_lock(&core->lock);
    int must_wake = core->has_thread && !core->closing;
    core->closing = 1;
    int exited = core->exited || !core->has_thread;
    pthread_mutex_unlock(&core->lock);
    if (must_wake)
        wake(core);
    while (!exited) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&core->lock);
        if (!core->exited)
            cond_wait_until(&core->exited_cond, &core->lock, aio_now_ns() + SLICE_NS);
        exited = core->exited;
        pthread_mutex_unlock(&core->lock);
        Py_END_ALLOW_THREADS
        if (!exited && with_signals && PyErr_CheckSignals() < 0)
            return -1;
    }
    if (core->has_thread && !core->joined) {
        core->joined = 1;
        pthread_join(core->thread, NULL); /* past its last statement: no wait */
    }
    if (core->eventfd >= 0)
        close(core->eventfd);
    core->eventfd = -1;
    if (core->live_link) {
        *core->live_link = core->next_live;
        if (core->next_live)
            core->next_live->live_link = core->live_link;
        core->live_link = NULL;
    }
    reap(core);
    return 0;
}

static void core_decref(Core *core)
{
    if (--core->refs || is_foreign(core))
        return;
    for (Pool *pool = core->pools, *next; pool; pool = next) {
        next = pool->next;
        for (int i = 0; i < POOL_REQUESTS; i++)
            pthread_cond_destroy(&pool->requests[i].done);
        free(pool);
    }
    pthread_cond_destroy(&core->exited_cond);
    pthread_mutex_destroy(&core->lock);
    free(core->blocks);
    free(core->batch);
    free(core->events);
    free(core);
}

static Core *core_new(size_t block_nbytes, size_t inflight_nbytes, int depth)
{
    Core *core = calloc(1, sizeof *core);
    if (!core)
        return NULL;
    core->refs = 1;
    core->pid = getpid();
    core->block_nbytes = block_nbytes;
    core->inflight_limit = inflight_nbytes;
    core->depth = depth;
    core->eventfd = core->first_repeat = -1;
    pthread_mutex_init(&core->lock, NULL);
    cond_init(&core->exited_cond);
    return core;
}

/* Sets up the context, the blocks and the thread; 0 or an errno. Without the GIL. */
static int core_start(Core *core)
{
    int result = atomic_load(&calls)->setup(core->depth, &core->context);
    while (result == -EAGAIN && core->depth > 1) {
        core->depth /= 2;
        result = atomic_load(&calls)->setup(core->depth, &core->context);
    }
    if (result < 0)
        return -result;
    core->blocks = calloc((size_t)core->depth, sizeof *core->blocks);
    core->batch = calloc((size_t)core->depth, sizeof *core->batch);
    core->events = calloc((size_t)core->depth, sizeof *core->events);
    core->eventfd = eventfd(0, EFD_CLOEXEC);
    if (!core->blocks || !core->batch || !core->events || core->eventfd < 0) {
        result = core->eventfd < 0 ? errno : ENOMEM;
        goto error;
    }
    for (int i = 0; i < core->depth; i++)
        core->blocks[i].next = i + 1 < core->depth ? i + 1 : -1;

    sigset_t all, before; /* Python's signals are for Python's threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    result = pthread_create(&core->thread, NULL, io_thread, core);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result)
        goto error;
    core->has_thread = 1;
    return 0;
error:
    io_destroy(core->context);
    return result;
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

static PyObject *Queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"block_nbytes", "inflight_nbytes", "depth", NULL};
    Py_ssize_t block_nbytes = 1 << 20, inflight_nbytes = 8 << 20, depth = 64;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$nnn:Queue", names, &block_nbytes, &inflight_nbytes, &depth))
        return NULL;
    if (parse_size("block_nbytes", block_nbytes, 4096, 1 << 30, 4096) < 0 ||
        parse_size("inflight_nbytes", inflight_nbytes, 1, PY_SSIZE_T_MAX, 1) < 0 ||
        parse_size("depth", depth, 1, 65536, 1) < 0)
        return NULL;
    State *state = PyType_GetModuleState(type);
    if (!state)
        return NULL;
    Queue *self = (Queue *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->core = core_new((size_t)block_nbytes, (size_t)inflight_nbytes, (int)depth);
    if (!self->core) {
        PyErr_NoMemory();
        goto error;
    }
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = core_start(self->core);
    Py_END_ALLOW_THREADS
    if (code) {
        PyObject *text = PyUnicode_FromFormat(
            "io_setup: %s; %s", strerror(code),
            code == EAGAIN   ? "other programs use all of /proc/sys/fs/aio-max-nr: raise it (sysctl fs.aio-max-nr)"
            : code == ENOSYS ? "this kernel or its seccomp filter has no asynchronous I/O (CONFIG_AIO)"
                             : "no I/O queue could be made");
        PyObject *error = text ? Py_BuildValue("(iN)", code, text) : NULL;
        if (error)
            PyErr_SetObject(PyExc_OSError, error);
        Py_XDECREF(error);
        goto error;
    }
    Core *core = self->core;
    core->live_link = &state->live;
    core->next_live = state->live;
    if (state->live)
        state->live->live_link = &core->next_live;
    state->live = core;
    if (core->depth < depth &&
        PyErr_WarnFormat(PyExc_RuntimeWarning, 1,
                         "io_setup granted a depth of %d of the %zd asked for: raise /proc/sys/fs/aio-max-nr", core->depth,
                         depth) < 0)
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
    if (self->core && !is_foreign(self->core)) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        core_close(self->core, 0);
        PyErr_Restore(kind, value, trace);
        core_decref(self->core);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *queue_submit(Queue *self, PyObject *args, PyObject *kwargs, int is_write)
{
    static char *names[] = {"fd", "buffer", "offset", "priority", NULL};
    int fd, priority = is_write ? 2 : 1;
    PyObject *buffer;
    long long offset;
    Core *core = self->core;
    Py_buffer view = {0};
    Request *request = NULL;
    if (check_process(core) < 0)
        return NULL;
    reap(core);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, is_write ? "iOL|$i:write" : "iOL|$i:read", names, &fd, &buffer, &offset,
                                     &priority))
        return NULL;
    if (PyObject_GetBuffer(buffer, &view, is_write ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return NULL;
    if (fd < 0) {
        PyErr_Format(PyExc_ValueError, "fd=%d: expected an open file descriptor", fd);
        goto error;
    }
    if (offset < 0 || offset > LLONG_MAX - view.len) {
        PyErr_Format(PyExc_ValueError, "offset=%lld with %zd bytes: expected a range from 0 to 2**63 - 1", offset, view.len);
        goto error;
    }
    if (priority < 0 || priority >= NUM_PRIORITIES) {
        PyErr_Format(PyExc_ValueError, "priority=%d: expected DEMAND (0), PREFETCH (1) or WRITE (2)", priority);
        goto error;
    }
    State *state = PyType_GetModuleState(Py_TYPE(self));
    Ticket *ticket = (Ticket *)state->ticket_type->tp_alloc(state->ticket_type, 0);
    if (!ticket)
        goto error;
    request = request_new(core);
    if (!request) {
        Py_DECREF(ticket);
        PyErr_NoMemory();
        goto error;
    }
    ticket->core = core;
    ticket->request = request;
    core->refs++;
    request->fd = fd;
    request->is_write = is_write;
    request->priority = priority;
    request->offset = offset;
    request->nbytes = (size_t)view.len;
    request->issued_nbytes = 0;
    request->num_blocks = 0;
    request->num_blockers = request->num_dependents = 0;
    memset(&request->error, 0, sizeof request->error);

    pthread_mutex_lock(&core->lock);
    int broken = core->broken, closing = core->closing, must_wake = 0;
    if (!broken && !closing && view.len) {
        request->ticket = Py_NewRef((PyObject *)ticket);
        request->view = view;
        request->memory = view.buf;
        enqueue(core, request);
        must_wake = core->asleep && request->state == RUNNABLE && core->inflight_nbytes < core->inflight_limit;
        core->asleep = must_wake ? 0 : core->asleep;
    }
    pthread_mutex_unlock(&core->lock);
    if (broken || closing) {
        Py_DECREF(ticket);
        PyErr_Format(broken ? PyExc_OSError : PyExc_ValueError,
                     broken ? "the I/O queue broke down earlier: %s" : "%s on a closed queue",
                     broken ? strerror(broken) : is_write ? "write" : "read");
        goto error;
    }
    if (must_wake)
        wake(core);
    if (!view.len)
        PyBuffer_Release(&view);
    return (PyObject *)ticket;
error:
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
    if (check_process(self->core) < 0 || core_close(self->core, 1) < 0)
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
    Core *core = self->core;
    if (check_process(core) < 0)
        return NULL;
    reap(core);
    pthread_mutex_lock(&core->lock);
    Core copy = *core;
    clockid_t clock;
    struct timespec cpu;
    if (core->has_thread && !core->exited && pthread_getcpuclockid(core->thread, &clock) == 0 &&
        clock_gettime(clock, &cpu) == 0)
        copy.cpu_ns = (int64_t)cpu.tv_sec * 1000000000 + cpu.tv_nsec;
    pthread_mutex_unlock(&core->lock);
    return Py_BuildValue("{sK sK sK sK sK sK sK sK sn sn sn sd sd}", "read_nbytes", copy.read_nbytes, "write_nbytes",
                         copy.write_nbytes, "num_reads", copy.num_reads, "num_writes", copy.num_writes, "num_blocks",
                         copy.num_blocks, "num_repeats", copy.num_repeats, "num_errors", copy.num_errors, "num_wakeups",
                         copy.num_wakeups, "queued_nbytes", copy.queued_nbytes, "inflight_nbytes", copy.inflight_nbytes,
                         "peak_inflight_nbytes", copy.peak_inflight_nbytes, "submit_seconds", (double)copy.submit_ns / 1e9,
                         "cpu_seconds", (double)copy.cpu_ns / 1e9);
}

static PyObject *Queue_repr(Queue *self)
{
    return PyUnicode_FromFormat("Queue(block_nbytes=%zu, inflight_nbytes=%zu, depth=%d%s)", self->core->block_nbytes,
                                self->core->inflight_limit, self->core->depth, self->core->closing ? ", closed" : "");
}

static PyObject *Queue_depth(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->core->depth);
}

static PyObject *Queue_block_nbytes(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->core->block_nbytes);
}

static PyObject *Queue_inflight_nbytes(Queue *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(self->core->inflight_limit);
}

static PyObject *Queue_closed(Queue *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(self->core->closing);
}

static PyMethodDef Queue_methods[] = {
    {"read", (PyCFunction)(void (*)(void))Queue_read, METH_VARARGS | METH_KEYWORDS,
     "read(fd, buffer, offset, *, priority=PREFETCH) -> Ticket\n--\n\nFill a contiguous writable buffer from the file."},
    {"write", (PyCFunction)(void (*)(void))Queue_write, METH_VARARGS | METH_KEYWORDS,
     "write(fd, buffer, offset, *, priority=WRITE) -> Ticket\n--\n\nWrite a contiguous buffer to the file."},
    {"close", (PyCFunction)Queue_close, METH_NOARGS, "Finish all that was submitted and end the I/O thread; idempotent."},
    {"stats", (PyCFunction)Queue_stats, METH_NOARGS,
     "Counters since the start: *_nbytes moved, num_* requests, blocks, repeats; seconds in io_submit and of CPU."},
    {"__enter__", Queue_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)Queue_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Queue_getset[] = {
    {"depth", (getter)Queue_depth, NULL, "Blocks that io_setup granted.", NULL},
    {"block_nbytes", (getter)Queue_block_nbytes, NULL, "Largest transfer handed to the kernel.", NULL},
    {"inflight_nbytes", (getter)Queue_inflight_nbytes, NULL, "Bound of the bytes with the kernel.", NULL},
    {"closed", (getter)Queue_closed, NULL, "close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Queue_slots[] = {
    {Py_tp_doc, "Queue(*, block_nbytes=1048576, inflight_nbytes=8388608, depth=64)\n--\n\n"
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
    if (self->core && !is_foreign(self->core)) {
        request_free(self->core, self->request);
        core_decref(self->core);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

static int is_done(const Request *request)
{
    return request->state == FINISHED || request->state == REAPED || !request->nbytes;
}

static PyObject *raise_failure(const Request *request)
{
    const char *op = request->is_write ? "write" : "read";
    int code = request->error.code;
    PyObject *hint;
    if (code == EINVAL && request->error.offset_alignment)
        hint = PyUnicode_FromFormat(
            "; with O_DIRECT this file needs memory aligned to %u bytes (it is %zu past), the offset (%zu past) and the "
            "size (%zu past) to %u bytes",
            request->error.memory_alignment, (size_t)request->memory % request->error.memory_alignment,
            (size_t)request->offset % request->error.offset_alignment, request->nbytes % request->error.offset_alignment,
            request->error.offset_alignment);
    else
        hint = PyUnicode_FromString(code == EINVAL               ? "; this file takes no O_DIRECT transfers"
                                    : code == EIO && request->is_write ? "; the device took no more, or failed"
                                    : code == EIO ? "; the file ends there, or the device returned nothing"
                                    : code == EAGAIN || code == EINTR ? "; the kernel kept refusing it for two seconds"
                                                                      : "");
    if (!hint)
        return NULL;
    PyObject *text = PyUnicode_FromFormat("%s: %s of fd %d at file offset %lld: asked for %zu bytes, got %lld%U",
                                          strerror(code), op, request->fd, request->error.offset, request->error.asked,
                                          request->error.got, hint);
    Py_DECREF(hint);
    PyObject *arguments = text ? Py_BuildValue("(iN)", code, text) : NULL;
    if (arguments)
        PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return NULL;
}

static PyObject *Ticket_wait(Ticket *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout", NULL};
    PyObject *timeout = Py_None;
    Core *core = self->core;
    Request *request = self->request;
    int64_t deadline = INT64_MAX;
    if (check_process(core) < 0)
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
        int64_t now = aio_now_ns();
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&core->lock);
        int64_t slice = now + SLICE_NS < deadline ? now + SLICE_NS : deadline;
        while (!(done = is_done(request)) && (now = aio_now_ns()) < slice)
            cond_wait_until(&request->done, &core->lock, slice);
        pthread_mutex_unlock(&core->lock);
        Py_END_ALLOW_THREADS
        if (done || now >= deadline)
            break;
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    reap(core);
    if (done && request->error.code)
        return raise_failure(request);
    return PyBool_FromLong(done);
}

static PyObject *Ticket_promote(Ticket *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"priority", NULL};
    int priority = 0;
    Core *core = self->core;
    Request *request = self->request;
    if (check_process(core) < 0)
        return NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|i:promote", names, &priority))
        return NULL;
    if (priority < 0 || priority >= NUM_PRIORITIES) {
        PyErr_Format(PyExc_ValueError, "priority=%d: expected DEMAND (0), PREFETCH (1) or WRITE (2)", priority);
        return NULL;
    }
    pthread_mutex_lock(&core->lock);
    if ((request->state == BLOCKED || request->state == RUNNABLE) && priority < request->priority) {
        set_priority(core, request, priority);
        if (request->state == BLOCKED)
            spread(core, request);
    }
    pthread_mutex_unlock(&core->lock);
    reap(core);
    Py_RETURN_NONE;
}

static PyObject *Ticket_done(Ticket *self, void *Py_UNUSED(closure))
{
    if (check_process(self->core) < 0)
        return NULL;
    pthread_mutex_lock(&self->core->lock);
    int done = is_done(self->request);
    pthread_mutex_unlock(&self->core->lock);
    reap(self->core);
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
    Request *request = self->request;
    if (is_foreign(self->core))
        return PyUnicode_FromString("Ticket(of another process)");
    pthread_mutex_lock(&self->core->lock);
    const char *state = !is_done(request) ? priority_names[request->priority] : request->error.code ? "failed" : "done";
    pthread_mutex_unlock(&self->core->lock);
    return PyUnicode_FromFormat("Ticket(%s of %zu bytes at %lld, %s)", request->is_write ? "write" : "read", request->nbytes,
                                request->offset, state);
}

static PyMethodDef Ticket_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))Ticket_wait, METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None) -> bool\n--\n\nTrue once done, False after timeout seconds; raises OSError if the request failed."},
    {"promote", (PyCFunction)(void (*)(void))Ticket_promote, METH_VARARGS | METH_KEYWORDS,
     "promote(priority=DEMAND)\n--\n\nRaise a request, and the ones it waits for, while it is not yet with the kernel."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Ticket_getset[] = {
    {"done", (getter)Ticket_done, NULL, "Finished, well or not.", NULL},
    {"nbytes", (getter)Ticket_nbytes, NULL, "Bytes asked for.", NULL},
    {"offset", (getter)Ticket_offset, NULL, "Where in the file they start.", NULL},
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

static PyObject *inject(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"call", "nth", "times", "result", "every", "delay", NULL};
    static const char *const call_names[AIO_NUM_CALLS] = {"io_setup",   "io_submit", "io_getevents",
                                                          "io_destroy", "read",      "write"};
    const char *call = NULL;
    struct aio_rule rule = {.times = 1, .every = 1, .call = AIO_NUM_CALLS};
    PyObject *result = Py_None;
    double delay = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|zllO$ld:_inject", names, &call, &rule.nth, &rule.times, &result,
                                     &rule.every, &delay))
        return NULL;
    if (!call)
        return PyLong_FromLong(aio_fault_clear());
    for (int i = 0; i < AIO_NUM_CALLS; i++)
        if (!strcmp(call, call_names[i]))
            rule.call = (enum aio_call)i;
    if (PyFloat_Check(result)) {
        rule.effect = AIO_FRACTION;
        rule.fraction = PyFloat_AS_DOUBLE(result);
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
    atomic_store(&calls, &aio_faulty); /* for good: late blocks may still be with it */
    Py_RETURN_NONE;
}

/* Exit, while Python still works: all I/O is finished and all buffers are released. */
static PyObject *close_all(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    State *state = PyModule_GetState(module);
    Core *core;
    while ((core = state->live) && !is_foreign(core)) {
        core->refs++;
        core_close(core, 0);
        core_decref(core);
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"direct_alignment", direct_alignment, METH_O,
     "direct_alignment(fd) -> (memory, offset)\n--\n\nBytes that O_DIRECT needs: 4096 where unknown, 0 where it is refused."},
    {"_inject", (PyCFunction)(void (*)(void))inject, METH_VARARGS | METH_KEYWORDS,
     "_inject(call=None, nth=0, times=1, result=None, *, every=1, delay=0.0)\n--\n\n"
     "Tests only. call: io_setup, io_submit, io_getevents, io_destroy, or read, write for a block of that kind; those from the\n"
     "nth on, each `every`-th, `times` of them (-1: all). result: -errno; for io_submit also how many are accepted; for a block an\n"
     "int is bytes fewer than asked, a float the fraction moved. delay: seconds until a block reaches the kernel. Without call:\n"
     "forget all and return how many were met."},
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
