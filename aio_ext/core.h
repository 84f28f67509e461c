/* A queue without Python: requests, their order, and the I/O thread that moves their bytes with libaio.
 *
 * Knows file descriptors, memory and offsets. Must not know Python, which keeps the memory alive (`owner`).
 *
 * [Note: who guards what] Fields of Core are constant after core_start unless said otherwise; those after the lock and all of
 * a submitted request are guarded by it; the last group is the I/O thread's own. Before submit and after it was taken
 * from the finished list a request belongs to its owner. */
#ifndef AIO_EXT_CORE_H
#define AIO_EXT_CORE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "faults.h"

#define NUM_PRIORITIES 3

/* FREE -> BLOCKED;  BLOCKED -> RUNNABLE, or ISSUED when the queue breaks;  RUNNABLE -> ISSUED (all blocks made, or failed)
 * ISSUED -> FINISHED;  FINISHED -> TAKEN (by core_take_finished);  TAKEN -> FREE. */
enum state { FREE, BLOCKED, RUNNABLE, ISSUED, FINISHED, TAKEN, NUM_STATES };

/* What becomes of the sums of a read: DUE -> CHECKING -> CHECKED, see [Note: who checks what was read]. */
enum check { CHECKED, DUE, CHECKING };

typedef struct request Request;
struct request {
    void *owner; /* the caller's */
    int fd, is_write, priority;
    char *memory;
    long long offset;
    size_t nbytes;
    const uint32_t *sums; /* of a read: the CRC-32C that each 4096 bytes must have, 0 if nothing was written there; or NULL */
    struct { /* the failure with the lowest offset; code 0: none */
        int code;
        long long offset, got;
        size_t asked;
        unsigned memory_alignment, offset_alignment; /* EINVAL of an O_DIRECT file only */
    } error;

    enum state state;
    enum check check;
    Request *older, *newer; /* in order of submission, while unfinished */
    Request *before, *next; /* in its priority's list; next also in `finished`, the pool and the work list of spread() */
    uint64_t number;        /* of submission */
    size_t issued_nbytes;   /* given to blocks so far */
    int num_blocks;         /* blocks that carry a part of it */
    size_t num_blockers, num_dependents; /* see [Note: a read sees the last write] */
    pthread_cond_t done;
};

typedef struct {
    uint64_t read_nbytes, write_nbytes, num_reads, num_writes, num_blocks, num_repeats, num_errors, num_wakeups, num_submits;
    size_t queued_nbytes, inflight_nbytes, inflight_write_nbytes, peak_inflight_nbytes;
    int64_t submit_ns, cpu_ns;
} Stats;

typedef struct {
    size_t block_nbytes, inflight_limit, inflight_write_limit;
    int depth, eventfd, has_thread;
    pthread_t thread;
    io_context_t context;

    pthread_mutex_t lock;
    pthread_cond_t exited_cond;
    Request *oldest, *newest;
    Request *first[NUM_PRIORITIES], *last[NUM_PRIORITIES]; /* RUNNABLE ones */
    Request *finished;
    Request *free_request;
    struct pool *pools;
    uint64_t num_submitted;
    int asleep, closing, exited, joined;
    int broken; /* the errno after which the context cannot be used */
    int num_inflight_writes; /* blocks */
    Stats stats;

    struct block *blocks; /* depth of them */
    int free_block, first_repeat;
    struct iocb **batch;
    struct io_event *events;
} Core;

/* Whose system calls are used from now on: aio_kernel at first, which must have been loaded. */
void core_use(const struct aio_calls *calls);

Core *core_new(size_t block_nbytes, size_t inflight_limit, size_t inflight_write_limit, int depth); /* NULL: no memory */
int core_start(Core *core);  /* context, blocks, thread; 0 or an errno; may halve depth */
void core_free(Core *core);  /* after core_exited, and with all requests given back */

Request *core_request_new(Core *core); /* NULL: no memory */
void core_request_free(Core *core, Request *request);
int core_submit(Core *core, Request *request); /* 0; -1: the queue is closed; or the errno that broke it */
void core_promote(Core *core, Request *request, int priority);
int core_is_done(Core *core, const Request *request); /* nor is anybody looking at its memory */
int core_wait(Core *core, Request *request, int64_t until_ns); /* whether it is done, and checked */
Request *core_take_finished(Core *core);                       /* linked by next */
Stats core_stats(Core *core);

void core_close(Core *core);                        /* no more requests; the thread ends after the last one */
int core_exited(Core *core, int64_t until_ns);      /* whether the thread has ended; then it is joined, too */

#endif
