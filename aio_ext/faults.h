/* The kernel's side of a queue as a table of functions, and a second table that misbehaves when tests ask for it.
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
    /* Returns once the eventfd counts or timeout_ns is over (below 0: no limit). */
    void (*sleep)(int eventfd, int64_t timeout_ns);
};

extern struct aio_calls aio_kernel;       /* what everyone uses, once aio_kernel_load has filled it */
extern const struct aio_calls aio_faulty; /* the same with the rules below applied */

/* Finds libaio, see [Note: libaio at run time] in faults.c. NULL, or why it is not to be had. The first call decides, from any thread. */
const char *aio_kernel_load(void);

enum aio_call { AIO_SETUP, AIO_SUBMIT, AIO_GETEVENTS, AIO_DESTROY, AIO_READ, AIO_WRITE, AIO_NUM_CALLS };
enum aio_effect { AIO_PASS, AIO_RESULT, AIO_MISSING, AIO_FRACTION };

/* For AIO_READ and AIO_WRITE a call is one block handed to the kernel; for the others, one system call.
 * The calls number nth, nth + every, ... are met, `times` of them (below 0: all). */
struct aio_rule {
    enum aio_call call;
    enum aio_effect effect;
    long long value;  /* AIO_RESULT: what is returned; AIO_MISSING: bytes fewer than asked */
    double fraction;  /* AIO_FRACTION: of the bytes asked */
    int64_t delay_ns; /* the block reaches the kernel that much later */
    int fd;           /* only blocks of this one, a slow drive then: the delay is for a MiB, behind the block before; -1: all */
    long nth, times, every;
    long seen, fired;
    int64_t last_due_ns;
};

int aio_fault_add(const struct aio_rule *rule); /* -1: the table is full */
long aio_fault_clear(void);                     /* how many calls were met since the last clear */

int64_t aio_now_ns(void);
void aio_direct_alignment(int fd, unsigned *memory, unsigned *offset);

#endif
