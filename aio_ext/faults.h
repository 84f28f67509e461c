/* The kernel functions that a queue calls, as a table, and a second table that injects faults for tests.
 *
 * Knows libaio and eventfd. Must not know Python, queues or requests. */
#ifndef AIO_EXT_FAULTS_H
#define AIO_EXT_FAULTS_H

#include <libaio.h>
#include <stdint.h>
#include <time.h>

struct aio_calls {
    int (*setup)(int depth, io_context_t *context);
    int (*submit)(io_context_t context, long count, struct iocb **iocbs);
    int (*getevents)(io_context_t context, long least, long most, struct io_event *events, struct timespec *timeout);
    int (*destroy)(io_context_t context);
    /* Returns when the eventfd is signalled, or after timeout_ns (below 0: no limit). */
    void (*sleep)(int eventfd, int64_t timeout_ns);
};

extern struct aio_calls aio_kernel;       /* the default; filled by aio_kernel_load */
extern const struct aio_calls aio_faulty; /* the same with the rules below applied */

/* Loads libaio, see [Note: libaio at run time] in faults.c. Returns NULL, or why libaio is missing. From any thread; the first call decides. */
const char *aio_kernel_load(void);

enum aio_call { AIO_SETUP, AIO_SUBMIT, AIO_GETEVENTS, AIO_DESTROY, AIO_READ, AIO_WRITE, AIO_NUM_CALLS };
enum aio_effect { AIO_PASS, AIO_RESULT, AIO_MISSING, AIO_FRACTION };

/* For AIO_READ and AIO_WRITE a call is one block that goes to the kernel; for the others, one system call.
 * The rule applies to the calls number nth, nth + every, ..., at most `times` of them (below 0: all). */
struct aio_rule {
    enum aio_call call;
    enum aio_effect effect;
    long long value;  /* AIO_RESULT: the return value; AIO_MISSING: bytes fewer than asked */
    double fraction;  /* AIO_FRACTION: of the bytes asked */
    int64_t delay_ns; /* the block reaches the kernel this much later */
    int fd;           /* -1: all blocks; otherwise blocks of this fd, as on a slow drive: delay_ns per MiB, one block after the other */
    long nth, times, every;
    long seen, fired;
    int64_t last_due_ns;
};

int aio_fault_add(const struct aio_rule *rule); /* -1: the table is full */
long aio_fault_clear(void);                     /* returns how many calls met a rule since the last clear */

int64_t aio_now_ns(void);
void aio_direct_alignment(int fd, unsigned *memory, unsigned *offset);

#endif
