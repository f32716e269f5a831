/* A persistent pool: workers take units off a common counter. After a call they look out for the next one for a while,
 * since those of a decode step follow each other closely and a sleeping thread takes longer to wake than a product
 * lasts; then they sleep on a condition variable.
 *
 * A call that finds the pool busy (another Python thread is inside) does its work alone. After a fork the child has no
 * workers, whatever its copy of the pool says; it finds another process id and starts afresh. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include "tqgguf.h"

enum { MAX_THREADS = 256, PATIENCE = 2000, LOOKS = 64 };
static const int64_t AWAKE_NS = 200000; /* how long a worker looks out for the next call: about a layer's Python */

struct pool {
    pthread_mutex_t busy; /* held by the call that uses the pool */
    pthread_mutex_t lock; /* of those who sleep: workers without a job, a caller whose workers take long */
    pthread_cond_t work_given, work_done;
    int n_workers;       /* that were started */
    atomic_uint job;     /* counts calls; a worker takes part in each once */
    atomic_int is_open;  /* whether workers may still join the job, whose fields then stand still */
    atomic_int n_wanted; /* workers that the job wants */
    atomic_int n_asleep;
    atomic_int active;   /* workers inside the job, or about to find it closed */
    tq_work_fn *work;
    void *context;
    int n_units;
    atomic_int next;     /* the next unit that nobody has taken */
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

static void look_again_soon(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* The number of a job other than `seen`: found while awake, where the last one had a place for this worker, or
 * asleep. */
static unsigned await_job(unsigned seen, int worker)
{
    if (worker <= atomic_load(&pool.n_wanted)) {
        int64_t until = now_ns() + AWAKE_NS;
        do
            for (int i = 0; i < LOOKS; i++) {
                if (atomic_load(&pool.job) != seen)
                    return atomic_load(&pool.job);
                look_again_soon();
            }
        while (now_ns() < until);
    }
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.n_asleep, 1);
    while (atomic_load(&pool.job) == seen)
        pthread_cond_wait(&pool.work_given, &pool.lock);
    atomic_fetch_sub(&pool.n_asleep, 1);
    pthread_mutex_unlock(&pool.lock);
    return atomic_load(&pool.job);
}

static void *run_worker(void *number)
{
    int worker = (int)(intptr_t)number;
    unsigned seen = 0;
    for (;;) {
        seen = await_job(seen, worker);
        if (worker > atomic_load(&pool.n_wanted))
            continue;
        atomic_fetch_add(&pool.active, 1); /* before looking whether it is open: the caller looks the other way round */
        if (atomic_load(&pool.is_open)) {
            seen = atomic_load(&pool.job);
            take_units(pool.work, pool.context, pool.n_units, worker);
        }
        if (atomic_fetch_sub(&pool.active, 1) == 1) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.work_done);
            pthread_mutex_unlock(&pool.lock);
        }
    }
    return NULL;
}

/* With `busy` held: have n workers, or as many as the system grants. */
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
    pool.work = work;
    pool.context = context;
    pool.n_units = n_units;
    atomic_store(&pool.next, 0);
    atomic_store(&pool.n_wanted, start_workers(n_helpers));
    atomic_store(&pool.is_open, 1);
    atomic_fetch_add(&pool.job, 1);
    if (atomic_load(&pool.n_asleep) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.work_given);
        pthread_mutex_unlock(&pool.lock);
    }

    take_units(work, context, n_units, 0);
    /* All units are taken. A worker that has not woken up yet is not waited for: the job closes without it. */
    atomic_store(&pool.is_open, 0);
    for (int i = 0; i < PATIENCE && atomic_load(&pool.active) > 0; i++)
        look_again_soon();
    if (atomic_load(&pool.active) > 0) {
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.active) > 0)
            pthread_cond_wait(&pool.work_done, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
    }
    pthread_mutex_unlock(&pool.busy);
}
