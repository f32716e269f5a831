/* Which path serves: the best that the machine has, or the one that was asked for. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "path.h"

static _Atomic(const struct tq_path *) selected;

/* Every path of this build that this machine can run, the best one first. */
static int runnable_paths(const struct tq_path *paths[3])
{
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        paths[n++] = &tq_path_avx512;
    if (avx2)
        paths[n++] = &tq_path_avx2;
#elif defined(__aarch64__)
    paths[n++] = &tq_path_neon;
#endif
    paths[n++] = &tq_path_portable;
    return n;
}

const struct tq_path *tq_path(void)
{
    const struct tq_path *path = atomic_load_explicit(&selected, memory_order_relaxed);
    if (path == NULL) {
        const struct tq_path *paths[3];
        runnable_paths(paths);
        path = paths[0];
        atomic_store_explicit(&selected, path, memory_order_relaxed);
    }
    return path;
}

int tq_select_path(const char *name)
{
    const struct tq_path *paths[3];
    int n = runnable_paths(paths);
    for (int i = 0; i < n; i++)
        if (name[0] == '\0' || strcmp(paths[i]->name, name) == 0) {
            atomic_store(&selected, paths[i]);
            return 0;
        }
    return -1;
}

const char *tq_path_name(void)
{
    return tq_path()->name;
}

int tq_abi_version(void)
{
    return TQ_ABI_VERSION;
}
