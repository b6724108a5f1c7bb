/* Storing: vectors in float16. */
#include "loops.h"
#ifdef BY_PROCESSOR
#include <immintrin.h>
#endif

/* The nearest float16, ties to even. */
static inline uint16_t half(float x) {
    uint32_t bits, small, sign;
    float tiny;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    memcpy(&tiny, &bits, 4);
    tiny += 0.5f; /* its last bits are then those of a subnormal float16, rounded by the processor */
    memcpy(&small, &tiny, 4);
    const uint32_t normal = (bits + 0xfffu + (bits >> 13 & 1u) - (112u << 23)) >> 13;
    const uint32_t finite = bits < 113u << 23 ? small - 0x3f000000u : normal;
    const uint32_t special = bits > 0x7f800000u ? 0x7e00u : 0x7c00u; /* not a number; infinite, or 65520 and more */
    return (uint16_t)(sign | (bits < 0x477ff000u ? finite : special));
}

LOOP void plain_halves(const float *restrict x, float scale, uint16_t *restrict out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = half(x[i] * scale);
}

#ifdef BY_PROCESSOR
/* The same by an instruction, where there is one; gives how many it has done. */
__attribute__((target("avx,f16c"))) static int64_t halves_at_once(const float *x, float scale, uint16_t *out, int64_t n) {
    const __m256 by = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(x + i), by), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#endif

typedef struct {
    int64_t d;
    const float *vectors, *scales;
    uint16_t *out;
} Vectors;

static void some_vectors(void *what, int64_t low, int64_t high, int part) {
    const Vectors *all = what;
    (void)part;
    for (int64_t row = low; row < high; row++) {
        const float *x = all->vectors + row * all->d;
        uint16_t *out = all->out + row * all->d;
        int64_t done = 0;
#ifdef BY_PROCESSOR
        if (__builtin_cpu_supports("avx2")) done = halves_at_once(x, all->scales[row], out, all->d);
#endif
        plain_halves(x + done, all->scales[row], out + done, all->d - done);
    }
}

/* out (n, d) = vectors (n, d) × scales (n), in float16. */
void halves(int64_t n, int64_t d, const float *vectors, const float *scales, uint16_t *out, int64_t threads) {
    Vectors all = {d, vectors, scales, out};
    in_parts(some_vectors, &all, n, n * d < WORTH ? 1 : threads);
}
