/* Replaying the updates of an optimizer. */
#include "loops.h"

enum { BLOCK = 2048 }; /* elements of a matrix, which stay in the first cache */

LOOP void scale(float *x, float factor, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

LOOP void one_pass(int64_t n, float keep_v, float take_v, float take_m, float size, float eps, const float *gradient,
                   const float *kept, float *restrict v, float *restrict m, float *restrict w) {
    for (int64_t i = 0; i < n; i++) {
        v[i] = keep_v * v[i] + take_v * (gradient[i] * gradient[i]);
        m[i] += take_m * (kept[i] - m[i]);
        w[i] -= size * m[i] / (sqrtf(v[i]) + eps);
    }
}

/* One update of Adam or AdamW, n elements of a weight w and its moments m and v:

     v ← keep_v·v + take_v·gradient²;   m ← m + take_m·(kept − m);   w ← shrink·w − size·m / (√v + eps)

   gradient: what the optimizer saw; kept: the part of it that a mask keeps, or the same. take_m < 1/2. */
void adam(int64_t n, float keep_v, float take_v, float take_m, float shrink, float size, float eps, const float *gradient,
          const float *kept, float *v, float *m, float *w) {
    for (int64_t low = 0; low < n; low += BLOCK) {
        const int64_t some = n - low < BLOCK ? n - low : BLOCK;
        /* In a loop of its own, so that shrink·w is rounded, as it was in the training: most of the dual's gap comes from here */
        if (shrink != 1) scale(w + low, shrink, some);
        one_pass(some, keep_v, take_v, take_m, size, eps, gradient + low, kept + low, v + low, m + low, w + low);
    }
}
