/* An I/O queue without Python: requests, their order, and the I/O thread that moves their bytes with libaio.
 *
 * Knows file descriptors, memory and offsets. Must not know Python: `owner` of a request keeps the memory alive.
 *
 * [Note: fields and the lock] Core has three groups of fields. The first is constant after core_start. The lock guards the second, from
 * `lock` on, and all submitted requests. Only the I/O thread uses the third, from `blocks` on. A request belongs to its owner before
 * core_submit, and again after core_take_finished has returned it. */
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

/* Whether the checksums of a read are compared: DUE -> CHECKING -> CHECKED, see [Note: which thread compares checksums]. */
enum check { CHECKED, DUE, CHECKING };

typedef struct request Request;
struct request {
    void *owner; /* set by the caller */
    int fd, is_write, priority;
    char *memory;
    long long offset;
    size_t nbytes;
    const uint32_t *sums; /* of a read: the expected CRC-32C of each 4096 bytes, 0 where nothing was written; NULL: no check */
    struct { /* the failure with the lowest offset; code 0: none */
        int code;
        long long offset, got;
        size_t asked;
        unsigned memory_alignment, offset_alignment; /* EINVAL of an O_DIRECT file only */
    } error;

    enum state state;
    enum check check;
    Request *older, *newer; /* list of unfinished requests, in order of submission */
    Request *before, *next; /* list of one priority; `next` also links `finished`, the pool and the work list of spread() */
    uint64_t number;        /* of submission */
    size_t issued_nbytes;   /* already given to blocks */
    int num_blocks;         /* blocks that carry a part of this request */
    size_t num_blockers, num_dependents; /* see [Note: a read sees the last write] */
    pthread_cond_t done;
};

typedef struct {
    uint64_t read_nbytes, write_nbytes, num_reads, num_writes, num_blocks, num_repeats, num_errors, num_wakeups, num_submits;
    size_t queued_nbytes, inflight_nbytes, inflight_write_nbytes, peak_inflight_nbytes;
    int64_t submit_ns, cpu_ns, busy_ns; /* busy: while there are bytes in flight */
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
    int broken; /* the errno that made the context unusable; 0: none */
    int num_inflight_writes; /* blocks */
    int64_t busy_since_ns;   /* valid while there are bytes in flight */
    Stats stats;

    struct block *blocks; /* an array of `depth` elements */
    int free_block, first_repeat;
    struct iocb **batch;
    struct io_event *events;
} Core;

/* Sets the table of system calls for all queues; the default is aio_kernel. aio_kernel_load must succeed before core_start. */
void core_use(const struct aio_calls *calls);

Core *core_new(size_t block_nbytes, size_t inflight_limit, size_t inflight_write_limit, int depth); /* NULL: no memory */
int core_start(Core *core);  /* makes context, blocks, thread; returns 0 or an errno; may halve depth */
void core_free(Core *core);  /* after core_exited, and after core_request_free of every request */

Request *core_request_new(Core *core); /* NULL: no memory */
void core_request_free(Core *core, Request *request);
int core_submit(Core *core, Request *request); /* 0; -1: the queue is closed; or the errno that broke the queue */
void core_promote(Core *core, Request *request, int priority);
int core_is_done(Core *core, const Request *request); /* finished, and no thread reads the memory */
int core_wait(Core *core, Request *request, int64_t until_ns); /* whether the request is done; compares due checksums */
Request *core_take_finished(Core *core);                       /* a list, linked by next */
Stats core_stats(Core *core);

void core_close(Core *core);                        /* refuses new requests; the thread ends after the last one */
int core_exited(Core *core, int64_t until_ns);      /* whether the thread has ended; joins an ended thread */

#endif
