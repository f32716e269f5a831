/* A persistent pool: workers sleep on a condition variable between calls and take units off a common counter.
 *
 * A call that finds the pool busy (another Python thread is inside) does its work alone. After a fork the child has no
 * workers, whatever its copy of the pool says; it finds another process id and starts afresh. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <unistd.h>

#include "tqgguf.h"

enum { MAX_THREADS = 256, PATIENCE = 2000 };

struct pool {
    pthread_mutex_t busy; /* held by the call that uses the pool */
    pthread_mutex_t lock; /* guards the fields from here to `active` */
    pthread_cond_t work_given, work_done;
    int n_workers;      /* that were started */
    unsigned job;       /* counts calls; a worker takes part in each once */
    int is_open;        /* whether workers may still join the job */
    int n_wanted;       /* workers that the job wants */
    tq_work_fn *work;
    void *context;
    int n_units;
    atomic_int active;  /* workers inside the job */
    atomic_int next;    /* the next unit that nobody has taken */
};

#define FRESH_POOL                                                                                                   \
    {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .work_given = PTHREAD_COND_INITIALIZER,   \
     .work_done = PTHREAD_COND_INITIALIZER}

static struct pool pool = FRESH_POOL;
static _Atomic pid_t owner;
static atomic_int n_threads;

void tq_set_threads(int n)
{
    atomic_store(&n_threads, n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n);
}

int tq_threads(void)
{
    int n = atomic_load(&n_threads);
    return n < 1 ? 1 : n;
}

static void take_units(tq_work_fn *work, void *context, int n_units, int worker)
{
    int unit;
    while ((unit = atomic_fetch_add(&pool.next, 1)) < n_units)
        work(context, unit, worker);
}

static void *run_worker(void *number)
{
    int worker = (int)(intptr_t)number;
    unsigned seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.job == seen || !pool.is_open || worker > pool.n_wanted)
            pthread_cond_wait(&pool.work_given, &pool.lock);
        seen = pool.job;
        tq_work_fn *work = pool.work;
        void *context = pool.context;
        int n_units = pool.n_units;
        atomic_fetch_add(&pool.active, 1);
        pthread_mutex_unlock(&pool.lock);
        take_units(work, context, n_units, worker);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.active, 1) == 1)
            pthread_cond_signal(&pool.work_done);
    }
    return NULL;
}

/* With the lock held: have n workers, or as many as the system grants. */
static int start_workers(int n)
{
    while (pool.n_workers < n) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, run_worker, (void *)(intptr_t)(pool.n_workers + 1)) != 0)
            break;
        pthread_detach(thread);
        pool.n_workers++;
    }
    return pool.n_workers < n ? pool.n_workers : n;
}

static void start_afresh_after_fork(void)
{
    pid_t here = getpid(), before = atomic_load(&owner);
    if (before == here)
        return;
    if (before != 0)
        pool = (struct pool)FRESH_POOL;
    atomic_store(&owner, here);
}

void tq_share(int n_units, tq_work_fn *work, void *context)
{
    int n_helpers = (n_units < tq_threads() ? n_units : tq_threads()) - 1;
    start_afresh_after_fork();
    if (n_helpers <= 0 || pthread_mutex_trylock(&pool.busy) != 0) {
        for (int unit = 0; unit < n_units; unit++)
            work(context, unit, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.n_wanted = start_workers(n_helpers);
    pool.job++;
    pool.is_open = 1;
    pool.work = work;
    pool.context = context;
    pool.n_units = n_units;
    atomic_store(&pool.next, 0);
    pthread_cond_broadcast(&pool.work_given);
    pthread_mutex_unlock(&pool.lock);

    take_units(work, context, n_units, 0);
    /* All units are taken. A worker that has not woken up yet is not waited for: the job closes without it. */
    for (int i = 0; i < PATIENCE && atomic_load(&pool.active) > 0; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }
    pthread_mutex_lock(&pool.lock);
    pool.is_open = 0;
    while (atomic_load(&pool.active) > 0)
        pthread_cond_wait(&pool.work_done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}
