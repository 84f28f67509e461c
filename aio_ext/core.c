/* See core.h. The order: records, order of requests, the I/O thread, functions for callers.
 *
 * Longer than other files here because requests, the I/O thread and callers share one lock and one set of lists.
 *
 * [Note: a read sees the last write] Two requests conflict if they overlap on one fd and at least one is a write. A request starts only when
 * no earlier unfinished request conflicts with it. core_submit counts the blockers of a new request, and finish() decrements this count.
 * Both walk the unfinished requests in order of submission, and byte ranges never change. So both find the same pairs, and no edge is
 * stored. A blocker is at least as urgent as the requests that it blocks: core_submit and core_promote raise whole chains of blockers.
 * So a promoted read does not wait behind a queue of writes. Blockers are always older, so there is no circular wait.
 *
 * [Note: when a transfer is repeated] The I/O thread compares each result, as a signed number, with the bytes asked for.
 *   - Fewer bytes: the rest is submitted again, from a multiple of the direct alignment (O_DIRECT cannot continue elsewhere). MAX_BARREN
 *     completions in a row that gain no aligned unit are EIO. No bytes at all are EIO at once.
 *   - EAGAIN or EINTR, from submit or completion: the block is submitted again after a pause. Pauses double up to 64 ms. After one second
 *     without progress the block fails.
 *   - Any other error is the request's error. No further block is started; the thread waits for blocks in the kernel.
 *
 * [Note: which thread compares checksums] The first thread that waits for a read with sums compares them, once and without the lock. Other
 * threads that wait for this read wait for the comparison, too. So no bytes are used unchecked. The work runs on threads that would wait
 * anyway, not on the I/O thread. The sums are copied when the read is submitted, because a later write, which must wait for the read, may
 * finish before the comparison. A read for which no thread waits is never checked. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "crc32c.h"

#define POOL_REQUESTS 64            /* requests allocated together; afterwards they are reused */
#define MAX_BARREN 3                /* transfers in a row without progress */
#define PAUSE_NS ((int64_t)1000000) /* first pause after EAGAIN, doubled up to 64 times this */
#define PATIENCE_NS ((int64_t)1000000000)
#define TURN_NS 100000              /* shortest time slice of Linux */
/* The kernel merges adjacent blocks of one submit into one request. Merging helps small blocks. But a drive finishes a few requests of
 * several MiB all at once, and is then idle until the next requests arrive. */
#define MAX_SUBMIT_NBYTES ((size_t)1 << 20)

static _Atomic(const struct aio_calls *) calls = &aio_kernel;

/* ---- records ---- */

static const unsigned legal[NUM_STATES] = {
    [FREE] = 1u << BLOCKED,
    [BLOCKED] = 1u << RUNNABLE | 1u << ISSUED,
    [RUNNABLE] = 1u << ISSUED,
    [ISSUED] = 1u << FINISHED,
    [FINISHED] = 1u << TAKEN,
    [TAKEN] = 1u << FREE,
};

typedef struct block {
    struct iocb iocb;
    Request *request;
    char *memory;
    long long offset;
    size_t nbytes;          /* still to be moved */
    int num_barren;
    int64_t pause_ns;       /* the last pause; 0: none since the last progress */
    int64_t hindered_ns;    /* time of the first EAGAIN in a row */
    int64_t due_ns;         /* earliest time of the next submit */
    int next;               /* in the list of `free_block` or `first_repeat`; -1: the end */
} Block;

typedef struct pool {
    struct pool *next;
    Request requests[POOL_REQUESTS];
} Pool;

static void set_state(Request *request, enum state state)
{
    if (!(legal[request->state] & 1u << state)) {
        fprintf(stderr, "aio_ext: illegal transition of a request from state %d to %d\n", request->state, state);
        abort();
    }
    request->state = state;
}

/* ---- order of requests; all functions need the lock held ---- */

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

static int is_done(const Request *request)
{
    return request->state == FINISHED || request->state == TAKEN;
}

static void set_priority(Core *core, Request *request, int priority)
{
    if (request->state == RUNNABLE)
        runnable_unlink(core, request);
    request->priority = priority;
    if (request->state == RUNNABLE)
        runnable_link(core, request);
}

/* Gives the priority of `request` to all requests that block it, directly or through others. `request` must be BLOCKED or new: `next` is
 * unused then. The same holds for raised requests with blockers of their own. */
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

/* Appends a new request to the unfinished ones. */
static void enqueue(Core *core, Request *request)
{
    request->number = core->num_submitted++;
    request->older = core->newest;
    request->newer = NULL;
    *(core->newest ? &core->newest->newer : &core->oldest) = request;
    core->newest = request;
    core->stats.queued_nbytes += request->nbytes;
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

static void publish(Core *core, Request *request)
{
    *(request->is_write ? &core->stats.num_writes : &core->stats.num_reads) += 1;
    core->stats.num_errors += request->error.code != 0;
    request->check = request->sums && !request->error.code ? DUE : CHECKED;
    set_state(request, FINISHED);
    request->next = core->finished;
    core->finished = request;
    pthread_cond_broadcast(&request->done);
}

/* Removes an ISSUED request without blocks from the unfinished ones, and unblocks later requests. */
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
    publish(core, request);
}

/* Makes no further block of the request. */
static void stop_issuing(Core *core, Request *request)
{
    if (request->state == RUNNABLE)
        runnable_unlink(core, request);
    core->stats.queued_nbytes -= request->nbytes - request->issued_nbytes;
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
    core->stats.num_repeats++;
}

static void block_fail(Core *core, Block *block, int code, long long got)
{
    Request *request = block->request;
    if (!request->error.code || block->offset < request->error.offset) {
        request->error.code = code;
        request->error.offset = block->offset;
        request->error.asked = block->nbytes;
        request->error.got = got;
        if (code == EINVAL && (fcntl(request->fd, F_GETFL) & O_DIRECT))
            aio_direct_alignment(request->fd, &request->error.memory_alignment, &request->error.offset_alignment);
    }
    if (request->state != ISSUED)
        stop_issuing(core, request);
    block_free(core, block);
}

/* See [Note: when a transfer is repeated]. Needs the lock held. The kernel has returned the block. */
static void block_done(Core *core, Block *block, long long result)
{
    Request *request = block->request;
    core->stats.inflight_nbytes -= block->nbytes;
    core->stats.inflight_write_nbytes -= request->is_write ? block->nbytes : 0;
    core->num_inflight_writes -= request->is_write;
    if (!core->stats.inflight_nbytes)
        core->stats.busy_ns += aio_now_ns() - core->busy_since_ns;
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
    *(request->is_write ? &core->stats.write_nbytes : &core->stats.read_nbytes) += gained;
    block->memory += gained;
    block->offset += (long long)gained;
    block->nbytes -= gained;
    if (block->nbytes)
        block_repeat(core, block, 0);
    else
        block_free(core, block);
}

/* A single block always fits, whatever its size. */
static int fits(const Core *core, size_t nbytes, int is_write)
{
    if (core->stats.inflight_nbytes && core->stats.inflight_nbytes + nbytes > core->inflight_limit)
        return 0;
    return !is_write || !core->stats.inflight_write_nbytes ||
           core->stats.inflight_write_nbytes + nbytes <= core->inflight_write_limit;
}

static void batch_add(Core *core, int position, Block *block)
{
    struct iocb *iocb = &block->iocb;
    (block->request->is_write ? io_prep_pwrite : io_prep_pread)(iocb, block->request->fd, block->memory, block->nbytes,
                                                                block->offset);
    io_set_eventfd(iocb, core->eventfd);
    iocb->data = (void *)(intptr_t)(block - core->blocks);
    core->batch[position] = iocb;
    if (!core->stats.inflight_nbytes)
        core->busy_since_ns = aio_now_ns();
    core->stats.inflight_nbytes += block->nbytes;
    core->stats.inflight_write_nbytes += block->request->is_write ? block->nbytes : 0;
    core->num_inflight_writes += block->request->is_write;
    if (core->stats.inflight_nbytes > core->stats.peak_inflight_nbytes)
        core->stats.peak_inflight_nbytes = core->stats.inflight_nbytes;
}

static size_t next_nbytes(const Core *core, const Request *request)
{
    size_t left = request->nbytes - request->issued_nbytes;
    return left < core->block_nbytes ? left : core->block_nbytes;
}

/* Returns the request whose next block goes to the kernel: the most urgent one. But a write of the last priority goes before an urgent read
 * while writes have at most half of the bytes and blocks in flight, and leave room for the read. Without this share all reads would
 * overtake the writes: the drive would get only reads, then only writes. A drive moves more bytes with both at once. */
static Request *next_request(const Core *core)
{
    Request *urgent = NULL, *write = core->first[NUM_PRIORITIES - 1];
    for (int priority = 0; priority < NUM_PRIORITIES && !urgent; priority++)
        urgent = core->first[priority];
    if (!urgent || urgent->is_write || !write || !write->is_write)
        return urgent;
    size_t nbytes = next_nbytes(core, write), writes_nbytes = core->stats.inflight_write_nbytes + nbytes;
    int has_share = 2 * writes_nbytes <= core->inflight_limit && 2 * (core->num_inflight_writes + 1) <= core->depth &&
                    writes_nbytes + next_nbytes(core, urgent) <= core->inflight_limit;
    return has_share && fits(core, nbytes, 1) ? write : urgent;
}

/* Fills `batch` with the blocks that may go to the kernel now, and returns their number. If there is none, *sleep_ns is the time that the
 * thread may sleep (below 0: until woken). Needs the lock held. */
static int gather(Core *core, int64_t *sleep_ns)
{
    int count = 0, waiting = 0, repeat = core->first_repeat;
    int64_t now = repeat >= 0 ? aio_now_ns() : 0;
    *sleep_ns = -1;
    core->first_repeat = -1;
    while (repeat >= 0) {
        Block *block = &core->blocks[repeat];
        repeat = block->next;
        if (block->request->error.code) {
            block_free(core, block);
        } else if (block->due_ns <= now && fits(core, block->nbytes, block->request->is_write)) {
            batch_add(core, count++, block);
        } else {
            block->next = core->first_repeat;
            core->first_repeat = (int)(block - core->blocks);
            waiting |= block->due_ns <= now; /* for room in flight: no smaller block may go first */
            if (block->due_ns > now && (*sleep_ns < 0 || block->due_ns - now < *sleep_ns))
                *sleep_ns = block->due_ns - now;
        }
    }
    Request *request;
    while (!waiting && core->free_block >= 0 && (request = next_request(core))) {
        size_t nbytes = next_nbytes(core, request);
        if (!fits(core, nbytes, request->is_write))
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
        core->stats.queued_nbytes -= nbytes;
        core->stats.num_blocks++;
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

/* Number of blocks, starting at `from`, that go to the kernel in one call. */
static int submittable(const Core *core, int from, int count)
{
    size_t nbytes = core->batch[from]->u.c.nbytes;
    int end = from + 1;
    while (end < count && nbytes + core->batch[end]->u.c.nbytes <= MAX_SUBMIT_NBYTES)
        nbytes += core->batch[end++]->u.c.nbytes;
    return end - from;
}

/* Submits the batch, with the lock released, because io_submit may sleep. A refused block is handled like a completion. */
static void submit_batch(Core *core, int count)
{
    const struct aio_calls *kernel = atomic_load(&calls);
    int from = 0;
    while (from < count) {
        pthread_mutex_unlock(&core->lock);
        int64_t start = aio_now_ns();
        int accepted = kernel->submit(core->context, submittable(core, from, count), core->batch + from);
        int64_t spent = aio_now_ns() - start;
        pthread_mutex_lock(&core->lock);
        core->stats.submit_ns += spent;
        core->stats.num_submits++;
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

/* Fails all requests after an error of the context. io_destroy has waited for the kernel, so no transfer is in flight. */
static void fail_all(Core *core, int code)
{
    if (core->stats.inflight_nbytes)
        core->stats.busy_ns += aio_now_ns() - core->busy_since_ns;
    core->stats.inflight_nbytes = core->stats.inflight_write_nbytes = 0;
    core->num_inflight_writes = 0;
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

/* Asks for short time slices. Beside threads that compute on all cores, such a thread runs sooner after the drive has finished a block.
 * Linux before 6.12 ignores the request. If the call is refused, the thread keeps the default slice. */
static void ask_for_short_turns(void)
{
    struct { /* sched_attr, as of Linux 3.14 */
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime_ns, deadline_ns, period_ns;
    } attributes;
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) || attributes.policy != SCHED_OTHER)
        return;
    attributes.runtime_ns = TURN_NS;
    syscall(SYS_sched_setattr, 0, &attributes, 0);
}

static void *io_thread(void *argument)
{
    Core *core = argument;
    int64_t failing_since = 0;
    pthread_setname_np(pthread_self(), "aio_ext");
    ask_for_short_turns();
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
        core->asleep = 1; /* the lock is held since gather(): no submission is missed */
        pthread_mutex_unlock(&core->lock);
        const struct aio_calls *kernel = atomic_load(&calls);
        if (failing_since && (sleep_ns < 0 || sleep_ns > PAUSE_NS))
            sleep_ns = PAUSE_NS; /* getevents failed after the eventfd was read: the events are still queued */
        kernel->sleep(core->eventfd, sleep_ns);
        struct timespec at_once = {0, 0};
        int got = kernel->getevents(core->context, 0, core->depth, core->events, &at_once);
        pthread_mutex_lock(&core->lock);
        core->asleep = 0;
        core->stats.num_wakeups++;
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
    atomic_load(&calls)->destroy(core->context); /* waits for transfers in the kernel */
    struct timespec cpu = {0, 0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    pthread_mutex_lock(&core->lock);
    if (core->broken)
        fail_all(core, core->broken);
    core->stats.cpu_ns = (int64_t)cpu.tv_sec * 1000000000 + cpu.tv_nsec;
    core->exited = 1;
    pthread_cond_broadcast(&core->exited_cond);
    pthread_mutex_unlock(&core->lock);
    return NULL;
}

/* ---- functions for callers, from any thread ---- */

void core_use(const struct aio_calls *other)
{
    atomic_store(&calls, other);
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

Core *core_new(size_t block_nbytes, size_t inflight_limit, size_t inflight_write_limit, int depth)
{
    Core *core = calloc(1, sizeof *core);
    if (!core)
        return NULL;
    core->block_nbytes = block_nbytes;
    core->inflight_limit = inflight_limit;
    core->inflight_write_limit = inflight_write_limit;
    core->depth = depth;
    core->eventfd = core->first_repeat = -1;
    pthread_mutex_init(&core->lock, NULL);
    cond_init(&core->exited_cond);
    return core;
}


int core_start(Core *core)
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

    sigset_t all, before; /* Python's threads handle Python's signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    result = pthread_create(&core->thread, NULL, io_thread, core);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result)
        goto error;
    core->has_thread = 1;
    return 0;
error:
    aio_kernel.destroy(core->context);
    return result;
}

void core_free(Core *core)
{
    for (Pool *pool = core->pools, *next; pool; pool = next) {
        next = pool->next;
        for (int i = 0; i < POOL_REQUESTS; i++)
            pthread_cond_destroy(&pool->requests[i].done);
        free(pool);
    }
    if (core->eventfd >= 0)
        close(core->eventfd);
    pthread_cond_destroy(&core->exited_cond);
    pthread_mutex_destroy(&core->lock);
    free(core->blocks);
    free(core->batch);
    free(core->events);
    free(core);
}

Request *core_request_new(Core *core)
{
    pthread_mutex_lock(&core->lock);
    Request *request = core->free_request;
    if (!request) {
        Pool *pool = calloc(1, sizeof *pool);
        if (!pool) {
            pthread_mutex_unlock(&core->lock);
            return NULL;
        }
        for (int i = 0; i < POOL_REQUESTS; i++) {
            cond_init(&pool->requests[i].done);
            pool->requests[i].next = i + 1 < POOL_REQUESTS ? &pool->requests[i + 1] : NULL;
        }
        pool->next = core->pools;
        core->pools = pool;
        request = pool->requests;
    }
    core->free_request = request->next;
    pthread_mutex_unlock(&core->lock);
    request->sums = NULL;
    request->check = CHECKED;
    request->issued_nbytes = 0;
    request->num_blocks = 0;
    request->num_blockers = request->num_dependents = 0;
    memset(&request->error, 0, sizeof request->error);
    return request;
}

void core_request_free(Core *core, Request *request)
{
    pthread_mutex_lock(&core->lock);
    if (request->state != FREE) /* the request was submitted */
        set_state(request, FREE);
    request->next = core->free_request;
    core->free_request = request;
    pthread_mutex_unlock(&core->lock);
}

int core_submit(Core *core, Request *request)
{
    pthread_mutex_lock(&core->lock);
    int refused = core->broken ? core->broken : core->closing ? -1 : 0;
    if (!refused && !request->nbytes) {
        set_state(request, BLOCKED);
        set_state(request, ISSUED);
        publish(core, request);
    } else if (!refused) {
        enqueue(core, request);
        int must_wake = core->asleep && request->state == RUNNABLE && core->stats.inflight_nbytes < core->inflight_limit;
        if (must_wake) {
            core->asleep = 0;
            wake(core);
        }
    }
    pthread_mutex_unlock(&core->lock);
    return refused;
}

void core_promote(Core *core, Request *request, int priority)
{
    pthread_mutex_lock(&core->lock);
    if ((request->state == BLOCKED || request->state == RUNNABLE) && priority < request->priority) {
        set_priority(core, request, priority);
        if (request->state == BLOCKED)
            spread(core, request);
    }
    pthread_mutex_unlock(&core->lock);
}

int core_is_done(Core *core, const Request *request)
{
    pthread_mutex_lock(&core->lock);
    int done = is_done(request) && request->check != CHECKING;
    pthread_mutex_unlock(&core->lock);
    return done;
}

/* The first page whose checksum is not the expected one; NULL: there is none. */
static const char *changed_page(const Request *request, uint32_t *expected)
{
    const uint32_t *sum = request->sums;
    for (const char *page = request->memory, *end = page + request->nbytes; page < end; page += SUM_NBYTES, sum++)
        if (crc32c_page(page) != (*expected = *sum))
            return page;
    return NULL;
}

/* See [Note: which thread compares checksums]. Needs the lock held, and releases the lock during the comparison. */
static void check(Core *core, Request *request)
{
    uint32_t expected;
    request->check = CHECKING;
    pthread_mutex_unlock(&core->lock);
    const char *changed = changed_page(request, &expected);
    pthread_mutex_lock(&core->lock);
    request->check = CHECKED;
    if (changed) {
        core->stats.num_errors++;
        request->error.code = expected ? EBADMSG : ENODATA;
        request->error.offset = request->offset + (changed - request->memory);
        request->error.asked = request->error.got = SUM_NBYTES;
    }
    pthread_cond_broadcast(&request->done);
}

int core_wait(Core *core, Request *request, int64_t until_ns)
{
    int done;
    pthread_mutex_lock(&core->lock);
    while (!(done = is_done(request) && request->check != CHECKING) && aio_now_ns() < until_ns)
        cond_wait_until(&request->done, &core->lock, until_ns);
    if (done && request->check == DUE)
        check(core, request);
    pthread_mutex_unlock(&core->lock);
    return done;
}

Request *core_take_finished(Core *core)
{
    pthread_mutex_lock(&core->lock);
    Request *first = core->finished;
    core->finished = NULL;
    for (Request *request = first; request; request = request->next)
        set_state(request, TAKEN);
    pthread_mutex_unlock(&core->lock);
    return first;
}

Stats core_stats(Core *core)
{
    clockid_t clock;
    struct timespec cpu;
    pthread_mutex_lock(&core->lock);
    Stats stats = core->stats;
    if (!core->exited && !pthread_getcpuclockid(core->thread, &clock) && !clock_gettime(clock, &cpu))
        stats.cpu_ns = (int64_t)cpu.tv_sec * 1000000000 + cpu.tv_nsec;
    if (stats.inflight_nbytes)
        stats.busy_ns += aio_now_ns() - core->busy_since_ns;
    pthread_mutex_unlock(&core->lock);
    return stats;
}

void core_close(Core *core)
{
    pthread_mutex_lock(&core->lock);
    core->closing = 1;
    if (core->has_thread && !core->exited)
        wake(core);
    pthread_mutex_unlock(&core->lock);
}

int core_exited(Core *core, int64_t until_ns)
{
    if (!core->has_thread)
        return 1;
    pthread_mutex_lock(&core->lock);
    while (!core->exited && aio_now_ns() < until_ns)
        cond_wait_until(&core->exited_cond, &core->lock, until_ns);
    int exited = core->exited, must_join = exited && !core->joined;
    if (must_join) {
        core->joined = 1;
        close(core->eventfd);
        core->eventfd = -1;
    }
    pthread_mutex_unlock(&core->lock);
    if (must_join)
        pthread_join(core->thread, NULL); /* the thread is past its last statement */
    return exited;
}
