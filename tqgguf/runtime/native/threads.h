/* A small pool of threads of our own; see threads.c. */
#ifndef TQ_THREADS_H
#define TQ_THREADS_H

/* Does unit 0 .. n_units - 1 of some work; `worker` tells apart the threads that are at it at the same time. */
typedef void tq_work_fn(void *context, int unit, int worker);

/* Call work for every unit, on the caller's thread and up to tq_threads() - 1 others; returns when all are done. Which
 * thread gets which unit changes from call to call. */
void tq_share(int n_units, tq_work_fn *work, void *context);

#endif
