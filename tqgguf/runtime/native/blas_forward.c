/* Exports the plain CBLAS names that libmlx imports and hands each call to scipy-openblas32, whose symbols carry a
 * prefix. Loaded with RTLD_GLOBAL before mlx, it stands before the slow reference BLAS in the symbol search order.
 * The scipy_ symbols are left undefined here on purpose: tqgguf/runtime/attention/blas.py loads their library first. */

#define EXPORT __attribute__((visibility("default")))

#define FORWARD_REAL(name, real)                                                                              \
    void scipy_##name(int, int, int, int, int, int, real, const real *, int, const real *, int, real, real *, \
                      int);                                                                                   \
    EXPORT void name(int order, int trans_a, int trans_b, int m, int n, int k, real alpha, const real *a,     \
                     int lda, const real *b, int ldb, real beta, real *c, int ldc)                            \
    {                                                                                                         \
        scipy_##name(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                  \
    }

FORWARD_REAL(cblas_sgemm, float)
FORWARD_REAL(cblas_dgemm, double)

void scipy_cblas_cgemm(int, int, int, int, int, int, const void *, const void *, int, const void *, int, const void *,
                       void *, int);
EXPORT void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a,
                        int lda, const void *b, int ldb, const void *beta, void *c, int ldc)
{
    scipy_cblas_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
