/* See core.h. The order: records, order of requests, the I/O thread, what callers use.
 *
 * Longer than other files here because the order of requests, the thread and its callers share one lock and one set of lists.
 *
 * [Note: a read sees the last write] A request starts only when no earlier unfinished request on the same fd overlaps
 * its bytes with either of the two being a write. Each such pair is found when the later one is submitted (it
 * counts its blockers) and again when the earlier one finishes (it uncounts them): `unfinished` is in order of
 * submission and ranges never change, so both walks find the same pairs and no edge is stored. A blocker's priority
 * is never behind that of a request it blocks: submit and promote see to it, through chains, so a promoted read is
 * not left behind a queue of writes. Blockers are always older, so nothing waits in a circle.
 *
 * [Note: when a transfer is repeated] Each completion is compared, signed, with what was asked. Less: the rest is
 * submitted again, from a multiple of the direct alignment (O_DIRECT cannot go on from elsewhere); MAX_BARREN
 * completions in a row without one aligned unit gained are EIO. Nothing: EIO at once. EAGAIN and EINTR, whether from the
 * submit or from the completion: again after a pause that doubles to 64 ms, for at most a second without progress.
 * Anything else is the request's error: its other blocks are not started, and those with the kernel are waited for.
 *
 * [Note: who checks what was read] Whoever first waits for a read that has sums compares them, once and without the lock; others
 * who wait for it wait for that, too. So no bytes are used unchecked, the I/O thread has nothing to do with it, and the work is spread over
 * threads that would wait anyway. The sums are a copy from when the read was submitted: a later write, which has to wait for
 * the read, may be over before the check is. What nobody waits for is never checked. */
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
#define MAX_BARREN 3                /* transfers in a row that gained nothing */
#define PAUSE_NS ((int64_t)1000000) /* after EAGAIN, doubled up to 64 times that */
#define PATIENCE_NS ((int64_t)1000000000)
#define TURN_NS 100000              /* the shortest that Linux gives */
/* Of the blocks of a submit the kernel makes one request where they lie side by side. That helps small ones; but a few requests of
 * several MiB are done all at once, and leave the drive idle until the next come. */
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
    int64_t pause_ns;       /* the last one; 0: none since it got on */
    int64_t hindered_ns;    /* since when EAGAIN comes back */
    int64_t due_ns;         /* not submitted again before */
    int next;               /* in `free_block` or `repeats`; -1: the end */
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
    publish(core, request);
}

/* No further block of it is made. */
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

/* See [Note: when a transfer is repeated]. With the lock held; the block is no longer with the kernel. */
static void block_done(Core *core, Block *block, long long result)
{
    Request *request = block->request;
    core->stats.inflight_nbytes -= block->nbytes;
    core->stats.inflight_write_nbytes -= request->is_write ? block->nbytes : 0;
    core->num_inflight_writes -= request->is_write;
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

/* One block always may go, whatever its size. */
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

/* Whose next block goes to the kernel: the most urgent request's. But where that reads, a write of the last priority goes first while
 * writes have less than half of the kernel's room, in bytes and in blocks, and leave room for the read: reads would else overtake them
 * all, and the drive have nothing but reads, then nothing but writes; it moves more if it has both. */
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

/* Fills `batch` with what may go to the kernel now and returns how many; *sleep_ns is how long the thread may sleep if
 * it is none (below 0: until woken). With the lock held. */
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
            waiting |= block->due_ns <= now; /* for room: nothing smaller may take that */
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

/* How many of the blocks from there on go to the kernel in one call. */
static int submittable(const Core *core, int from, int count)
{
    size_t nbytes = core->batch[from]->u.c.nbytes;
    int end = from + 1;
    while (end < count && nbytes + core->batch[end]->u.c.nbytes <= MAX_SUBMIT_NBYTES)
        nbytes += core->batch[end++]->u.c.nbytes;
    return end - from;
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

/* After an error of the context itself: io_destroy has waited for the kernel, so all can fail. */
static void fail_all(Core *core, int code)
{
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

/* Beside threads that compute on all cores, who asks for short turns gets the next one sooner, here: when the drive has done something.
 * Linux before 6.12 pays no heed to it; where the call is refused all goes on as before. */
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
    atomic_load(&calls)->destroy(core->context); /* waits for what the kernel still has */
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

/* ---- what callers use, from any thread ---- */

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
    if (request->state != FREE) /* it was submitted */
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

/* Of a page whose sum is not the one expected; NULL: all are. */
static const char *changed_page(const Request *request, uint32_t *expected)
{
    const uint32_t *sum = request->sums;
    for (const char *page = request->memory, *end = page + request->nbytes; page < end; page += SUM_NBYTES, sum++)
        if (crc32c_page(page) != (*expected = *sum))
            return page;
    return NULL;
}

/* See [Note: who checks what was read]. With the lock held, which it lets go meanwhile. */
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
        pthread_join(core->thread, NULL); /* past its last statement */
    return exited;
}
